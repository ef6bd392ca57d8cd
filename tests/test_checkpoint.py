"""Checkpoint reading: every layout the family is published in, and every way a directory can be wrong."""

from __future__ import annotations

import json
import math
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fermi_engine.checkpoint import Checkpoint, TensorInfo
from fermi_engine.config import ModelConfig
from fermi_engine.convert import convert
from fermi_engine.errors import CheckpointError, ConfigError, PackError
from fermi_engine.safetensors_header import Header, read_header
from fermi_engine.shapes import expected_shapes
from fermi_engine.vision.config import is_vision
from tools.make_checkpoint import make_checkpoint

SMALL = {"layers": 4, "hidden": 32, "experts": 3, "experts_per_tok": 2, "heads": 2, "kv_heads": 1, "value_heads": 4}
INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
QKV = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"
NORM = "model.language_model.norm.weight"
Tensors = dict[str, tuple[str, list[int], bytes]]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    make_checkpoint(root / "single", 1, **SMALL)
    make_checkpoint(root / "sharded", 1, shards=2, **SMALL)
    make_checkpoint(root / "per-expert", 1, layout="per-expert", **SMALL)
    make_checkpoint(root / "f32", 1, dtype="f32", **SMALL)
    make_checkpoint(root / "tied", 1, tied=True, **SMALL)
    return root


@pytest.fixture
def single(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "single", tmp_path / "single"))


@pytest.fixture
def sharded(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "sharded", tmp_path / "sharded"))


def load(file: Path) -> Tensors:
    """An independent, trusting reader."""
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    fields = json.loads(raw[8:start])
    fields.pop("__metadata__", None)
    return {name: (f["dtype"], f["shape"], raw[start + f["data_offsets"][0]:start + f["data_offsets"][1]])
            for name, f in fields.items()}


def save(file: Path, tensors: Tensors, change: dict[str, dict] | None = None) -> None:
    """Write tensors; `change` overrides header fields by tensor name."""
    fields, position = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        fields[name].update((change or {}).get(name, {}))
        position += len(data)
    save_raw(file, json.dumps(fields).encode(), b"".join(data for _, _, data in tensors.values()))


