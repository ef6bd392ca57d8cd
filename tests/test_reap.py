"""`fermi-engine reap`: saliency by hand and against the reference, pruned packs and checkpoints byte by byte, bad input."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from fermi_engine import chat, kernels
from fermi_engine.checkpoint import Checkpoint
from fermi_engine.cli import app as cli
from fermi_engine.compression import calibration
from fermi_engine.compression import reap as reap_module
from fermi_engine.compression.calibration import watch
from fermi_engine.compression.prune_checkpoint import prune_checkpoint
from fermi_engine.compression.prune_pack import prune_pack
from fermi_engine.compression.saliency import Saliency, Scores, keep_best
from fermi_engine.config import EngineConfig
from fermi_engine.convert import convert
from fermi_engine.engine import Engine
from fermi_engine.errors import CheckpointError, FermiError, PackError, RequestError
from fermi_engine.formats import Experts
from fermi_engine.generate import greedy
from fermi_engine.kernels import dispatch
from fermi_engine.model.decoder import Decoder as EngineDecoder
from fermi_engine.model.moe import SparseMoE
from fermi_engine.pack import Pack, blob_name
from fermi_engine.quality.documents import Document, Reader
from fermi_engine.quality.resume import Resume
from fermi_engine.safetensors_header import read_header
from fermi_engine.sampling import SamplingParams
from fermi_engine.stages.array_weights import CONFIG, ArrayWeights, config_array
from fermi_engine.state import HybridState
from reference import reap as oracle_reap
from reference.decoder import Decoder
from tests.test_pack import remake
from tests.tiny_models import tiny_config
from tools import oracle, tiny_reap, tiny_text
from tools.make_checkpoint import make_checkpoint
from tools.tiny_tasks import Encoder

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "golden" / "tiny"
F32 = EngineConfig(activations="f32", threads=1)
GREEDY = SamplingParams(temperature=0, max_tokens=4)
LAYERS, EXPERTS, TOP_K = 4, 6, 2
SMALL = {"layers": LAYERS, "experts": EXPERTS, "experts_per_tok": TOP_K}
KEPT = np.array([[0, 2, 5], [1, 2, 3], [0, 4, 5], [3, 4, 5]])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("reap") / "checkpoint", 7, **SMALL)


@pytest.fixture(scope="module")
def pack(source: Path) -> Path:
    return convert(source, source.parent / "model.pack", rules="*.down_proj=q8_0")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FERMI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    path = tmp_path / "calibration.jsonl"
    path.write_text("".join(json.dumps({"ids": rng.integers(0, 250, n).tolist()}) + "\n" for n in (40, 25, 60)))
    return path


def refusal(kind: type[FermiError], action: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def documents(path: Path) -> list[Document]:
    return [Document(np.array(json.loads(line)["ids"], np.int32)) for line in path.read_text().splitlines()]


# saliency


def test_saliency_by_hand() -> None:
    """Four experts, two a token, through the engine's own layer.

    silu(g) is g to the last bit for g of 40 and more, and up is 1, so that expert j gives g times a vector of known length:
    5, 13, 1 and 2. The router's rows make logits by hand: ln 3 and 0 give gates 3/4 and 1/4.
    """
    ln3 = math.log(3)
    router = np.array([[ln3, 0], [0, ln3], [0, 0], [-9, -9]], np.float32)
    gate_up = np.array([[[40, 40], [1, 1]]] * 4, np.float32)  # g = 40 (x0 + x1), up = x0 + x1
    down = np.array([[[3], [4]], [[5], [12]], [[0], [1]], [[2], [0]]], np.float32)
    c = dataclasses.replace(tiny_config("l", hidden=2, experts=4, top_k=2, intermediate=1))
    name = "layers.0.mlp."
    shared = {f"{name}shared_expert.{part}.weight": np.ones(shape, np.float32)
              for part, shape in (("gate_proj", (2, 2)), ("up_proj", (2, 2)), ("down_proj", (2, 2)))}
    layer = SparseMoE(ArrayWeights({CONFIG: config_array(c), f"{name}gate.weight": router,
                                    f"{name}experts.gate_up_proj": gate_up, f"{name}experts.down_proj": down,
                                    f"{name}shared_expert_gate.weight": np.ones((1, 2), np.float32), **shared}), 0)
    saliency, k = Saliency(1, 4), kernels.get("scalar", 1)
    # tokens (1, 0) twice: experts 0 (gate 3/4) and, of three equal logits below, 1 (1/4); (0, 1): experts 1 (3/4) and 0 (1/4)
    x = np.array([[1, 0], [1, 0], [0, 1]], np.float32)
    saliency.trace("layers.0.ffn_norm", x)
    layer.forward(k, k.activations(x), "f32", lambda what, array: saliency.trace(f"layers.0.{what}", array))
    by_hand = [40 * 5 * (0.75 + 0.75 + 0.25) / 3, 40 * 13 * (0.25 + 0.25 + 0.75) / 3, 0.0, 0.0]
    # a float32 gate has a relative error of a few units in the last place; sums in float64 add nothing
    np.testing.assert_allclose(saliency.scores()[0], by_hand, rtol=8 * 2.0**-24)
    assert saliency.routed.tolist() == [[3, 3, 0, 0]]
    truth, counts = oracle_reap.saliency(*(torch.from_numpy(a).double() for a in (x, router, gate_up, down)), 2)
    np.testing.assert_allclose(truth.numpy(), by_hand, rtol=1e-6)
    assert counts.tolist() == [3, 3, 0, 0]
    assert keep_best(saliency.scores(), 2).tolist() == [[0, 1]]
    assert keep_best(saliency.scores(), 3).tolist() == [[0, 1, 2]]  # of two dead ones the lower id stays


def test_saliency_is_that_of_the_reference(tmp_path) -> None:
    """On the trained model: at most twice as far from float64 as the reference is in float32."""
    path = tiny_text.write(tmp_path / "t.jsonl", Encoder.from_directory(TINY), "train", 3, 1)
    engine = Engine.load(convert(TINY, tmp_path / "f32.pack", "f32"), config=F32)
    c, found = engine.config, Saliency(8, 16)
    counts = watch(engine, documents(path), found, 2048)
    assert counts.documents == len(documents(path))
    assert counts.tokens == sum(len(document.ids) for document in documents(path))
    read = [document.ids for document in documents(path)]
    runs = {dtype: _reference_saliency(oracle.decoder(engine.pack, "f32", dtype), read, c.num_experts_per_tok)
            for dtype in (torch.float32, torch.float64)}
    (single, _), (truth, routed) = runs[torch.float32], runs[torch.float64]
    np.testing.assert_array_equal(found.routed, routed)
    error, theirs = (np.abs(scores / truth - 1).max() for scores in (found.scores(), single))
    print(f"relative error of scores: engine {error:.1e}, reference in float32 {theirs:.1e}")
    assert error <= 2 * theirs
    for layer in range(8):
        assert keep_best(found.scores(), 8)[layer].tolist() == oracle_reap.choose(torch.from_numpy(truth[layer]), 8).tolist()


def _reference_saliency(model: Decoder, texts: list[np.ndarray], k: int) -> tuple[np.ndarray, np.ndarray]:
    layers = model.config.num_hidden_layers
    inputs: list[list[torch.Tensor]] = [[] for _ in range(layers)]

    def note(name: str, value: torch.Tensor) -> None:
        if name.endswith("ffn_norm"):
            inputs[int(name.split(".")[1])].append(value)

    with torch.no_grad():
        for ids in texts:
            model.forward(ids.tolist(), trace=note)
        rows = [oracle_reap.saliency(torch.cat(inputs[i]), *(model.params[f"layers.{i}.mlp.{part}"] for part in (
            "gate.weight", "experts.gate_up_proj", "experts.down_proj")), k) for i in range(layers)]
    return np.stack([scores.double().numpy() for scores, _ in rows]), np.stack([counts.numpy() for _, counts in rows])


def test_backends_threads_and_blocks_change_no_bit(pack, text) -> None:
    sums = []
    for options in ({"backend": "scalar", "threads": 1}, {"threads": 3}, {"token_block": 7}):
        saliency = Saliency(LAYERS, EXPERTS)
        watch(Engine.load(pack, config=EngineConfig(**options)), documents(text), saliency, 2048)
        sums.append(saliency)
    assert len(dispatch.supported()) > 1
    for other in sums[1:2]:
        np.testing.assert_array_equal(other.gate_norm, sums[0].gate_norm)
    np.testing.assert_allclose(sums[2].gate_norm, sums[0].gate_norm, rtol=1e-12)  # sums in another order
    np.testing.assert_array_equal(sums[2].routed, sums[0].routed)
    assert (sums[0].routed.sum(axis=1) == TOP_K * 125).all()


def test_watching_changes_no_logit(pack) -> None:
    engine, ids = Engine.load(pack, threads=1), list(range(3, 50))
    plain = engine.session().logits(ids)
    np.testing.assert_array_equal(engine.session().logits(ids, Saliency(LAYERS, EXPERTS).trace), plain)


def reports(saliency: Saliency, ids: list[list[int]], outputs: np.ndarray, inputs: np.ndarray | None = None) -> None:
    """One layer's reports: each token's experts in order, gates of one half."""
    shape = np.array(ids).shape
    saliency.trace("layers.0.ffn_norm", np.ones((shape[0], 3), np.float32) if inputs is None else inputs)
    saliency.trace("layers.0.router_ids", np.array(ids, np.int32))
    saliency.trace("layers.0.router_weights", np.full(shape, 0.5, np.float32))
    saliency.trace("layers.0.expert_rows", np.arange(math.prod(shape), dtype=np.int32).reshape(shape)[:, ::-1])
    saliency.trace("layers.0.expert_out", outputs)


def test_an_expert_that_gives_no_numbers_goes_first(capsys) -> None:
    saliency, outputs = Saliency(1, 5), np.ones((6, 3), np.float32)
    outputs[0, 1] = np.nan  # row 0 is the second expert of token 0
    outputs[3, 0] = np.inf
    reports(saliency, [[0, 1], [2, 0], [1, 3]], outputs)
    scores = saliency.scores()[0]
    np.testing.assert_array_equal(np.isnan(scores), [False, True, True, False, False])
    assert scores[4] == 0
    assert saliency.broken.tolist() == [[0, 1, 1, 0, 0]]
    assert keep_best(saliency.scores(), 3).tolist() == [[0, 3, 4]]  # the dead one before those
    assert "layer 0 would keep expert 1" in refusal(RequestError, lambda: keep_best(saliency.scores(), 4))


def test_a_token_that_is_lost_blames_no_expert() -> None:
    """What comes after a NaN is NaN: only the expert that made it counts as broken, elsewhere the token is left out."""
    saliency = Saliency(1, 3)
    inputs = np.array([[1, 2, 3], [1, np.nan, 3]], np.float32)
    reports(saliency, [[0, 1], [1, 2]], np.full((4, 3), [[1.0], [1], [np.nan], [np.nan]], np.float32), inputs)
    assert saliency.broken.sum() == 0
    assert saliency.routed.tolist() == [[1, 1, 0]]


def test_a_large_output_is_a_number() -> None:
    saliency = Saliency(1, 2)
    reports(saliency, [[0, 1]], np.full((2, 3), 3e38, np.float32))
    assert np.isfinite(saliency.scores()).all()


def test_choice_and_ties() -> None:
    scores = np.array([[1, 3, 3, 2, 3.0], [0, 0, 0, 0, 0]])
    assert keep_best(scores, 2).tolist() == [[1, 2], [0, 1]]
    assert keep_best(scores, 5).tolist() == [[0, 1, 2, 3, 4]] * 2
    for row in scores:
        assert keep_best(row[None], 3)[0].tolist() == oracle_reap.choose(torch.from_numpy(row), 3).tolist()


def test_own_generations_are_read_like_text(pack, text) -> None:
    engine = Engine.load(pack, threads=1)
    own, given = Saliency(LAYERS, EXPERTS), Saliency(LAYERS, EXPERTS)
    counts = watch(engine, documents(text), own, 30, generate=9)
    cut = [ids[begin:begin + 30] for ids, *_ in documents(text) for begin in range(0, len(ids), 30)]
    last = [i for i, ids in enumerate(cut) if i + 1 == len(cut) or len(ids) < 30]
    assert len(last) == 3
    full = [np.concatenate([ids, np.array(greedy(engine.session(), ids.tolist(), 9, engine.eos_ids), np.int32)])
            if i in last else ids for i, ids in enumerate(cut)]
    watch(engine, [Document(ids) for ids in full], given, 2048)
    np.testing.assert_array_equal(own.gate_norm, given.gate_norm)
    assert counts.generated == sum(map(len, full)) - sum(map(len, cut)) > 0
    assert counts.tokens == sum(map(len, full))


def test_reap_keeps_more_of_the_trained_model_than_frequency_and_chance(monkeypatch, tmp_path) -> None:
    """Half of the experts, two of the five seeds of golden/tiny/README.md, a third of its chats."""
    monkeypatch.setattr(tiny_reap, "SEEDS", range(2))
    monkeypatch.setattr(tiny_reap, "DROPPED", (0.5,))
    monkeypatch.setattr(tiny_reap, "TESTS", 8)
    found = tiny_reap.measure(TINY, tmp_path)
    print("\n".join(tiny_reap.table(found)))
    for measure in ("answers", "tokens"):
        means = {name: np.mean([row[measure] for row in found["rows"] if row["criterion"] == name])
                 for name in tiny_reap.CRITERIA}
        assert means["reap"] > max(means["frequency"], means["random"]), measure
    assert found["whole"]["answers"] > 0.95


# images


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pack of a model that sees, images, and chats.jsonl: one about both images, one about none."""
    root = tmp_path_factory.mktemp("album")
    convert(make_checkpoint(root / "checkpoint", 3, **SMALL), root / "pack", "q8_0")
    (root / "pictures").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (2, 60, 40, 3)).astype(np.uint8)
    for name, one in zip("ab", pixels, strict=True):
        Image.fromarray(one).save(root / "pictures" / f"{name}.png")
    (root / "broken.png").write_bytes(b"no image")
    parts = [{"type": "image", "path": f"pictures/{name}.png"} for name in "ab"]
    chats = [[{"role": "user", "content": [parts[0], {"type": "text", "text": "and"}, parts[1]]}],
             [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]]
    (root / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return root


def test_images_are_read_where_a_chat_shows_them(album) -> None:
    """The same sums as a session that is given prompt and images makes."""
    engine = Engine.load(album / "pack", config=EngineConfig(threads=1, token_block=7))
    read = Reader.of(engine).read([album / "chats.jsonl"])
    images = [engine.vision.prepare(album / "pictures" / f"{name}.png") for name in "ab"]
    assert [len(document.images) for document in read] == [2, 0]
    assert (read[0].ids == engine.vision.config.image_token_id).sum() == sum(sum(image.tokens) for image in images) > 10
    found, given = Saliency(LAYERS, EXPERTS), Saliency(LAYERS, EXPERTS)
    counts = watch(engine, read, found, 2048, generate=4)
    own = [piece.id for piece in engine.generate(read[0].ids.tolist(), GREEDY, images=images) if piece.id is not None]
    engine.session().logits([*read[0].ids.tolist(), *own], given.trace, images)
    own_text = [piece.id for piece in engine.generate(read[1].ids.tolist(), GREEDY) if piece.id is not None]
    engine.session().logits([*read[1].ids.tolist(), *own_text], given.trace)
    np.testing.assert_array_equal(found.gate_norm, given.gate_norm)
    assert counts.generated == len(own) + len(own_text)
    blind = Saliency(LAYERS, EXPERTS)
    watch(engine, [document._replace(images=()) for document in read], blind, 2048, generate=4)
    assert np.abs(blind.gate_norm - found.gate_norm).max() > 1e-3


def test_reap_and_calibrate_over_images(capsys, album, tmp_path, cache) -> None:
    line = ["-m", album / "pack", "--calibration", album / "chats.jsonl", "-t", "1"]
    assert run(capsys, *line, "--keep", "3", "-o", tmp_path / "dst")[0] == 0
    with Pack.open(tmp_path / "dst") as pack, Pack.open(album / "pack") as whole:
        assert pack.vision == whole.vision
        assert all(pack.matrix(name).data.tobytes() == whole.matrix(name).data.tobytes() for name in pack.matrix_names
                   if name.startswith("visual."))
    assert cli.run([str(word) for word in ["calibrate", *line, "-o", tmp_path / "moments"]]) == 0
    answer = Engine.load(tmp_path / "dst", threads=1)
    images = [answer.vision.prepare(album / "pictures" / "a.png")]
    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    ids = chat.encode(answer.tokenizer, chat.find_template(answer.pack.files()), [{"role": "user", "content": content}])
    assert list(answer.generate(answer.vision.expand(answer.tokenizer, ids, images), GREEDY, images=images))


def test_mistakes_about_images_are_one_line(capsys, album, pack, tmp_path, cache) -> None:
    def chats(path: str) -> Path:
        content = [{"type": "image", "path": path}, {"type": "text", "text": "x"}]
        (tmp_path / "c.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": content}]}))
        return tmp_path / "c.jsonl"

    blind = convert(make_checkpoint(tmp_path / "blind", 1, text_only=True, **SMALL), tmp_path / "blind.pack")
    before = listing(tmp_path)
    for model, path, said in ((album / "pack", "none.png", "none.png"), (album / "pack", str(album / "broken.png"), "broken.png"),
                              (blind, str(album / "pictures" / "a.png"), "holds no vision tower")):
        given = chats(path)
        status, out, err = run(capsys, "-m", model, "--calibration", given, "--keep", "3", "-o", tmp_path / "dst", "-t", "1")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert said in err
        assert "c.jsonl, line 1" in err
        given.unlink()
    status, _, err = run(capsys, "-m", album / "pack", "--calibration", album / "chats.jsonl", "--keep", "3", "-o",
                         tmp_path / "dst", "--window", "20")
    assert (status, "raise --window" in err) == (2, True)
    assert listing(tmp_path) == before


