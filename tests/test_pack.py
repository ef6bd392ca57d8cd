"""The pack file: layout, what `open` and `check` refuse, and a writer that is atomic and resumes to the same bytes."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors

from fermi_engine import pack_writer
from fermi_engine.convert import convert
from fermi_engine.errors import CheckpointError, FermiError, FormatError, PackError
from fermi_engine.formats import Matrix
from fermi_engine.pack import Pack
from fermi_engine.pack_writer import PackPlan, PackWriter, Slot, Wanted
from fermi_engine.safetensors_header import read_header
from tools.make_checkpoint import make_checkpoint

ROOT = Path(__file__).resolve().parents[1]
BLOB, MATRIX = "layers.1.mlp.experts.blob", "layers.0.linear_attn.out_proj.weight"
VECTOR = "layers.2.input_layernorm.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A q4_0 pack with q8_0 experts (down), f16 attention and an f32 image tower, so that every format is in it."""
    folder = tmp_path_factory.mktemp("pack")
    source = make_checkpoint(folder / "checkpoint", 3, layers=4)
    return convert(source, folder / "model.pack", rules="*.down_proj=q8_0,*.self_attn.o_proj.weight=f16,visual.*=f32")


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(made, tmp_path / "model.pack"))


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(PackError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    return text


def open_refusal(path: Path) -> str:
    return refusal(lambda: Pack.open(path))


def poke(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def tensor_offset(path: Path, name: str) -> int:
    header = read_header(path, PackError)
    return header.data_start + header.tensors[name].begin


def remake(path: Path, metadata: dict[str, str] | None = None, data: dict[str, bytes] | None = None,
           align: int | None = None, rename: dict[str, str] | None = None,
           shapes: dict[str, tuple[int, ...]] | None = None) -> Path:
    """The pack with some metadata, bytes, alignments, names or shapes changed, and a seal that matches the change."""
    header, raw = read_header(path, PackError), path.read_bytes()
    kept = {name: e for name, e in header.tensors.items() if not name.startswith(("_pad", "_seal"))}
    wanted = [Wanted((rename or {}).get(name, name), e.dtype, (shapes or {}).get(name, e.shape),
                     align or (4096 if name.endswith("blob") else 64)) for name, e in kept.items()]
    plan = PackPlan.build(wanted, {**header.metadata, **(metadata or {})})
    with PackWriter(path, plan) as writer:
        for slot, (name, e) in zip(list(writer.remaining()), kept.items(), strict=True):
            writer.put(slot.name, [(data or {}).get(name, raw[header.data_start + e.begin:header.data_start + e.end])])
        return writer.finish()


# What a finished pack is


def test_safetensors_reads_it_and_offsets_are_aligned(made: Path) -> None:
    header, raw = read_header(made, PackError), made.read_bytes()
    assert header.data_start % 4096 == 0
    blobs = 0
    with safetensors.safe_open(made, "np") as file:
        assert set(file.keys()) == set(header.tensors)
        assert file.metadata() == header.metadata
        for name, entry in header.tensors.items():
            stored = raw[header.data_start + entry.begin:header.data_start + entry.end]
            assert file.get_tensor(name).tobytes() == stored
            if name.startswith("_pad."):
                assert entry.dtype == "U8"
                assert not any(stored)
            else:
                assert entry.begin % 64 == 0, name
            if name.endswith("blob"):
                blobs += 1
                assert (header.data_start + entry.begin) % 4096 == 0
                assert entry.shape[1] % 4096 == 0
    assert blobs == 4
    assert list(header.tensors)[-1] == "_seal"


def test_names_formats_and_views(made: Path) -> None:
    with Pack.open(made) as pack:
        assert pack.matrix(MATRIX).format == "q4_0"
        assert pack.matrix("layers.3.self_attn.o_proj.weight").format == "f16"
        gate_up, down = pack.expert(1, 15)
        assert (gate_up.format, gate_up.rows, gate_up.cols) == ("q4_0", 64, 64)
        assert (down.format, down.rows, down.cols) == ("q8_0", 64, 32)
        assert pack.vector(VECTOR).shape == (64,)
        assert pack.vector("layers.0.mlp.gate.weight").shape == (16, 64)
        assert pack.matrix("layers.0.mlp.gate.weight").format == "f32"
        for array in (gate_up.data, down.data, pack.matrix(MATRIX).data, pack.vector(VECTOR)):
            assert np.shares_memory(array, pack._mapping)
            assert not array.flags.writeable
            assert array.ctypes.data % 64 == 0
        assert (gate_up.data.ctypes.data - pack._mapping.ctypes.data) % 4096 == 0
        assert not any(name.startswith("_") for name in pack.names)
        assert {BLOB, MATRIX, VECTOR} <= set(pack.names)
        assert sorted(pack.files()) == ["chat_template.jinja", "generation_config.json", "preprocessor_config.json",
                                        "tokenizer.json", "tokenizer_config.json"]


def test_blob_row_is_gate_up_then_down_then_zeros(made: Path) -> None:
    with safetensors.safe_open(made, "np") as file:
        blob, meta = file.get_tensor(BLOB), json.loads(file.metadata()["tensors"])[BLOB]
    with Pack.open(made) as pack:
        for e in range(16):
            expected = bytearray(meta["stride"])
            for part, matrix in zip((meta["gate_up"], meta["down"]), pack.expert(1, e), strict=True):
                assert part["offset"] % 64 == 0
                expected[part["offset"]:part["offset"] + matrix.nbytes] = matrix.data.tobytes()
            assert blob[e].tobytes() == bytes(expected)


def test_info_counts_every_weight_and_byte(made: Path) -> None:
    header = read_header(made, PackError)
    with Pack.open(made) as pack:
        info = pack.info()
        seal = header.data_start + header.tensors["_seal"].begin
        assert info["hash"] == pack.hash == made.read_bytes()[-32:].hex()
        assert len(made.read_bytes()) == info["bytes"] == seal + 32 * len(header.tensors)
        experts = [pack.expert(i, e) for i in range(4) for e in range(16)]
        assert info["formats"]["q8_0"]["bytes"] == sum(down.nbytes for _, down in experts)
        assert info["formats"]["q8_0"]["weights"] == 4 * 16 * 64 * 32
        assert info["formats"]["f16"] == {"tensors": 1, "weights": 64 * 128, "bytes": 2 * 64 * 128}
        shapes = sum(math.prod(pack.vector(n).shape) for n in pack.names if n not in pack._layout)
        f32 = sum(math.prod(pack.vector(n).shape) for n, p in pack._layout.items() if p[0] == "f32")
        assert info["formats"]["f32"]["weights"] == shapes + f32
        assert (info["experts"], info["expert_layers"], info["expert_stride"]) == (16, 4, 8192)


def test_views_outlive_close_and_the_pack_says_it_is_closed(made: Path) -> None:
    pack = Pack.open(made)
    matrix = pack.matrix(MATRIX)
    before = matrix.data.tobytes()
    pack.close()
    pack.close()
    assert matrix.data.tobytes() == before
    assert refusal(lambda: pack.matrix(MATRIX)) == f"{made} was closed; open it again"
    assert refusal(pack.check) == f"{made} was closed; open it again"


def test_asking_for_what_is_not_there(made: Path) -> None:
    with Pack.open(made) as pack:
        assert refusal(lambda: pack.vector("layers.9.norm.weight")) == (
            f"{made} has no tensor layers.9.norm.weight; it was made for another model")
        assert refusal(lambda: pack.vector(MATRIX)) == (
            f"{made}: {MATRIX} is quantised, not f32; this engine reads it otherwise, convert the checkpoint again")
        assert refusal(lambda: pack.vector(BLOB)) == (
            f"{made}: {BLOB} is quantised, not f32; this engine reads it otherwise, convert the checkpoint again")
        for name in (BLOB, VECTOR):
            assert refusal(lambda name=name: pack.matrix(name)) == (
                f"{made}: {name} is no single matrix; this engine reads it otherwise, convert the checkpoint again")
        for expert in (-1, 16):
            with pytest.raises(IndexError, match=f"expert {expert} of 16"):
                pack.expert(1, expert)


# What `open` refuses


def test_truncated_and_overlong(copy: Path) -> None:
    data = copy.stat().st_size - read_header(copy, PackError).data_start
    os.truncate(copy, copy.stat().st_size - 100)
    assert open_refusal(copy) == (f"{copy} is truncated: expected {data} bytes of tensor data, found {data - 100}; "
                                  "fetch the file again")
    with open(copy, "ab") as file:
        file.write(bytes(101))
    assert open_refusal(copy) == (f"{copy} is longer than its header says: expected {data} bytes of tensor data, "
                                  f"found {data + 1}; fetch the file again")


def test_unfinished(copy: Path) -> None:
    size, part = copy.stat().st_size, copy.with_name("model.pack" + pack_writer.PART_SUFFIX)
    copy.rename(part)
    os.truncate(part, size - 5000)
    remedy = "run the same conversion again to finish it"
    assert open_refusal(part) == f"{part} is an unfinished pack: expected {size} bytes, found {size - 5000}; {remedy}"
    os.truncate(part, 100)
    assert open_refusal(part) == f"{part} is an unfinished pack: expected more bytes, found 100; {remedy}"


def test_other_things(tmp_path: Path) -> None:
    absent, gguf, short = tmp_path / "absent", tmp_path / "model.gguf", tmp_path / "short"
    gguf.write_bytes(b"GGUF\x03\0\0\0" + bytes(64))
    short.write_bytes(b"abc")
    assert open_refusal(tmp_path) == (
        f"{tmp_path} is a directory, not a pack; convert the checkpoint in it to a pack first")
    assert open_refusal(absent) == (
        f"cannot read {absent}: No such file or directory; give a pack made by `fermi-engine convert`")
    assert open_refusal(gguf) == f"{gguf} is a GGUF file, not a pack; convert the Hugging Face checkpoint instead"
    assert open_refusal(short).startswith(f"{short} has 3 bytes, a safetensors file starts with 8 bytes")


def test_safetensors_file_that_is_no_pack(tmp_path: Path) -> None:
    shard = make_checkpoint(tmp_path / "c", 0, layers=1) / "model.safetensors"
    assert open_refusal(shard) == (f"{shard} is a safetensors file of format 'pt', not a pack ('fermi-engine-pack'); "
                                   "convert its checkpoint directory first")
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes((2).to_bytes(8, "little") + b"{}")
    assert open_refusal(bare) == (f"{bare} is a safetensors file without a format, not a pack ('fermi-engine-pack'); "
                                  "convert its checkpoint directory first")


@pytest.mark.parametrize(("version", "text"), [
    ("2", "version 2, this engine reads version 1; update the engine or convert the checkpoint again"),
    ("10", "version 10, this engine reads version 1; update the engine or convert the checkpoint again"),
    ("0", "version '0', this engine reads version 1; convert the checkpoint again"),
    ("1b", "version '1b', this engine reads version 1; convert the checkpoint again"),
])
def test_other_versions(copy: Path, version: str, text: str) -> None:
    assert open_refusal(remake(copy, {"version": version})) == f"{copy} is a pack of {text}"


def test_other_norm_convention(copy: Path) -> None:
    assert open_refusal(remake(copy, {"norm_convention": "plain"})) == (
        f"{copy} stores norm weights as 'plain' (plain: layers.*.linear_attn.norm.weight), expected 'offset_from_one' "
        "(plain: layers.*.linear_attn.norm.weight); convert the checkpoint again")


def edited(path: Path, key: str, edit: Callable[[dict], object]) -> dict[str, str]:
    value = json.loads(read_header(path, PackError).metadata[key])
    edit(value)
    return {key: json.dumps(value)}


@pytest.mark.parametrize(("key", "edit", "text"), [
    ("model_config", lambda v: v.pop("vocab_size"), "its metadata cannot be read (model configuration is incomplete"),
    ("tensors", lambda v: v[MATRIX].update(format="q9"), "its metadata cannot be read ('q9')"),
    ("tensors", lambda v: v[MATRIX].update(cols=100),
     "its metadata cannot be read (q4_0 needs rows of a multiple of 32 elements, found 100"),
    ("tensors", lambda v: v[MATRIX].update(rows=1), f"tensor {MATRIX} is U8 [8, 576], expected U8 [1, 576]"),
    ("tensors", lambda v: v.pop(MATRIX), f"tensor {MATRIX} is U8 [8, 576], expected F32 [8, 576]"),
    ("tensors", lambda v: v[BLOB].update(stride=4096),
     "its metadata cannot be read (experts of 4096 bytes, expected a multiple of 4096 of at least 4480)"),
    ("tensors", lambda v: v[BLOB]["down"].update(offset=64),
     "its metadata cannot be read (an expert's matrix at byte 64, expected a multiple of 64 from 2304)"),
    ("tensors", lambda v: v[BLOB].update(experts=17), f"tensor {BLOB} is U8 [16, 8192], expected U8 [17, 8192]"),
    ("tensors", lambda v: v[BLOB].update(experts=16.0), "its metadata cannot be read (sizes [8192, 16.0], expected whole"),
    ("tensors", lambda v: v[MATRIX].update(rows=64.0), "its metadata cannot be read (sizes [64.0, "),
    ("tensors", lambda v: v[MATRIX].update(offset=64), "its metadata cannot be read (a matrix at byte 64 of its tensor"),
    ("model_config", lambda v: v.update(vocab_size="x"),
     "its metadata cannot be read (model configuration: vocab_size is 'x', expected a whole number"),
    ("model_config", lambda v: v.update(rope_theta=[1]), "its metadata cannot be read (model configuration: rope_theta is "),
    ("eos_ids", lambda v: v.append("x"), "its metadata cannot be read (eos_ids is no list of int)"),
    ("unused", lambda v: v.append(1), "its metadata cannot be read (unused is no list of str)"),
])
def test_metadata_that_contradict_the_tensors(copy: Path, key: str, edit: Callable, text: str) -> None:
    assert open_refusal(remake(copy, edited(copy, key, edit))).startswith(f"{copy} is damaged: {text}")


def test_metadata_missing_or_of_an_absent_tensor(copy: Path) -> None:
    remake(copy, edited(copy, "tensors", lambda v: v.update({"x.weight": v[MATRIX]})))
    assert open_refusal(copy) == f"{copy} has no tensor x.weight; it was made for another model"
    remake(copy, rename={MATRIX: "other.weight"})
    assert open_refusal(copy) == (f"{copy} is damaged: tensor other.weight is U8 [8, 576], expected F32 [8, 576]; "
                                  "convert the checkpoint again")


@pytest.mark.parametrize("key", ["eos_ids", "unused", "source", "model_config", "tensors"])
def test_metadata_of_another_kind(copy: Path, key: str) -> None:
    assert open_refusal(remake(copy, {key: "5"})).startswith(f"{copy} is damaged: its metadata cannot be read (")


@pytest.mark.parametrize(("changes", "text"), [
    ({"vocab_size": 10**8}, "embed_tokens.weight has shape [338, 64], the pack's model configuration asks for "
                            "[100000000, 64]"),
    ({"linear_num_value_heads": 8, "linear_value_head_dim": 16},
     "layers.0.linear_attn.in_proj_b.weight has shape [4, 64], the pack's model configuration asks for [8, 64]"),
    ({"linear_conv_kernel_dim": 3}, "layers.0.linear_attn.conv1d.weight has shape [192, 1, 4], "
                                    "the pack's model configuration asks for [192, 1, 3]"),
    ({"num_experts": 15}, "layers.0.mlp.gate.weight has shape [16, 64], the pack's model configuration asks for [15, 64]"),
    ({"moe_intermediate_size": 64}, "layers.0.mlp.experts.gate_up_proj has shape [16, 64, 64], "
                                    "the pack's model configuration asks for [16, 128, 64]"),
    ({"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4},
     "layers.3.self_attn.q_norm.weight has shape [32], the pack's model configuration asks for [16]"),
    ({"tie_word_embeddings": True}, "lm_head.weight has shape [338, 64], the pack's model configuration asks for "
                                    "no such tensor"),
    ({"num_hidden_layers": 5, "layer_types": [*["linear_attention"] * 3, *["full_attention"] * 2]},
     "layers.4.input_layernorm.weight is absent, the pack's model configuration asks for [64]"),
    ({"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3},
     "layers.3.input_layernorm.weight has shape [64], the pack's model configuration asks for no such tensor"),
])
def test_configuration_of_another_model(copy: Path, changes: dict[str, object], text: str) -> None:
    """The seal fits, so only the tensors tell; kernels would read beyond them."""
    remake(copy, edited(copy, "model_config", lambda v: v.update(changes)))
    assert open_refusal(copy) == f"{copy}: tensor {text}; convert the checkpoint again"


def test_experts_stored_with_other_sizes(copy: Path) -> None:
    """The blob is as large as before, its two matrices have changed places."""
    turned = edited(copy, "tensors", lambda v: v[BLOB]["down"].update(rows=32, cols=64))
    assert open_refusal(remake(copy, turned)) == (
        f"{copy}: tensor layers.1.mlp.experts.down_proj has shape [16, 32, 64], the pack's model configuration asks for "
        "[16, 64, 32]; convert the checkpoint again")


def test_a_tensor_under_another_name(copy: Path) -> None:
    remake(copy, rename={VECTOR: "layers.2.other.weight"})
    assert open_refusal(copy) == (f"{copy}: tensor {VECTOR} is absent, the pack's model configuration asks for [64]; "
                                  "convert the checkpoint again")


def test_packs_of_every_kind_open(tmp_path: Path) -> None:
    for i, options in enumerate(({"tied": True}, {"family": "dense"}, {"layout": "per-expert"}, {"conv_kernel": 1})):
        path = convert(make_checkpoint(tmp_path / f"c{i}", 0, layers=4, **options), tmp_path / f"p{i}")
        with Pack.open(path) as pack:
            assert ("lm_head.weight" in pack.names) is not options.get("tied", False)


def test_opening_reads_no_weights(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the data only the seal is looked at, however large the rest is."""
    read: list[str] = []
    real = Pack._bytes
    monkeypatch.setattr(Pack, "_bytes", lambda self, name: read.append(name) or real(self, name))
    Pack.open(made).close()
    assert read == ["_seal"]


def test_missing_metadata_key(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = PackPlan.build.__func__
    monkeypatch.setattr(PackPlan, "build", classmethod(
        lambda cls, wanted, metadata: build(cls, wanted, {k: v for k, v in metadata.items() if k != "eos_ids"})))
    assert open_refusal(remake(copy)) == (
        f"{copy} is damaged: its metadata lack eos_ids; convert the checkpoint again")


def test_misaligned_tensor(copy: Path) -> None:
    for align, expected in ((64, 4096), (4, 64)):
        text = open_refusal(remake(copy, align=align))
        assert text.endswith(f" of the data, expected a multiple of {expected}; convert the checkpoint again")


def test_header_that_was_touched(copy: Path) -> None:
    raw = copy.read_bytes()
    poke(copy, raw.index(b'engine_version":"0'), b'engine_version":"9')
    assert open_refusal(copy) == (f"{copy} is damaged: its seal does not match its header; "
                                  "convert the checkpoint again")


@pytest.mark.parametrize("back", [1, 33])
def test_seal_that_was_touched(copy: Path, back: int) -> None:
    raw = copy.read_bytes()
    poke(copy, len(raw) - back, bytes([raw[-back] ^ 1]))
    assert open_refusal(copy) == (f"{copy} is damaged: its seal does not match its header; "
                                  "convert the checkpoint again")


def test_seal_missing_or_too_short(copy: Path) -> None:
    header, raw = read_header(copy, PackError), bytearray(copy.read_bytes())
    text = raw[8:header.data_start].replace(b'"_seal"', b'"_pad."')
    copy.write_bytes(raw[:8] + text + raw[header.data_start:])
    assert open_refusal(copy) == (f"{copy} is damaged: its last tensor is not _seal, or tensors are not listed in file "
                                  "order; convert the checkpoint again")
    fields = json.loads(raw[8:header.data_start])
    begin = fields["_seal"]["data_offsets"][0]
    fields["_seal"].update(shape=[64], data_offsets=[begin, begin + 64])
    copy.write_bytes(raw[:8] + json.dumps(fields, separators=(",", ":")).encode().ljust(header.data_start - 8) +
                     raw[header.data_start:header.data_start + begin + 64])
    assert open_refusal(copy) == (f"{copy} is damaged: its seal has 64 bytes, expected {32 * len(header.tensors)}; "
                                  "convert the checkpoint again")


def test_unaligned_data_start(copy: Path) -> None:
    raw, start = copy.read_bytes(), read_header(copy, PackError).data_start
    copy.write_bytes((start - 8 + 64).to_bytes(8, "little") + raw[8:start] + b" " * 64 + raw[start:])
    assert open_refusal(copy) == (f"{copy} is damaged: its data starts at byte {start + 64}, expected a multiple of "
                                  "4096; convert the checkpoint again")


# What `check` reads


@pytest.mark.parametrize("name", [MATRIX, BLOB, VECTOR, "_pad.0", "_file.tokenizer.json", "embed_tokens.weight"])
def test_check_names_the_tensor_with_a_flipped_bit(copy: Path, name: str) -> None:
    entry = read_header(copy, PackError).tensors[name]
    size = entry.end - entry.begin
    where = tensor_offset(copy, name) + size // 2
    poke(copy, where, bytes([copy.read_bytes()[where] ^ 4]))
    with Pack.open(copy) as pack:
        assert refusal(pack.check) == (f"{copy}: tensor {name} ({size} bytes) does not match its checksum; "
                                       "the file is damaged, convert the checkpoint again")


@pytest.mark.parametrize(("name", "value"), [
    (MATRIX, np.float16(np.inf)), (VECTOR, np.float32(np.nan)), ("layers.0.mlp.gate.weight", np.float32(-np.inf)),
    ("layers.3.self_attn.o_proj.weight", np.float16(np.nan)), (BLOB, np.float16(np.nan))])
def test_check_names_the_tensor_with_a_value_that_is_not_finite(
    copy: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: np.generic
) -> None:
    monkeypatch.setattr("fermi_engine.pack._CHECK_BYTES", 600)  # a good piece follows the bad one
    header = read_header(copy, PackError)
    entry = header.tensors[name]
    raw = bytearray(copy.read_bytes()[header.data_start + entry.begin:header.data_start + entry.end])
    at = 0
    if name == BLOB:  # the first scale of the last expert's down matrix
        at = 15 * entry.shape[1] + json.loads(header.metadata["tensors"])[BLOB]["down"]["offset"]
    raw[at:at + value.nbytes] = value.tobytes()
    with Pack.open(remake(copy, data={name: bytes(raw)})) as pack:
        assert refusal(pack.check) == (f"{copy}: tensor {name} holds a scale or value that is NaN or infinite; "
                                       "convert the checkpoint again")


def test_check_passes_reads_everything_and_reports_it(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fermi_engine.pack._CHECK_BYTES", 10_000)  # below the larger tensors: several pieces each
    seen: list[tuple[int, int, str]] = []
    with Pack.open(made) as pack:
        pack.check(lambda *step: seen.append(step))
    end = read_header(made, PackError).tensors["_seal"].begin
    done = [step[0] for step in seen]
    assert done == sorted(done)
    assert seen[-1][:2] == (end, end)
    assert len(done) > len(pack._digests)


def test_check_survives_a_file_cut_behind_its_back(copy: Path) -> None:
    with Pack.open(copy) as pack:
        os.truncate(copy, tensor_offset(copy, MATRIX) + 10)
        assert refusal(pack.check) == f"{copy} ends inside tensor {MATRIX}; the file changed while it was in use"


# The writer


PLAN = PackPlan.build([Wanted("a", "U8", (100,)), Wanted("b", "F32", (5, 3)), Wanted("c", "U8", (2, 4096), 4096),
                       Wanted("d", "U8", (0,)), Wanted("e", "U8", (70,))], {"format": "test"})
CONTENT = {slot.name: np.random.default_rng(i).integers(0, 256, slot.end - slot.begin, np.uint8)
           for i, slot in enumerate(PLAN.slots)}


def write_all(path: Path, stop_before: str | None = None, plan: PackPlan = PLAN, origin: str = "") -> list[str]:
    """Write the plan's content, or up to a tensor where the run is interrupted; the names this run wrote."""
    written = []
    with PackWriter(path, plan, origin) as writer:
        for slot in writer.remaining():
            if slot.name == stop_before:
                raise KeyboardInterrupt
            writer.put(slot.name, np.array_split(CONTENT[slot.name], 3))
            written.append(slot.name)
        writer.finish()
    return written


def interrupted(path: Path, stop_before: str, **options: object) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_all(path, stop_before, **options)


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_plan_places_tensors_and_names_gaps() -> None:
    assert [s[:1] + s[3:] for s in PLAN.slots] == [
        ("a", 0, 100), ("_pad.0", 100, 128), ("b", 128, 188), ("_pad.1", 188, 4096), ("c", 4096, 12288),
        ("d", 12288, 12288), ("e", 12288, 12358), ("_pad.2", 12358, 12416), ("_seal", 12416, 12416 + 32 * 9)]
    assert len(PLAN.header) == 4096
    assert PLAN.total_bytes == 4096 + 12416 + 32 * 9


def test_writes_a_file_that_safetensors_reads(tmp_path: Path) -> None:
    path = tmp_path / "p"
    assert write_all(path) == ["a", "b", "c", "d", "e"]
    assert leftovers(tmp_path) == ["p"]
    assert path.stat().st_size == PLAN.total_bytes
    with safetensors.safe_open(path, "np") as file:
        for name in "abcde":
            assert file.get_tensor(name).tobytes() == CONTENT[name].tobytes()


@pytest.mark.parametrize("stop", ["a", "b", "c", "d", "e"])
def test_resumes_after_the_last_finished_tensor(tmp_path: Path, stop: str) -> None:
    write_all(tmp_path / "whole")
    interrupted(tmp_path / "cut", stop)
    assert not (tmp_path / "cut").exists()
    assert write_all(tmp_path / "cut") == ["a", "b", "c", "d", "e"]["abcde".index(stop):]
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole").read_bytes()
    assert leftovers(tmp_path) == ["cut", "whole"]


def damage_first_tensor(path: Path) -> None:
    poke(path.with_name("cut.fermi-part"), len(PLAN.header) + 3, bytes([CONTENT["a"][3] ^ 1]))


def damage_header(path: Path) -> None:
    poke(path.with_name("cut.fermi-part"), 20, b"?")


def cut_part_short(path: Path) -> None:
    os.truncate(path.with_name("cut.fermi-part"), len(PLAN.header) + 130)


def tear_last_line(path: Path) -> None:
    journal = path.with_name("cut.fermi-part.journal")
    os.truncate(journal, journal.stat().st_size - 9)


def claim_too_much(path: Path) -> None:
    with open(path.with_name("cut.fermi-part.journal"), "a") as file:
        file.write(json.dumps({"tensor": "d", "blake2b": "0" * 64}) + "\n")


def no_part(path: Path) -> None:
    path.with_name("cut.fermi-part").unlink()


def tear_first_line(path: Path) -> None:
    os.truncate(path.with_name("cut.fermi-part.journal"), 30)


def empty_part_without_journal(path: Path) -> None:
    os.truncate(path.with_name("cut.fermi-part"), 0)
    path.with_name("cut.fermi-part.journal").unlink()


def rubbish_after_the_end(path: Path) -> None:
    with open(path.with_name("cut.fermi-part"), "ab") as file:
        file.write(bytes(50_000))


@pytest.mark.parametrize(("harm", "kept"), [
    (damage_first_tensor, ""), (damage_header, ""), (cut_part_short, "a"), (tear_last_line, "ab"),
    (claim_too_much, "abc"), (tear_first_line, ""), (no_part, ""), (empty_part_without_journal, ""),
    (rubbish_after_the_end, "abc")])
def test_only_a_verified_prefix_is_kept(tmp_path: Path, harm: Callable[[Path], None], kept: str) -> None:
    write_all(tmp_path / "whole")
    interrupted(tmp_path / "cut", "d")
    harm(tmp_path / "cut")
    assert write_all(tmp_path / "cut") == list("abcde")[len(kept):]
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole").read_bytes()
    assert leftovers(tmp_path) == ["cut", "whole"]


def test_interrupted_twice_with_a_damaged_journal_between(tmp_path: Path) -> None:
    """A journal that was repaired must go on from its good part, not after the bad line."""
    interrupted(tmp_path / "cut", "c")
    tear_last_line(tmp_path / "cut")
    interrupted(tmp_path / "cut", "e")
    assert write_all(tmp_path / "cut") == ["e"]


@pytest.mark.parametrize(("plan", "origin"), [
    (PackPlan.build([Wanted(*s[:3], align=64) for s in PLAN.slots if s.name in "abcde"], {"format": "test"}), ""),
    (PLAN, "source touched")])
def test_part_of_another_plan_or_source_starts_over(tmp_path: Path, plan: PackPlan, origin: str) -> None:
    interrupted(tmp_path / "cut", "d")
    interrupted(tmp_path / "cut", "b", plan=plan, origin=origin)
    assert write_all(tmp_path / "cut", plan=plan, origin=origin) == list("bcde")


def test_journal_vouches_only_for_synced_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data sync before every journal line, one sync for many small tensors, and a journal line forced out after it."""
    events: list[str] = []
    for name in ("fdatasync", "fsync", "pwrite"):
        real = getattr(os, name)

        def spy(fd: int, *rest: object, real: Callable = real, name: str = name) -> object:
            target = os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).removeprefix("p")
            events.append(f"{name} {target}")
            return real(fd, *rest)

        monkeypatch.setattr(os, name, spy)
    monkeypatch.setattr(pack_writer, "SYNC_BYTES", 5000)
    write_all(tmp_path / "p")
    syncs = [e for e in events if not e.startswith("pwrite")]
    assert syncs == ["fdatasync .fermi-part", "fsync .fermi-part.journal",  # header
                     "fdatasync .fermi-part", "fsync .fermi-part.journal",  # a, b, c and their pads
                     "fsync .fermi-part", f"fsync {tmp_path.name.removeprefix('p')}"]  # the file, then its name
    assert events[-3].startswith("pwrite")


def test_put_refuses_wrong_order_and_sizes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="b is out of order, a comes next"), PackWriter(tmp_path / "p", PLAN) as writer:
        writer.put("b", [CONTENT["b"]])
    with pytest.raises(ValueError, match="a has more than the planned 100"), PackWriter(tmp_path / "p", PLAN) as writer:
        writer.put("a", [bytes(60), bytes(41)])
    with pytest.raises(ValueError, match="a has 99 bytes, planned 100"), PackWriter(tmp_path / "p", PLAN) as writer:
        writer.put("a", [bytes(99)])
    with pytest.raises(ValueError, match="a is not written yet"), PackWriter(tmp_path / "p", PLAN) as writer:
        writer.finish()


def test_a_second_writer_is_kept_out(tmp_path: Path) -> None:
    with PackWriter(tmp_path / "p", PLAN) as writer:
        writer.put("a", [CONTENT["a"]])
        assert refusal(lambda: PackWriter(tmp_path / "p", PLAN)) == (
            f"{tmp_path}/p.fermi-part is being written by another process; wait for it or choose another name")
        for slot in writer.remaining():
            writer.put(slot.name, [CONTENT[slot.name]])
        writer.finish()
    assert (tmp_path / "p").stat().st_size == PLAN.total_bytes


def test_a_part_file_that_was_renamed_while_we_took_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other writer finished in between: the lock is on its finished file, which must not be written again."""
    real = pack_writer.fcntl.flock

    def other_finishes(fd: int, how: int) -> None:
        os.replace(tmp_path / "p.fermi-part", tmp_path / "p")
        (tmp_path / "p.fermi-part").touch()
        real(fd, how)

    monkeypatch.setattr(pack_writer.fcntl, "flock", other_finishes)
    assert "is being written by another process" in refusal(lambda: PackWriter(tmp_path / "p", PLAN))


def broken_source(path: Path, error: FermiError) -> None:
    def broken() -> object:
        yield CONTENT["b"][:50]
        raise error

    def write() -> None:
        with PackWriter(path, PLAN) as writer:
            writer.put("a", [CONTENT["a"]])
            writer.put("b", broken())

    with pytest.raises(type(error), match=str(error)):
        write()


def test_values_no_format_holds_leave_nothing(tmp_path: Path) -> None:
    broken_source(tmp_path / "p", FormatError("the source is damaged"))
    assert leftovers(tmp_path) == []


def test_a_source_that_cannot_be_read_for_now_leaves_what_is_done(tmp_path: Path) -> None:
    broken_source(tmp_path / "p", CheckpointError("cannot read tensor b"))
    assert leftovers(tmp_path) == ["p.fermi-part", "p.fermi-part.journal"]
    assert write_all(tmp_path / "p") == list("bcde")


@pytest.mark.parametrize(("name", "content", "found"), [
    ("p.fermi-part", b"a thesis", "is in the way: no journal beside it says that a conversion left it"),
    ("p.fermi-part.journal", b"dear diary\n", "is in the way and no journal of a conversion"),
    ("p.fermi-part.journal", b"\xff", "is in the way and no journal of a conversion")])
def test_files_of_somebody_else_stay(tmp_path: Path, name: str, content: bytes, found: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert refusal(lambda: PackWriter(tmp_path / "p", PLAN)) == (
        f"{tmp_path}/{name} {found}; move it or choose another name")
    assert leftovers(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == content


def test_a_file_of_a_common_name_beside_the_pack_stays(tmp_path: Path) -> None:
    (tmp_path / "p.part").write_text("a download of another program")
    write_all(tmp_path / "p")
    assert leftovers(tmp_path) == ["p", "p.part"]
    assert (tmp_path / "p.part").read_text() == "a download of another program"


@pytest.mark.parametrize("step", ["ftruncate", "fdatasync", "fsync", "pwrite"])
def test_a_start_cut_off_anywhere_can_be_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       step: str) -> None:
    """Also over what another plan left: at no moment does our part file lack a journal of ours."""
    other = PackPlan.build([Wanted(*s[:3], align=64) for s in PLAN.slots if s.name in "abcde"], {"format": "test"})
    interrupted(tmp_path / "cut", "d", plan=other)

    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, step, cut_off)
        with pytest.raises(KeyboardInterrupt):
            PackWriter(tmp_path / "cut", PLAN)
    assert write_all(tmp_path / "cut") == list("abcde")


def test_no_room_is_noticed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.statvfs(tmp_path)
    fields = list(full)
    fields[1], fields[4] = 1000, 16  # f_frsize, f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    assert refusal(lambda: PackWriter(tmp_path / "p", PLAN)) == (
        f"cannot write {tmp_path}/p: {PLAN.total_bytes} more bytes are needed, 16000 are free; "
        "make room or choose another place")
    assert leftovers(tmp_path) == []
    fields[4] = 17
    write_all(tmp_path / "p")


def test_room_that_a_part_file_already_takes_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path / "p", "e")
    fields = list(os.statvfs(tmp_path))
    fields[1], fields[4] = 1, PLAN.total_bytes - (tmp_path / "p.fermi-part").stat().st_size  # f_frsize, f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    assert write_all(tmp_path / "p") == ["e"]


def test_writes_that_stop_short_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(tmp_path / "whole")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: real(fd, view[:1000], offset))
    write_all(tmp_path / "p")
    assert (tmp_path / "p").read_bytes() == (tmp_path / "whole").read_bytes()


def failing_write(monkeypatch: pytest.MonkeyPatch, number: int, from_call: int, name: str = "pwrite") -> None:
    real, calls = getattr(os, name), []

    def fail(*args: object) -> object:
        calls.append(args)
        if len(calls) >= from_call:
            raise OSError(number, os.strerror(number))
        return real(*args)

    monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize("call", [1, 2, 7, 12])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_disk_that_fills_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, number: int
) -> None:
    failing_write(monkeypatch, number, call)
    text = refusal(lambda: write_all(tmp_path / "p"))
    assert text.startswith(f"cannot write {tmp_path}/p.fermi-part: {os.strerror(number)}; ")
    assert text.endswith(" are free; make room or choose another place, then run it again")
    assert leftovers(tmp_path) == []


def test_disk_that_fills_up_names_the_bytes_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_write(monkeypatch, errno.ENOSPC, 5)  # header, three pieces of a, pad
    needed = PLAN.total_bytes - len(PLAN.header) - PLAN.slots[0].end
    assert f"; {needed} more bytes are needed, " in refusal(lambda: write_all(tmp_path / "p"))


@pytest.mark.parametrize("name", ["fdatasync", "fsync"])
def test_failing_sync_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(pack_writer, "SYNC_BYTES", 1)
    failing_write(monkeypatch, errno.EIO, 3, name)
    text = refusal(lambda: write_all(tmp_path / "p"))
    assert text == (f"cannot write {tmp_path}/p.fermi-part: Input/output error; run it again to go on from there once the "
                    "disk takes writes, or choose another place")
    assert leftovers(tmp_path) == ["p.fermi-part", "p.fermi-part.journal"]


@pytest.mark.parametrize(("name", "call", "kept"), [("pwrite", 6, "a"), ("pwrite", 13, "abc"), ("fdatasync", 4, "a")])
def test_a_disk_that_fails_for_a_while_keeps_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: int, kept: str
) -> None:
    """Calls of pwrite: header, three of a, pad, three of b, pad, three of c; of fdatasync: start, a, pad, b."""
    write_all(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(pack_writer, "SYNC_BYTES", 1)
        failing_write(patch, errno.EIO, call, name)
        refusal(lambda: write_all(tmp_path / "p"))
    assert leftovers(tmp_path) == ["p.fermi-part", "p.fermi-part.journal", "whole"]
    assert write_all(tmp_path / "p") == list("abcde")[len(kept):]
    assert (tmp_path / "p").read_bytes() == (tmp_path / "whole").read_bytes()


def test_file_size_limit_for_real(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel itself refuse a write in the middle of the file."""
    script = ("import sys; sys.path[:0] = [sys.argv[1], sys.argv[1] + '/tests']\n"
              "from test_pack import write_all; from fermi_engine.errors import PackError\n"
              "try: write_all(__import__('pathlib').Path(sys.argv[2]))\n"
              "except PackError as err: print(err)")
    limit = len(PLAN.header) + 5000
    run = subprocess.run([sys.executable, "-c", script, str(ROOT), str(tmp_path / "p")], capture_output=True, text=True,
                         check=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert run.stdout.startswith(f"cannot write {tmp_path}/p.fermi-part: File too large; ")
    assert run.stdout.count("\n") == 1
    assert leftovers(tmp_path) == []


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    assert refusal(lambda: PackWriter(tmp_path, PLAN)) == (
        f"{tmp_path} is a directory; give the name of the pack file to write")
    assert refusal(lambda: PackWriter(tmp_path / "no" / "p", PLAN)) == (
        f"{tmp_path}/no is not a directory; create it before writing p there")
    (tmp_path / "p.fermi-part").mkdir()
    assert refusal(lambda: PackWriter(tmp_path / "p", PLAN)) == (
        f"cannot write {tmp_path}/p.fermi-part: Is a directory; choose a directory you can write to")


def test_matrix_views_survive_a_round_trip_through_a_file(tmp_path: Path) -> None:
    """A slot's bytes come back as the Matrix that was put in; its rows do not fill the last group."""
    matrix = Matrix.from_f32(np.random.default_rng(0).standard_normal((13, 96)).astype(np.float32), "q4_0")
    plan = PackPlan.build([Wanted("m", "U8", matrix.data.shape)], {})
    assert plan.slots[0] == Slot("m", "U8", (2, 8 * 54), 0, 864)
    with PackWriter(tmp_path / "p", plan) as writer:
        writer.put("m", [matrix.data])
        writer.finish()
    with safetensors.safe_open(tmp_path / "p", "np") as file:
        back = Matrix("q4_0", 13, 96, file.get_tensor("m"))
    np.testing.assert_array_equal(back.dequantize(), matrix.dequantize())