def save_raw(file: Path, header: bytes, data: bytes = b"") -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def refused(path: Path, *parts: str) -> None:
    """Opening fails with one line that holds all `parts`."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text, f"{part!r} not in {text!r}"


def open_error(path: Path) -> str:
    try:
        Checkpoint.open(path)
    except CheckpointError as err:
        return str(err)
    return ""


def edit_json(file: Path, **fields: object) -> None:
    value = json.loads(file.read_text())
    value.update(fields)
    file.write_text(json.dumps(value))


LAYOUTS = [
    {}, {"layout": "per-expert"}, {"dtype": "f16"}, {"dtype": "f32", "shards": 3}, {"text_only": True}, {"tied": True},
    {"prefix": "language_model.model."}, {"prefix": "model.", "layout": "per-expert", "shards": 2},
    {"family": "dense"}, {"family": "dense", "tied": True, "text_only": True}, {"tokenizer": False},
    {"family": "minicpm", "tied": True},
]


@pytest.mark.parametrize("options", LAYOUTS, ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()) or "release")
def test_layouts_are_read_exactly(tmp_path: Path, options: dict) -> None:
    path = make_checkpoint(tmp_path / "c", 5, **{**SMALL, **options})
    oracle = {}
    for file in path.glob("*.safetensors"):
        oracle |= load_file(file)
    checkpoint = Checkpoint.open(path)
    used = {info.source for info in checkpoint.tensors.values()}
    assert used | set(checkpoint.unused) == set(oracle)
    assert not used & set(checkpoint.unused)
    assert all(name.startswith("mtp.") for name in checkpoint.unused)
    assert (checkpoint.vision is None) == options.get("text_only", False)
    assert bool(checkpoint.unused) == (not options.get("text_only", False))
    for name, info in checkpoint.tensors.items():
        want = oracle[info.source].float().numpy()
        got = checkpoint.read(name)
        assert got.dtype == np.float32
        assert got.shape == want.shape == checkpoint.shape(name)
        assert np.array_equal(got, want), name
    assert ("tokenizer.json" in checkpoint.files) == options.get("tokenizer", True)
    assert checkpoint.files["generation_config.json"] == path / "generation_config.json"
    assert ("lm_head.weight" in checkpoint.tensors) == (not options.get("tied", False))
    assert checkpoint.config.vocab_size == checkpoint.shape("embed_tokens.weight")[0]
    assert checkpoint.raw_config == json.loads((path / "config.json").read_text())


def test_expert_rows_hide_the_layout(originals: Path) -> None:
    fused, single = Checkpoint.open(originals / "single"), Checkpoint.open(originals / "per-expert")
    inner, hidden = fused.config.moe_intermediate_size, fused.config.hidden_size
    whole = {part: fused.read(f"layers.2.mlp.experts.{part}_proj") for part in ("gate_up", "down")}
    spans = {"gate_up": [(0, 2 * inner), (0, inner), (inner, 2 * inner), (inner - 1, inner + 1), (3, 7), (inner,) * 2],
             "down": [(0, hidden), (5, 6), (hidden - 1, hidden)]}
    for part, cuts in spans.items():
        for expert in range(3):
            for begin, end in cuts:
                want = whole[part][expert, begin:end]
                assert np.array_equal(fused.expert_rows(2, part, expert, begin, end), want)
                assert np.array_equal(single.expert_rows(2, part, expert, begin, end), want)
    gate = single.read("layers.2.mlp.experts.1.gate_proj.weight")
    assert np.array_equal(gate, single.expert_rows(2, "gate_up", 1, 0, inner))
    for checkpoint in (fused, single):
        for wrong in ((2, "gate_up", 3, 0, 1), (2, "gate_up", -1, 0, 1), (2, "down", 0, 0, hidden + 1)):
            with pytest.raises(ValueError, match="expert"):
                checkpoint.expert_rows(*wrong)


@pytest.mark.parametrize("directory", ["single", "f32"])
def test_rows_are_slices_of_the_tensor(originals: Path, directory: str) -> None:
    checkpoint = Checkpoint.open(originals / directory)
    for name in ("embed_tokens.weight", "layers.0.linear_attn.conv1d.weight", "layers.0.linear_attn.A_log",
                 "layers.1.mlp.experts.down_proj"):
        whole = checkpoint.read(name)
        flat = whole.reshape(-1, whole.shape[-1])
        for begin, end in ((0, len(flat)), (0, 0), (len(flat) // 2, len(flat)), (len(flat) - 1, len(flat))):
            assert np.array_equal(checkpoint.rows(name, begin, end), flat[begin:end])
        for begin, end in ((0, len(flat) + 1), (-1, 1), (1, 0)):
            with pytest.raises(ValueError, match="rows"):
                checkpoint.rows(name, begin, end)


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16)])
def test_every_16_bit_pattern_widens_exactly(originals: Path, tmp_path: Path, dtype: str, torch_dtype: object) -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    (tmp_path / "all").write_bytes(b"pad" + patterns.tobytes())
    checkpoint = Checkpoint.open(originals / "single")
    checkpoint.tensors["t"] = TensorInfo("t", "t", tmp_path / "all", dtype, (256, 256), 3, 131072)
    got = checkpoint.read("t").reshape(-1)
    want = torch.from_numpy(patterns.view(np.int16)).view(torch_dtype).float().numpy()
    numbers = ~np.isnan(want)
    assert np.array_equal(got.view(np.uint32)[numbers], want.view(np.uint32)[numbers])
    assert np.isnan(got[~numbers]).all()


def test_reads_are_repeated_until_complete(originals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(originals / "single")
    want = checkpoint.read("layers.1.mlp.experts.gate_up_proj")
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: whole(fd, [buffers[0][:1001]], at))
    assert np.array_equal(checkpoint.read("layers.1.mlp.experts.gate_up_proj"), want)


def test_memory_is_the_block_not_the_tensor(originals: Path, tmp_path: Path) -> None:
    rows, n, step = 4096, 1024, 64
    with open(tmp_path / "large", "wb") as file:
        file.truncate(rows * n * 2)
    checkpoint = Checkpoint.open(originals / "single")
    checkpoint.tensors["t"] = TensorInfo("t", "t", tmp_path / "large", "BF16", (rows, n), 0, rows * n * 2)
    tracemalloc.start()
    for begin in range(0, rows, step):
        checkpoint.rows("t", begin, begin + step)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    block = step * n * (2 + 4)  # what was read and what it widened to; the previous block's result lives until replaced
    assert peak < block + step * n * 4 + 65536


def test_a_file_cut_while_in_use_is_named(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    info = checkpoint.tensors["lm_head.weight"]
    os.truncate(single / "model.safetensors", info.offset + 10)
    with pytest.raises(CheckpointError, match=r"model\.safetensors ends inside tensor lm_head\.weight"):
        checkpoint.read("lm_head.weight")
    os.remove(single / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot read tensor lm_head\.weight.*No such file"):
        checkpoint.read("lm_head.weight")


def test_identity_follows_content_not_place(single: Path, sharded: Path, originals: Path) -> None:
    first = Checkpoint.open(originals / "single").identity()
    assert Checkpoint.open(single).identity() == first
    assert set(first) == {"config.json", "model.safetensors"}
    assert first["model.safetensors"]["bytes"] == (single / "model.safetensors").stat().st_size
    assert set(Checkpoint.open(sharded).identity()) == {"config.json", ONE, TWO}
    raw = bytearray((single / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (single / "model.safetensors").write_bytes(raw)
    changed = Checkpoint.open(single).identity()["model.safetensors"]
    assert changed["sample_blake2b"] != first["model.safetensors"]["sample_blake2b"]
    assert changed["header_blake2b"] == first["model.safetensors"]["header_blake2b"]
    tensors = load(single / "model.safetensors")
    save(single / "model.safetensors", dict(reversed(tensors.items())))
    assert Checkpoint.open(single).identity()["model.safetensors"]["header_blake2b"] != changed["header_blake2b"]
    edit_json(single / "config.json", note="edited")
    assert Checkpoint.open(single).identity()["config.json"] != first["config.json"]


def test_a_tied_head_that_is_stored_anyway_is_unused(originals: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(originals / "single", tmp_path / "c"))
    edit_json(path / "config.json", tie_word_embeddings=True)
    checkpoint = Checkpoint.open(path)
    assert "lm_head.weight" in checkpoint.unused
    assert "lm_head.weight" not in checkpoint.tensors


OTHERS = {"visual.x", "model.vision_tower.x", "vision_tower.x", "model.merger.mlp.0.x", "merger.x"}
MTP = {"language_model.mtp.x", "model.language_model.mtp.x"}


def test_towers_that_the_configuration_does_not_describe_are_unused(single: Path) -> None:
    tensors = load(single / "model.safetensors")
    save(single / "model.safetensors", {**tensors, **{name: ("I32", [1], b"abcd") for name in OTHERS | MTP}})
    raw = json.loads((single / "config.json").read_text())
    del raw["vision_config"]
    (single / "config.json").write_text(json.dumps(raw))
    checkpoint = Checkpoint.open(single)
    assert checkpoint.vision is None
    assert {*OTHERS, *MTP, "model.visual.pos_embed.weight"} <= set(checkpoint.unused)
    assert not any(map(is_vision, checkpoint.tensors))


def test_a_described_tower_is_held_against_its_description(single: Path) -> None:
    tensors = load(single / "model.safetensors")
    for name in OTHERS:
        save(single / "model.safetensors", {**tensors, name: ("I32", [1], b"abcd")})
        refused(single, name)
    for name in ("model.visual.blocks.0.norm1.bias", "model.visual.merger.linear_fc2.weight"):
        save(single / "model.safetensors", {n: t for n, t in tensors.items() if n != name})
        refused(single, name.removeprefix("model."))
    save(single / "model.safetensors", tensors)
    raw = json.loads((single / "config.json").read_text())
    raw["vision_config"]["intermediate_size"] += 8
    (single / "config.json").write_text(json.dumps(raw))
    refused(single, "blocks.0.mlp.linear_fc1")


def test_a_checkpoint_that_was_stripped_of_its_tower_is_text(single: Path) -> None:
    tensors = load(single / "model.safetensors")
    save(single / "model.safetensors", {name: t for name, t in tensors.items() if ".visual." not in name})
    assert Checkpoint.open(single).vision is None


def test_expected_shapes_match_the_release() -> None:
    """Published: 35.107 billion parameters without the speculative head; the vision tower's are counted here."""
    config = ModelConfig(
        model_type="qwen3_5_moe_text", vocab_size=248320, hidden_size=2048, num_hidden_layers=40,
        layer_types=(*["linear_attention"] * 3, "full_attention") * 10, num_attention_heads=16, num_key_value_heads=2,
        head_dim=256, rotary_dim=64, rope_theta=1e7, mrope_section=(11, 11, 10), rms_norm_eps=1e-6,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512)
    shapes = expected_shapes(config)
    v, wide, inner = 1152, 4608, 4304
    block = 4 * v + 3 * v * (v + 1) + v * (v + 1) + inner * (v + 1) + v * (inner + 1)
    vision = v * (3 * 2 * 16 * 16 + 1) + 2304 * v + 27 * block + 2 * v + wide * (wide + 1) + 2048 * (wide + 1)
    half_a_digit = 0.5e6
    assert abs(sum(math.prod(s) for s in shapes.values()) + vision - 35.107e9) < half_a_digit
    assert shapes["layers.0.linear_attn.in_proj_qkv.weight"] == (8192, 2048)
    assert shapes["layers.0.linear_attn.conv1d.weight"] == (8192, 1, 4)
    assert shapes["layers.3.self_attn.q_proj.weight"] == (8192, 2048)
    assert shapes["layers.3.self_attn.o_proj.weight"] == (2048, 4096)
    assert shapes["layers.39.mlp.experts.gate_up_proj"] == (256, 1024, 2048)
    assert shapes["layers.39.mlp.experts.down_proj"] == (256, 2048, 512)
    assert shapes["lm_head.weight"] == (248320, 2048)