def test_an_image_that_changes_meanwhile_is_refused(album, tmp_path) -> None:
    engine = Engine.load(album / "pack", threads=1)
    shutil.copytree(album, tmp_path / "album")
    read = Reader.of(engine).read([tmp_path / "album" / "chats.jsonl"])
    shutil.copy(album / "pictures" / "a.png", tmp_path / "album" / "pictures" / "b.png")
    assert "b.png has changed" in refusal(RequestError, lambda: watch(engine, read, Saliency(LAYERS, EXPERTS), 2048))


# pruned packs


class Fewer:
    """A pack's weights with some experts only, copied side by side."""

    def __init__(self, pack: Pack, kept: np.ndarray) -> None:
        self.config = dataclasses.replace(pack.config, num_experts=kept.shape[1])
        self._pack, self._kept = pack, kept

    def vector(self, name: str) -> np.ndarray:
        array = self._pack.vector(name)
        return np.ascontiguousarray(array[self._kept[int(name.split(".")[1])]]) if name.endswith("mlp.gate.weight") else array

    def matrix(self, name: str):
        return self._pack.matrix(name)

    def experts(self, layer: int) -> list[Experts]:
        return [Experts.join([self._pack.expert(layer, e)[which] for e in self._kept[layer]]) for which in (0, 1)]


