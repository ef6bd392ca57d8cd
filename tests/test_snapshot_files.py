"""A snapshot in a file: every byte of the state comes back, whatever the page size, and nothing that contradicts itself does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import safetensors.numpy

from fermi_engine import Engine, EngineConfig
from fermi_engine.convert import convert
from fermi_engine.errors import SnapshotError
from fermi_engine.snapshots import files as snapshot_files
from fermi_engine.snapshots import sealed_file
from fermi_engine.snapshots.cache import Snapshot
from fermi_engine.snapshots.files import SnapshotFile, memory_bytes, read_info, read_snapshot, tensor_bytes
from fermi_engine.snapshots.prefix import ImageSpan, NumericPath, Prefix
from fermi_engine.state import KVPages
from tools.make_checkpoint import make_checkpoint

KV_BLOCK = 64
SIZES = {"layers": 4, "experts": 4, "experts_per_tok": 2}


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    return convert(make_checkpoint(directory / "checkpoint", seed=5, key_dim=32, **SIZES), directory / "model.pack")


@pytest.fixture(scope="module")
def engine(pack):
    return Engine.load(pack, config=EngineConfig(threads=1, kv_block=KV_BLOCK))


def numeric(engine: Engine) -> NumericPath:
    return NumericPath.of(engine.pack_hash, engine.options)


def snapshot_of(engine: Engine, ids, with_logits: bool = True, **changes) -> Snapshot:
    """After a prefill of `ids` (none: the state before the first token)."""
    session = engine.session()
    logits = session.prefill(ids) if len(ids) else None
    made = Snapshot(Prefix(ids, numeric(engine)), session.state.copy(), logits.copy() if with_logits and len(ids) else None)
    return dataclasses.replace(made, **changes)


def ids_for(engine: Engine, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, engine.config.vocab_size, count).tolist()


def save(path, snapshot: Snapshot, extra=None):
    file = SnapshotFile(snapshot, extra)
    with open(path, "wb") as target:
        file.write(target.fileno())
    assert path.stat().st_size == file.nbytes
    assert 0 <= file.nbytes - tensor_bytes(snapshot) < 4096 + len(snapshot.state.layers) * 2048
    return path


def load(path, engine: Engine, kv_block: int = KV_BLOCK) -> Snapshot:
    return read_snapshot(path, engine.config, numeric(engine), kv_block)


def raw(snapshot: Snapshot) -> dict[str, bytes]:
    """Everything in a snapshot by name, as bytes; keys and values as they are kept."""
    state = snapshot.state
    found = {name: array.tobytes() for name, array in state.arrays().items()}
    for i, layer in enumerate(state.layers):
        if isinstance(layer, KVPages):
            found |= {f"{i}.{name}": rows.tobytes() for name, rows in zip("kv", layer.rows(state.position), strict=True)}
    chunks = state.current_chunks()
    for i, arrays in chunks.layers.items() if chunks else ():
        found |= {f"open.{i}.{name}": array.tobytes() for name, array in arrays.items()}
    logits = b"" if snapshot.logits is None else snapshot.logits.tobytes()
    return {**found, "ids": snapshot.prefix.ids.tobytes(), "logits": logits}


@pytest.mark.parametrize("kv_format", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 63, 64, 65, 200])
def test_every_byte_comes_back_whatever_the_page_size(pack, tmp_path, kv_format, count):
    for written in (5, KV_BLOCK):
        engine = Engine.load(pack, config=EngineConfig(threads=1, kv_block=written, kv_format=kv_format))
        before = snapshot_of(engine, ids_for(engine, count), kind="turn", trail=((count, "cpu"),) if count else ())
        path = save(tmp_path / f"{written}.safetensors", before)
        for page in (1, 7, KV_BLOCK, 500):
            after = load(path, engine, page)
            assert raw(after) == raw(before)
            assert (after.kind, after.trail, after.prefix) == (before.kind, before.trail, before.prefix)
            assert {layer.page_tokens for layer in after.state.layers if isinstance(layer, KVPages)} == {page}


def test_page_size_leaves_no_trace_in_the_tensors(pack, tmp_path):
    files = []
    for page in (3, KV_BLOCK):
        engine = Engine.load(pack, config=EngineConfig(threads=1, kv_block=page))
        path = save(tmp_path / f"{page}.safetensors", snapshot_of(engine, ids_for(engine, 70)))
        files.append({name: array.tobytes() for name, array in safetensors.numpy.load_file(path).items() if name != "_seal"})
    assert files[0] == files[1]


def test_an_open_chunk_of_gpu_prefill_comes_back(pack, tmp_path):
    """What follows has the bits of a session that was never stopped."""
    engine = Engine.load(pack, config=EngineConfig(threads=1, prefill="gpu", device="emulated", activations="f32"))
    ids = ids_for(engine, 170)
    whole = engine.session()
    whole.prefill(ids[:100])
    before = Snapshot(whole.prefix, whole.state.copy(), None, "end", whole.trail)
    assert before.state.current_chunks().tokens == 100 % 64
    after = load(save(tmp_path / "open.safetensors", before), engine)
    assert raw(after) == raw(before)
    resumed = engine.session()
    resumed.restore(after)
    assert np.array_equal(resumed.prefill(ids[100:]), whole.prefill(ids[100:]))
    assert raw(dataclasses.replace(before, state=resumed.state)) == raw(dataclasses.replace(before, state=whole.state))


def test_images_and_extra_metadata_come_back(engine, tmp_path):
    ids = ids_for(engine, 20)
    images = (ImageSpan(2, 9, bytes(range(32))), ImageSpan(15, 30, bytes(32)))  # the second is cut by the end
    prefix = Prefix(ids, numeric(engine), images)
    before = snapshot_of(engine, ids, prefix=prefix, shift=-7)
    path = save(tmp_path / "x.safetensors", before, {"session": 'é "quoted"\n'})
    assert (load(path, engine).prefix, load(path, engine).shift) == (prefix, -7)
    info = read_info(path)
    assert (info.position, info.digest, info.images) == (20, prefix.digest(), images)
    assert info.extra == {"session": 'é "quoted"\n'}


def test_the_safetensors_library_reads_tokens_states_and_metadata(engine, tmp_path):
    ids = ids_for(engine, 30)
    before = snapshot_of(engine, ids)
    path = save(tmp_path / "x.safetensors", before)
    found = safetensors.numpy.load_file(path)
    assert found["tokens"].tolist() == ids
    state = before.state.arrays()
    for name in state:
        if name.endswith((".conv", ".recurrent")):
            assert np.array_equal(found[name], state[name])
        elif name != "position":
            assert np.array_equal(found[name].view(np.float32).transpose(1, 0, 2), state[name])
    with safetensors.safe_open(path, "np") as file:
        said = file.metadata()
    assert said["format"] == snapshot_files.FORMAT
    assert (said["path.pack_hash"], said["path.version"], said["position"]) == (engine.pack_hash, "0.1.0", "30")


@pytest.mark.parametrize("page", [1, 7, KV_BLOCK, 4096])
@pytest.mark.parametrize("count", [1, 64, 300])
def test_the_memory_of_a_loaded_snapshot_is_known_before(engine, tmp_path, count, page):
    """Room is made for it beforehand: never too little, and too much only by what page tables may grow."""
    path = save(tmp_path / "x.safetensors", snapshot_of(engine, ids_for(engine, count)))
    promised = memory_bytes(read_info(path), engine.config, page)
    taken = sum(load(path, engine, page).memory().values())
    tables = engine.config.layer_types.count("full_attention") * 2 * 8 * 2 * (count // page + 1)
    assert taken <= promised <= taken + tables


def test_a_loaded_snapshot_has_no_pages_to_spare_and_can_go_on(engine, tmp_path):
    ids = ids_for(engine, 80)
    path = save(tmp_path / "x.safetensors", snapshot_of(engine, ids[:64]))
    session = engine.session()
    session.restore(load(path, engine))
    assert np.array_equal(session.prefill(ids[64:]), engine.session().prefill(ids))


# what is refused


@pytest.mark.parametrize(("change", "words"), [
    ({"pack_hash": "ab" * 32}, "belongs to pack 'ababababab"), ({"version": "0.0.9"}, r"engine version '0\.0\.9', this is '0"),
    ({"activations": "f32"}, "activations 'f32', this is 'q8_0'"), ({"kv_format": "f16"}, "key/value format 'f16'"),
    ({"prefill": "gpu vendor cuda"}, "prefill path 'gpu vendor cuda', this is 'cpu'"),
])
def test_a_snapshot_of_something_else_is_refused(engine, tmp_path, change, words):
    ids = ids_for(engine, 5)
    other = dataclasses.replace(numeric(engine), **change)
    path = save(tmp_path / "x.safetensors", snapshot_of(engine, ids, prefix=Prefix(ids, other)))
    with pytest.raises(SnapshotError, match=words) as caught:
        load(path, engine)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def forged(path, engine: Engine, metadata=None, ids=None, drop=None):
    """A file with a good seal whose content is not what we would write."""
    snapshot = snapshot_of(engine, ids_for(engine, 5))
    tensors = [t for t in snapshot_files._tensors(snapshot) if t.name != drop]
    if ids is not None:
        tensors[0] = sealed_file.tensor("tokens", np.array(ids, np.int32))
    meta = {**snapshot_files._metadata(snapshot, {}), **(metadata or {})}
    planned = sealed_file.plan(tensors, {name: text for name, text in meta.items() if text is not None})
    with open(path, "wb") as file:
        sealed_file.write(file.fileno(), planned, tensors)
    return path


@pytest.mark.parametrize(("change", "words"), [
    ({"metadata": {"format": "fermi-engine-pack"}}, "no snapshot: its format is 'fermi-engine-pack'"),
    ({"metadata": {"format_version": "2"}}, "snapshot format '2', this engine reads 1"),
    *(({"metadata": {name: None}}, "KeyError in its metadata") for name in ("position", "prefix", "kind", "trail", "images",
                                                                          "open_tokens", "path.prefill", "created_s")),
    *(({"metadata": {name: text}}, "(ValueError|JSONDecodeError) in its metadata") for name, text in (
        ("position", "6"), ("position", "-5"), ("position", "x"), ("kind", "whole"), ("open_tokens", "6"), ("open_tokens", "-1"),
        ("prefix", "zz"), ("images", "[[3, 2, \"00\"]]"), ("images", "["), ("trail", "[[1, 2, 3]]"),
        ("shift", "-6"), ("shift", "1"), ("shift", "x"))),
    ({"metadata": {"images": "7"}}, "TypeError in its metadata"),
    ({"metadata": {"open_tokens": "3"}}, r"tensor open\.0\.state is absent"),
    ({"metadata": {"prefix": "00" * 32}}, "contradicts itself"),
    ({"ids": [1, 2, 3, 4, 5]}, "contradicts itself"),
    ({"ids": [1, 2, 3, 4, -1]}, "token outside the vocabulary of"),
    ({"ids": [1, 2, 3, 4, 100000]}, "token outside the vocabulary of"),
    ({"drop": "tokens"}, "KeyError in its metadata"),
    ({"drop": "layers.3.v"}, r"tensor layers\.3\.v is absent"),
])
def test_a_file_that_contradicts_itself_is_refused(engine, tmp_path, change, words):
    with pytest.raises(SnapshotError, match=words) as caught:
        load(forged(tmp_path / "x.safetensors", engine, **change), engine)
    assert "\n" not in str(caught.value)


def test_the_forger_can_write_good_files(engine, tmp_path):
    ids = ids_for(engine, 5)
    assert load(forged(tmp_path / "x.safetensors", engine, ids=ids), engine).tokens == tuple(ids)


def test_a_state_of_other_shapes_is_refused(engine, tmp_path):
    """The pack's seal names the shapes; a file that lies about its pack is caught by them."""
    directory = tmp_path / "other"
    other = Engine.load(convert(make_checkpoint(directory, seed=5, key_dim=16, **SIZES), tmp_path / "other.pack"))
    ids = ids_for(engine, 5)
    path = save(tmp_path / "x.safetensors", snapshot_of(other, ids, prefix=Prefix(ids, numeric(engine))))
    with pytest.raises(SnapshotError, match=r"tensor layers\.0\.conv is F32 .*, expected F32"):
        load(path, engine)