# What a directory can be, short of a checkpoint


def test_no_directory(tmp_path: Path, single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(tmp_path / "absent", "absent", "does not exist")
    refused(single / "config.json", "config.json is a file", "directory")

    def denied(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", denied)
    refused(single, str(single), "Permission denied")


def test_config_missing_or_damaged(single: Path) -> None:
    text = (single / "config.json").read_text()
    (single / "config.json").write_text(text[:100])
    refused(single, "config.json", "is not JSON")
    (single / "config.json").write_bytes(b"\xff\xfe")
    refused(single, "config.json", "is not JSON")
    (single / "config.json").write_text("[1]")
    refused(single, "config.json", "list")
    (single / "config.json").unlink()
    refused(single, str(single), "no config.json")
    (single / "config.json").mkdir()
    refused(single, "cannot read", "config.json")


def test_unknown_architecture(single: Path) -> None:
    edit_json(single / "config.json", model_type="llama")
    with pytest.raises(ConfigError, match="llama"):
        Checkpoint.open(single)


def test_nonsense_in_the_configuration(single: Path) -> None:
    edit_json(single / "config.json", tie_word_embeddings="no")
    with pytest.raises(ConfigError, match="'tie_word_embeddings' is 'no', expected true or false"):
        Checkpoint.open(single)


@pytest.mark.parametrize("ids", ["1e999", "[Infinity]", "[1, -5]", "true", "1.5", "{}", '["x"]'])
def test_nonsense_in_the_generation_configuration(single: Path, tmp_path: Path, ids: str) -> None:
    path = single / "generation_config.json"
    path.write_text(f'{{"eos_token_id": {ids}}}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is .*, expected a token id or a list"):
        convert(single, tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_no_weights(single: Path) -> None:
    (single / "model.safetensors").rename(single / "other.safetensors")
    refused(single, "other.safetensors", INDEX)
    (single / "other.safetensors").unlink()
    refused(single, "neither model.safetensors nor")
    (single / "pytorch_model-00001-of-00002.bin").write_bytes(b"PK")
    refused(single, "pytorch_model.bin", "safetensors is needed")


def test_two_sets_of_weights(sharded: Path, single: Path) -> None:
    shutil.copy(single / "model.safetensors", sharded)
    refused(sharded, "model.safetensors", INDEX, "twice")
    names = load(single / "model.safetensors")
    (single / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert Checkpoint.open(single).tensors


# A single weight file gone wrong


def test_truncated(single: Path) -> None:
    file = single / "model.safetensors"
    size, start = file.stat().st_size, read_header(file).data_start
    os.truncate(file, size - 100)
    refused(single, "model.safetensors is truncated", f"expected {size - start} bytes", f"found {size - start - 100}")
    os.truncate(file, start - 1)
    refused(single, "truncated inside its header", f"at least {start} bytes", f"found {start - 1}")
    os.truncate(file, 5)
    refused(single, "has 5 bytes")
    os.truncate(file, 0)
    refused(single, "has 0 bytes")


def test_trailing_bytes(single: Path) -> None:
    with open(single / "model.safetensors", "ab") as file:
        file.write(b"x")
    refused(single, "is longer than its header says")


def test_git_lfs_pointer(single: Path) -> None:
    (single / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    refused(single, "model.safetensors is a git-lfs pointer", "git lfs pull")


def test_header_length_is_noise(single: Path) -> None:
    (single / "model.safetensors").write_bytes(b"\xff" * 64)
    refused(single, "is not a safetensors file")


@pytest.mark.parametrize(("header", "part"), [
    (b"{not json", "is not JSON"), (b'"\xff"', "is not JSON"), (b"[" * 100000, "is not JSON"), (b"[1]", "list"),
    (b'{"a": 1}', "tensor a"), (b'{"a": {"dtype": "F32", "shape": []}}', "tensor a"),
    (b'{"__metadata__": {"a": 1}}', "__metadata__"),
    (b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}', "'F99'"),
    (b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}', "dtype ['F32']"),
    (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "shape [-1]"),
    (b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', "shape [True]"),
    (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4.0]}}', "data_offsets [0, 4.0]"),
    (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}', "data_offsets [0]"),
    (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', "span -4"),
    (b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, "a": {"dtype": "U8", "shape": [2],'
     b' "data_offsets": [2, 4]}}', "'a' twice"),
])
def test_header_damage(single: Path, header: bytes, part: str) -> None:
    save_raw(single / "model.safetensors", header, b"1234")
    refused(single, "model.safetensors", part)


def test_offsets_must_tile(single: Path) -> None:
    file = single / "model.safetensors"
    tensors = load(file)
    end = read_header(file).tensors[QKV].end
    size = len(tensors[QKV][2])
    save(file, tensors, {QKV: {"data_offsets": [end - size - 2, end - 2]}})
    refused(single, QKV, "overlaps")
    save(file, {**tensors, QKV: ("BF16", [1], b"ab")}, {QKV: {"data_offsets": [end - size + 2, end - size + 4]}})
    refused(single, QKV, "leaves a hole")
    save(file, tensors, {QKV: {"shape": [1, 2]}})
    refused(single, QKV, "BF16 [1, 2]", "needs 4 bytes", f"span {size}")
    save(file, tensors, {QKV: {"dtype": "F32"}})
    refused(single, QKV, f"needs {2 * size} bytes", f"span {size}")


def test_the_error_class_is_the_callers(tmp_path: Path) -> None:
    for data in (b"", b"\xff" * 16, (9).to_bytes(8, "little") + b"{not json"):
        (tmp_path / "pack").write_bytes(data)
        with pytest.raises(PackError, match="pack"):
            read_header(tmp_path / "pack", PackError)
    with pytest.raises(PackError, match="No such file"):
        read_header(tmp_path / "absent", PackError)


def test_header_fields(tmp_path: Path) -> None:
    text = (b'{"__metadata__":{"k":"v"},"b":{"dtype":"F32","shape":[2,1],"data_offsets":[3,11]},'
            b'"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},'
            b'"e":{"dtype":"F16","shape":[0,7],"data_offsets":[3,3]}}')
    save_raw(tmp_path / "f", text, b"x" * 11)
    header = read_header(tmp_path / "f")
    tensors, metadata, data_start = header
    assert isinstance(header, Header)
    assert tensors == {"b": ("F32", (2, 1), 3, 11), "a": ("U8", (3,), 0, 3), "e": ("F16", (0, 7), 3, 3)}
    assert list(tensors) == ["b", "a", "e"]
    assert metadata == {"k": "v"}
    assert (data_start, header.file_bytes) == (8 + len(text), 8 + len(text) + 11)


def test_flipped_header_bytes_never_escape(single: Path) -> None:
    """Damage gives a checkpoint of equal structure (a byte of metadata or padding) or one clear error."""
    file = single / "model.safetensors"
    raw = file.read_bytes()
    start = read_header(file).data_start
    rng = np.random.default_rng(0)
    caught = 0
    for _ in range(60):
        damaged = bytearray(raw)
        damaged[rng.integers(start)] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        error = open_error(single)
        assert "\n" not in error
        caught += bool(error)
    assert caught > 50


# Tensors that do not fit the configuration


def test_missing_and_leftover(single: Path) -> None:
    file = single / "model.safetensors"
    tensors = load(file)
    extra = "model.language_model.layers.4.extra.weight"
    save(file, {k: v for k, v in tensors.items() if k != QKV})
    refused(single, "lacks tensor layers.0.linear_attn.in_proj_qkv.weight")
    save(file, {**tensors, extra: ("BF16", [1], b"ab")})
    refused(single, "model.safetensors", f"holds tensor {extra}", "qwen3_5_moe_text")
    renamed = {(extra if k == QKV else k): v for k, v in tensors.items()}
    save(file, renamed)
    refused(single, "lacks tensor layers.0.linear_attn.in_proj_qkv.weight", extra)
    save(file, {k: v for k, v in tensors.items() if "norm" not in k})
    refused(single, "lacks tensors norm.weight, ", " more")
    save(file, {**tensors, "foo.weight": ("BF16", [1], b"ab")})
    refused(single, "foo.weight", "unknown")


def test_more_layers_than_configured(single: Path) -> None:
    config = json.loads((single / "config.json").read_text())
    config["text_config"] |= {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3}
    (single / "config.json").write_text(json.dumps(config))
    refused(single, "holds tensors model.language_model.layers.3.")


def test_untied_head_missing(originals: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(originals / "tied", tmp_path / "c"))
    config = json.loads((path / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (path / "config.json").write_text(json.dumps(config))
    refused(path, "lacks tensor lm_head.weight")


def test_expert_missing_or_too_many(originals: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(originals / "per-expert", tmp_path / "c"))
    file = path / "model.safetensors"
    tensors = load(file)
    name = "model.language_model.layers.1.mlp.experts.{}.up_proj.weight"
    save(file, {k: v for k, v in tensors.items() if k != name.format(2)})
    refused(path, "layers.1.mlp.experts.2.up_proj.weight")
    save(file, {**tensors, name.format(3): tensors[name.format(2)]})
    refused(path, name.format(3))
    fused = load(originals / "single" / "model.safetensors")["model.language_model.layers.1.mlp.experts.gate_up_proj"]
    save(file, {**tensors, "model.language_model.layers.1.mlp.experts.gate_up_proj": fused})
    refused(path, "lacks tensor layers.1.mlp.experts.down_proj", "layers.1.mlp.experts.0.gate_proj.weight")


def test_shapes(single: Path) -> None:
    file = single / "model.safetensors"
    tensors = load(file)
    dtype, (rows, n), data = tensors[QKV]
    save(file, {**tensors, QKV: (dtype, [n, rows], data)})
    refused(single, "model.safetensors", QKV, f"has shape [{n}, {rows}]", f"[{rows}, {n}]")
    conv = QKV.replace("in_proj_qkv", "conv1d")
    dtype, shape, data = tensors[conv]
    save(file, {**tensors, conv: (dtype, [shape[0], 4], data)})
    refused(single, conv, f"has shape [{shape[0]}, 4]", f"[{shape[0]}, 1, 4]")


def test_vocabulary(single: Path) -> None:
    config = json.loads((single / "config.json").read_text())
    rows = config["text_config"]["vocab_size"]
    config["text_config"]["vocab_size"] = rows + 1
    (single / "config.json").write_text(json.dumps(config))
    refused(single, "embed_tokens.weight", f"has shape [{rows}, 32]", f"[{rows + 1}, 32] (vocab_size")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I32", "F64"])
def test_dtypes(single: Path, dtype: str) -> None:
    file = single / "model.safetensors"
    tensors = load(file)
    width = {"F8_E4M3": 1, "I32": 4, "F64": 8}[dtype]
    shape = tensors[QKV][1]
    save(file, {**tensors, QKV: (dtype, shape, bytes(math.prod(shape) * width))})
    refused(single, "model.safetensors", QKV, f"has dtype {dtype}", "BF16, F16, F32")
    edit_json(single / "config.json", quantization_config={"quant_method": "fp8"})
    refused(single, "quantised with fp8")


def test_same_tensor_under_two_names(single: Path) -> None:
    file = single / "model.safetensors"
    tensors = load(file)
    save(file, {**tensors, "model.norm.weight": tensors[NORM]})
    refused(single, NORM, "model.norm.weight", "both the tensor norm.weight")
    save(file, {**tensors, "language_model.lm_head.weight": tensors["lm_head.weight"]})
    refused(single, "language_model.lm_head.weight", "both the tensor lm_head.weight")
    save(file, {("model.norm.weight" if k == NORM else k): v for k, v in tensors.items()})
    refused(single, "mixes name prefixes", "model.norm.weight")


# Index and shards


def test_index_is_damaged(sharded: Path) -> None:
    for value in ({}, {"weight_map": {}}, {"weight_map": {"a": 1}}, {"weight_map": ["a"]}):
        (sharded / INDEX).write_text(json.dumps(value))
        refused(sharded, INDEX, "weight_map")
    (sharded / INDEX).write_text("{")
    refused(sharded, INDEX, "not JSON")


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "a/../../x", ""])
def test_index_leaves_the_directory(sharded: Path, shard: str) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][NORM] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, NORM, repr(shard), "outside the checkpoint directory")


def test_shard_missing(sharded: Path) -> None:
    (sharded / TWO).unlink()
    refused(sharded, INDEX, TWO, "missing")
    (sharded / TWO).mkdir()
    refused(sharded, INDEX, TWO, "missing")


def test_shard_truncated(sharded: Path) -> None:
    size = (sharded / TWO).stat().st_size
    os.truncate(sharded / TWO, size - 1)
    refused(sharded, f"{TWO} is truncated")


def test_index_and_shards_disagree(sharded: Path) -> None:
    one, two = load(sharded / ONE), load(sharded / TWO)
    name = next(iter(one))
    save(sharded / ONE, {k: v for k, v in one.items() if k != name})
    refused(sharded, INDEX, name, ONE, "no shard has it")
    save(sharded / TWO, {**two, name: one[name]})
    refused(sharded, INDEX, name, f"into {ONE}", f"it is in {TWO}")
    save(sharded / ONE, one)
    refused(sharded, name, "in two shards", ONE, TWO)
    save(sharded / TWO, {**two, "mtp.new": ("U8", [1], b"a")})
    refused(sharded, TWO, "mtp.new", "does not list")
    save(sharded / TWO, two)
    assert Checkpoint.open(sharded).tensors