def test_a_pruned_pack_holds_the_same_bytes(pack, tmp_path) -> None:
    path = prune_pack(pack, tmp_path / "pruned", KEPT)
    with Pack.open(pack) as old, Pack.open(path) as new:
        new.check()
        assert new.config == dataclasses.replace(old.config, num_experts=3)
        assert new.names == old.names
        assert new.files() == old.files()
        for name in old.names:
            if name.endswith(".blob"):
                layer = int(name.split(".")[1])
                for place, expert in enumerate(KEPT[layer]):
                    for a, b in zip(new.expert(layer, place), old.expert(layer, expert), strict=True):
                        assert (a.format, a.data.tobytes()) == (b.format, b.data.tobytes())
            elif name.endswith("mlp.gate.weight"):
                np.testing.assert_array_equal(new.vector(name), old.vector(name)[KEPT[int(name.split(".")[1])]])
            elif name in old.matrix_names:
                assert new.matrix(name).data.tobytes() == old.matrix(name).data.tobytes()
            else:
                np.testing.assert_array_equal(new.vector(name), old.vector(name))
        assert new.source == {**old.source, "pruned": {"method": "REAP", "experts": EXPERTS, "kept": 3}}
        ids = np.arange(4, 40, dtype=np.int32)
        decoder = EngineDecoder(Fewer(old, KEPT), kernels.get(None, 1))
        truth = decoder.logits(decoder.hidden(ids, HybridState.fresh(decoder.config, 64, "f32")))
        np.testing.assert_array_equal(Engine.load(path, threads=1).session().logits(ids), truth)


def test_a_pruned_model_computes_what_the_reference_says(source, tmp_path) -> None:
    """Router rows follow their experts: float32 logits as for whole models, at most 1e-4 apart."""
    whole = convert(source, tmp_path / "f32.pack", "f32")
    engine = Engine.load(prune_pack(whole, tmp_path / "pruned", KEPT), config=F32)
    with Pack.open(whole) as opened:
        params = oracle_reap.prune(oracle.params(opened, "f32"), [torch.from_numpy(row) for row in KEPT])
    ids = list(range(4, 40))
    with torch.no_grad():
        truth = Decoder(engine.config, params).to(torch.float64).forward(ids)[0].numpy()
    found = engine.session().logits(ids)
    assert np.linalg.norm(found - truth) / np.linalg.norm(truth) < 1e-4


def test_keeping_all_is_the_identity(pack, source, tmp_path) -> None:
    every = np.tile(np.arange(EXPERTS), (LAYERS, 1))
    assert prune_pack(pack, tmp_path / "same", every).read_bytes() == pack.read_bytes()
    copy = prune_checkpoint(source, tmp_path / "copy", every)
    assert (copy / "config.json").read_bytes() == (source / "config.json").read_bytes()
    a, b = (Checkpoint.open(path) for path in (source, copy))
    assert a.unused == b.unused
    assert tensors(source) == tensors(copy)


def tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Everything in a checkpoint's files."""
    found = {}
    for shard in Checkpoint.open(path).shards:
        header, data = read_header(path / shard), (path / shard).read_bytes()
        for name, e in header.tensors.items():
            found[name] = e.dtype, e.shape, data[header.data_start + e.begin:header.data_start + e.end]
    return found


@pytest.mark.parametrize("options", [{}, {"layout": "per-expert", "shards": 3}, {"shards": 4, "dtype": "f32"},
                                     {"text_only": True, "dtype": "f16"}], ids=str)
def test_a_pruned_checkpoint_and_a_pruned_pack_are_one_model(tmp_path, options) -> None:
    src = make_checkpoint(tmp_path / "src", 9, **SMALL, **options)
    dst = prune_checkpoint(src, tmp_path / "dst", KEPT)
    packs = [convert(dst, tmp_path / "a"), prune_pack(convert(src, tmp_path / "whole"), tmp_path / "b", KEPT)]
    with Pack.open(packs[0]) as a, Pack.open(packs[1]) as b:
        assert a.config == b.config
        assert a.names == b.names
        for name in a.names:
            assert a._bytes(name).tobytes() == b._bytes(name).tobytes(), name
        assert a.source["pruned"] == b.source["pruned"] == {"method": "REAP", "experts": EXPERTS, "kept": 3}
    before, after = tensors(src), tensors(dst)
    untouched = [name for name in before if ".experts." not in name and not name.endswith("mlp.gate.weight")
                 and not name.startswith("mtp")]
    assert all(after[name] == before[name] for name in untouched)
    assert not [name for name in after if name.startswith("mtp")]
    assert {p.name for p in dst.iterdir()} == {p.name for p in src.iterdir()}
    if (dst / "model.safetensors.index.json").exists():
        index = json.loads((dst / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(len(data) for *_, data in after.values())


def test_transformers_loads_a_pruned_checkpoint(tmp_path) -> None:
    kept = np.tile(np.arange(1, 16, 2), (8, 1))
    path = prune_checkpoint(TINY, tmp_path / "half", kept)
    model, notes = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(notes.values()), notes
    ids = list(range(40, 90))
    engine = Engine.load(convert(path, tmp_path / "half.pack", "f32"), config=F32)
    with torch.no_grad():
        theirs = model.eval()(torch.tensor([ids])).logits[0].numpy()
    ours = engine.session().logits(ids)
    assert np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < 1e-4


def test_an_interrupted_pruning_goes_on(pack, source, tmp_path) -> None:
    whole = prune_pack(pack, tmp_path / "whole", KEPT).read_bytes()

    def stop(done: int, total: int, name: str) -> None:
        if name == blob_name(2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune_pack(pack, tmp_path / "p", KEPT, stop)
    assert not (tmp_path / "p").exists()
    assert prune_pack(pack, tmp_path / "p", KEPT).read_bytes() == whole
    src = make_checkpoint(tmp_path / "src", 9, shards=4, **SMALL)
    truth, seen = tensors(prune_checkpoint(src, tmp_path / "truth", KEPT)), []

    def stop_later(done: int, total: int, name: str) -> None:
        seen.append(name)
        if len(set(seen)) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune_checkpoint(src, tmp_path / "q", KEPT, stop_later)
    assert not (tmp_path / "q").exists()
    again: list[str] = []
    assert tensors(prune_checkpoint(src, tmp_path / "q", KEPT, lambda done, total, name: again.append(name))) == truth
    assert set(again).isdisjoint(sorted(set(seen))[:2])
    assert not list(tmp_path.glob("*.fermi-part*"))


def test_leavings_of_another_choice_or_of_a_stranger(source, tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prune_checkpoint(source, tmp_path / "q", KEPT, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    other = KEPT[:, ::-1][::-1, ::-1].copy()
    truth = tensors(prune_checkpoint(source, tmp_path / "truth", other))
    assert tensors(prune_checkpoint(source, tmp_path / "q", other)) == truth
    (tmp_path / "r.fermi-part").mkdir()
    (tmp_path / "r.fermi-part" / "thesis").touch()
    assert "in the way" in refusal(CheckpointError, lambda: prune_checkpoint(source, tmp_path / "r", KEPT))
    assert (tmp_path / "r.fermi-part" / "thesis").exists()


# the command


def run(capsys: pytest.CaptureFixture, *args: str | Path) -> tuple[int, str, str]:
    status = cli.run(["reap", *map(str, args)])
    return status, *capsys.readouterr()


def test_the_command(capsys, pack, source, text, tmp_path, cache) -> None:
    line = ["-m", pack, "--calibration", text, "-t", "1", "--generate", "3"]
    status, out, _ = run(capsys, *line, "--keep", "3", "-o", tmp_path / "dst")
    assert status == 0
    assert "3 of 6 experts a layer" in out
    said = json.loads((tmp_path / "dst.reap.json").read_text())
    saliency = Saliency(LAYERS, EXPERTS)
    counts = watch(Engine.load(pack, threads=1), documents(text), saliency, 2048, 3)
    assert [row["scores"] for row in said["layers"]] == saliency.scores().tolist()
    assert [row["routed"] for row in said["layers"]] == saliency.routed.tolist()
    assert [row["kept"] for row in said["layers"]] == keep_best(saliency.scores(), 3).tolist()
    assert (said["tokens"], said["documents"], said["generated"]) == (counts.tokens, 3, counts.generated)
    truth = prune_pack(pack, tmp_path / "truth", keep_best(saliency.scores(), 3))
    assert (tmp_path / "dst").read_bytes() == truth.read_bytes()
    assert not list(cache.glob("*"))
    # the same scores for a checkpoint, and another number of experts
    status, out, _ = run(capsys, "-m", source, "--scores", tmp_path / "dst.reap.json", "--keep", "2", "-o", tmp_path / "c")
    assert status == 0
    assert Checkpoint.open(tmp_path / "c").config.num_experts == 2
    assert json.loads((tmp_path / "c.reap.json").read_text())["keep"] == 2
    assert not cache.exists() or not list(cache.glob("*.part"))


def test_an_interrupted_measurement_resumes(capsys, pack, text, tmp_path, cache, monkeypatch) -> None:
    line = ["-m", pack, "--calibration", text, "-t", "1", "--keep", "3"]
    assert run(capsys, *line, "-o", tmp_path / "whole")[0] == 0
    real, calls = calibration._read, []

    def interrupted(*args):
        calls.append(len(args[1]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(calibration, "_read", interrupted)
    monkeypatch.setattr(Resume, "due", lambda self: True)
    assert run(capsys, *line, "-o", tmp_path / "dst")[0] == cli.INTERRUPTED
    assert not (tmp_path / "dst").exists()
    assert not (tmp_path / "dst.reap.json").exists()
    assert run(capsys, *line, "-o", tmp_path / "dst")[0] == 0
    assert calls == [40, 25, 60, 60]  # the document that was interrupted is read again from its start
    assert (tmp_path / "dst").read_bytes() == (tmp_path / "whole").read_bytes()
    assert (tmp_path / "dst.reap.json").read_bytes() == (tmp_path / "whole.reap.json").read_bytes()


def test_scores_outlive_an_interrupted_pruning(capsys, pack, text, tmp_path, cache, monkeypatch) -> None:
    line = ["-m", pack, "--calibration", text, "-t", "1", "--keep", "3", "-o", tmp_path / "dst"]
    real = reap_module.prune_pack

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(reap_module, "prune_pack", interrupted)
    assert run(capsys, *line)[0] == cli.INTERRUPTED
    monkeypatch.setattr(reap_module, "prune_pack", real)
    monkeypatch.setattr(calibration, "_read", interrupted)  # nothing is measured again
    assert run(capsys, *line)[0] == 0
    assert Pack.open(tmp_path / "dst").config.num_experts == 3


def test_a_process_that_is_stopped_leaves_nothing_half_done(pack, text, tmp_path) -> None:
    """Ctrl-C of the real program while it measures: one line, no output, and the next run ends as if nothing had been."""
    script = ("import sys, time\nfrom fermi_engine.cli import app as cli\n"
              "from fermi_engine.compression import calibration\nreal = calibration._read\n"
              "def slow(*a):\n    print('reading', flush=True)\n    time.sleep(20)\n    real(*a)\n"
              "calibration._read = slow\nsys.exit(cli.run(sys.argv[1:]))")
    line = ["reap", "-m", pack, "--calibration", text, "-t", "1", "--keep", "3", "-o", tmp_path / "dst"]
    with subprocess.Popen([sys.executable, "-c", script, *map(str, line)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                          stderr=subprocess.PIPE, env={**os.environ, "FERMI_CACHE": str(tmp_path / "cache")}) as process:
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (cli.INTERRUPTED, "interrupted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.jsonl"]


MISTAKES = {
    "keep 0": (["--keep", "0"], "keep 2 to 6"),
    "keep below top-k": (["--keep", "1"], "routes every token to 2"),
    "keep above experts": (["--keep", "7"], "has 6 experts a layer"),
    "negative keep": (["--keep", "-3"], "keep 2 to 6"),
    "no calibration": (["--keep", "3", "--calibration", "{none}"], "cannot read"),
    "empty calibration": (["--keep", "3", "--calibration", "{empty}"], "holds no usable text"),
    "calibration of one token": (["--keep", "3", "--calibration", "{lonely}"], "1 token in 1 documents"),
    "calibration that is no text": (["--keep", "3", "--calibration", "{pack}"], "no UTF-8 text"),
    "an image without a path": (["--keep", "3", "--calibration", "{image}"], "says not which"),
    "neither calibration nor scores": (["--keep", "3", "--calibration", ""], "one of both"),
    "both": (["--keep", "3", "--scores", "{scores}"], "one of both"),
    "scores that are none": (["--keep", "3", "--calibration", "", "--scores", "{empty}"], "is no JSON"),
    "scores of another model": (["--keep", "3", "--calibration", "", "--scores", "{scores}"], "2 layers of 3 experts"),
    "scores of mixed counts": (["--keep", "3", "--calibration", "", "--scores", "{mixed}"], "layers of 2, 3 experts"),
    "scores that would keep a broken expert": (["--keep", "6", "--calibration", "", "--scores", "{broken}"],
                                               "layer 1 would keep expert 4"),
    "a dense model": (["--keep", "3", "-m", "{dense}"], "is a dense model"),
    "a pruned pack": (["--keep", "2", "-m", "{pruned}"], "already pruned (from 6 to 3 experts)"),
    "a pack of a pruned checkpoint": (["--keep", "2", "-m", "{converted}"], "already pruned"),
    "a pruned checkpoint": (["--keep", "2", "-m", "{directory}"], "already pruned"),
    "mixed counts in a pack": (["--keep", "3", "-m", "{uneven}"], "tensor layers.1.mlp.experts.gate_up_proj has shape"),
    "mixed counts in a checkpoint": (["--keep", "3", "-m", "{ragged}"], "config.json asks for"),
    "an absent model": (["--keep", "3", "-m", "{none}"], "cannot read"),
    "an output that exists": (["--keep", "3", "-o", "{empty}"], "exists; remove it"),
    "an output that is the model": (["--keep", "3", "-o", "{pack}"], "is the pack to prune itself"),
    "an output that is a directory": (["--keep", "3", "-o", "{source}"], "is a directory"),
    "an output nowhere": (["--keep", "3", "-o", "{empty}/x/y"], "no directory that is there"),
    "scores in the way": (["--keep", "3", "-o", "{blocked}"], "holds no scores"),
}


@pytest.fixture(scope="module")
def things(pack: Path, source: Path) -> dict[str, Path]:
    """Models and files of each bad kind."""
    root = source.parent / "things"
    root.mkdir()
    made = {name: root / name for name in ("empty", "lonely.jsonl", "image.jsonl", "scores", "mixed", "broken", "none")}
    made = {name.split(".")[0]: path for name, path in made.items()}
    made["empty"].touch()
    made["lonely"].write_text('{"ids": [3]}')
    made["image"].write_text('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}')
    scores = Scores(np.ones((2, 3)), np.ones((2, 3), int), 2).to_json(np.array([[0, 1]] * 2))
    made["scores"].write_text(json.dumps(scores))
    scores["layers"][1]["scores"].pop()
    made["mixed"].write_text(json.dumps(scores))
    values = np.ones((LAYERS, EXPERTS))
    values[1, 4] = math.nan
    made["broken"].write_text(json.dumps(Scores(values, values.astype(bool).astype(int), 2).to_json(
        np.array([[0, 1]] * LAYERS))))
    made["dense"] = convert(make_checkpoint(root / "dense", 1, family="dense", layers=4), root / "dense.pack")
    made["pruned"] = prune_pack(pack, root / "pruned.pack", KEPT)
    made["directory"] = prune_checkpoint(source, root / "directory", KEPT)
    made["converted"] = convert(made["directory"], root / "converted.pack")
    made["uneven"] = uneven(Path(shutil.copy(pack, root / "uneven.pack")))
    made["ragged"] = ragged(make_checkpoint(root / "ragged", 1, layout="per-expert", **SMALL))
    made["blocked"] = root / "blocked"
    (root / "blocked.reap.json").write_text("thesis")
    return made


def uneven(path: Path) -> Path:
    """The pack with one expert fewer in layer 1."""
    metadata = read_header(path, PackError).metadata
    layout = json.loads(metadata["tensors"])
    layout[blob_name(1)]["experts"] -= 1
    with Pack.open(path) as opened:
        stride = opened.info()["expert_stride"]
        data = opened._bytes(blob_name(1))[:-stride].tobytes()
    return remake(path, {"tensors": json.dumps(layout)}, {blob_name(1): data}, shapes={blob_name(1): (EXPERTS - 1, stride)})


def ragged(path: Path) -> Path:
    """The checkpoint with one expert fewer in layer 1."""
    held = load_file(path / "model.safetensors")
    save_file({name: value for name, value in held.items() if f"layers.1.mlp.experts.{EXPERTS - 1}." not in name},
              path / "model.safetensors")
    return path


def listing(*roots: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for root in roots for path in sorted(root.rglob("*"))
            if path.is_file()}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line_and_change_nothing(capsys, pack, source, things, text, tmp_path, cache, name) -> None:
    words, said = MISTAKES[name]
    names = {**things, "pack": pack, "source": source}
    words = [word.format(**names) for word in words]
    line = [*(() if "-m" in words else ("-m", pack)), *(() if "-o" in words else ("-o", tmp_path / "dst")), "-t", "1"]
    if "--calibration" not in words:
        line += ["--calibration", text]
    elif "" in words:
        at = words.index("--calibration")
        del words[at:at + 2]
    before = listing(tmp_path, source.parent)
    status, out, err = run(capsys, *line, *words)
    assert (status, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err
    assert listing(tmp_path, source.parent) == before


def test_a_choice_that_no_model_has_is_refused(pack, source, tmp_path) -> None:
    for kept in (KEPT[:3], KEPT[:, ::-1], KEPT + 3, np.zeros((LAYERS, 3), int)):
        assert "expected rising ids below 6" in refusal(RequestError, lambda kept=kept: prune_pack(pack, tmp_path / "x", kept))
        refusal(RequestError, lambda kept=kept: prune_checkpoint(source, tmp_path / "x", kept))
    assert not list(tmp_path.iterdir())


@pytest.mark.soak
def test_memory_does_not_grow_with_the_pack(tmp_path) -> None:
    """Pruning 1 GB of experts takes less than 64 MB beyond what importing takes."""
    src = convert(make_checkpoint(tmp_path / "big", 1, big=True), tmp_path / "big.pack", "q8_0")
    script = ("import sys, numpy as np\nfrom fermi_engine.compression.prune_pack import prune_pack\n"
              "def peak():\n    rows = open('/proc/self/status').read().split('\\n')\n"
              "    return next(int(r.split()[1]) for r in rows if r.startswith('RssAnon'))\n"
              "most = []\nbefore = peak()\n"
              "prune_pack(sys.argv[1], sys.argv[2], [list(range(0, 128, 2))], lambda *_: most.append(peak()))\n"
              "print(max(most) - before)")
    done = subprocess.run([sys.executable, "-c", script, src, tmp_path / "dst"], cwd=ROOT, capture_output=True, text=True,
                          check=True)
    assert src.stat().st_size > 5e8
    assert int(done.stdout) < 64 << 10
