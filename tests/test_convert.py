"""Conversion: every tensor's values and format, the same bytes whatever happens on the way, and sources it refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest

from fermi_engine import convert as convert_module
from fermi_engine.checkpoint import Checkpoint
from fermi_engine.compression.rules import F32_RULES, assign, parse_rules, rule_rows
from fermi_engine.convert import cache_directory, cached_pack, convert
from fermi_engine.errors import CheckpointError, ConfigError, FermiError, FormatError, PackError
from fermi_engine.formats import FORMATS
from fermi_engine.pack import Pack
from fermi_engine.safetensors_header import read_header
from fermi_engine.shapes import expected_shapes, pack_shapes
from fermi_engine.vision.config import is_vision, stored_shapes
from tools.make_checkpoint import make_checkpoint

ROOT = Path(__file__).resolve().parents[1]
MB = 1 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("convert") / "checkpoint", 5, layers=4)


@pytest.fixture
def own_source(source: Path, tmp_path: Path) -> Path:
    """A copy of `source` to damage."""
    return Path(shutil.copytree(source, tmp_path / "checkpoint"))


def refusal(kind: type[FermiError], action: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    return text


def data_bytes(path: Path) -> bytes:
    """Everything between header and seal."""
    header = read_header(path, PackError)
    return path.read_bytes()[header.data_start:header.data_start + header.tensors["_seal"].begin]


def run_python(script: str, *args: object, **options: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{script}",
                             *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


# Values


@pytest.mark.parametrize("options", [
    {"family": "moe", "layout": "fused"}, {"family": "moe", "layout": "per-expert", "shards": 3},
    {"family": "moe", "layout": "fused", "text_only": True, "dtype": "f32", "moe_intermediate": 64, "hidden": 96},
    {"family": "dense", "tied": True, "dtype": "f16", "value_heads": 6}, {"family": "minicpm", "tied": True}], ids=str)
@pytest.mark.parametrize("format", ["q4_0", "q8_0", "f16", "f32"])
def test_every_tensor_is_the_quantised_source(tmp_path: Path, format: str, options: dict) -> None:
    src = make_checkpoint(tmp_path / "c", 11, layers=4, **options)
    checkpoint = Checkpoint.open(src)
    seen = set()
    with Pack.open(convert(src, tmp_path / "p", format)) as pack:
        assert pack.config == checkpoint.config
        assert pack.default_format == format
        for name, shape in expected_shapes(checkpoint.config).items():
            fixed = len(shape) == 1 or any(part in name for part in (".mlp.gate.", "_gate.", "in_proj_a", "in_proj_b"))
            if ".mlp.experts." in name:
                check_experts(pack, checkpoint, name, format)
                seen.add(name.rsplit(".", 1)[0] + ".blob")
                continue
            seen.add(name)
            values = checkpoint.read(name)
            if name.endswith("conv1d.weight"):
                np.testing.assert_array_equal(pack.vector(name), values[:, 0, :].T)
            elif fixed:
                np.testing.assert_array_equal(pack.vector(name), values)
            else:
                assert pack.matrix(name).format == format
                assert pack.matrix(name).plain().tobytes() == FORMATS[format].quantize(values).tobytes()
        seen |= check_vision(pack, checkpoint, format)
        assert set(pack.names) == seen
        assert pack.files() == {name: path.read_bytes() for name, path in checkpoint.files.items()}
        assert pack.unused == checkpoint.unused
        assert pack.source == checkpoint.identity()


def check_vision(pack: Pack, checkpoint: Checkpoint, format: str) -> set[str]:
    """Towers in 8 bits where text has four; patches and positions in f32; MLPs filled up with zeros to blocks of 32."""
    assert pack.vision == checkpoint.vision
    if pack.vision is None:
        return set()
    wanted = {"q4_0": "q8_0"}.get(format, format)
    shapes = stored_shapes(pack.vision)
    assert set(shapes) == {name for name in checkpoint.tensors if is_vision(name)}
    for name, shape in shapes.items():
        values = checkpoint.read(name)
        values = values.reshape(len(values), -1) if values.ndim > 2 else values
        full = np.zeros(shape, np.float32)
        full[tuple(map(slice, values.shape))] = values
        if len(shape) == 1 or "pos_" in name or "position" in name or "patch_embed" in name:
            np.testing.assert_array_equal(pack.vector(name), full)
        else:
            assert pack.matrix(name).plain().tobytes() == FORMATS[wanted].quantize(full).tobytes(), name
    return set(shapes)


def check_experts(pack: Pack, checkpoint: Checkpoint, name: str, format: str) -> None:
    layer, kind = int(name.split(".")[1]), "down" if "down" in name else "gate_up"
    for e in range(checkpoint.config.num_experts):
        matrix = pack.expert(layer, e)[kind == "down"]
        values = checkpoint.expert_rows(layer, kind, e, 0, matrix.rows)
        assert matrix.format == format
        assert matrix.plain().tobytes() == FORMATS[format].quantize(values).tobytes()


def test_layout_and_shards_of_the_source_do_not_matter(tmp_path: Path) -> None:
    packs = [convert(make_checkpoint(tmp_path / f"c{i}", 2, layers=4, **options), tmp_path / f"p{i}")
             for i, options in enumerate(({}, {"layout": "per-expert"}, {"shards": 5}, {"prefix": "model."}))]
    assert len({data_bytes(path) for path in packs}) == 1


def test_blocks_of_rows_are_small_and_their_size_does_not_matter(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = convert(source, tmp_path / "whole")
    asked = []
    real = Checkpoint.rows

    def rows(self: Checkpoint, name: str, begin: int, end: int) -> np.ndarray:
        block = real(self, name, begin, end)
        if len(self.shape(name)) > 1 and "conv1d" not in name:
            asked.append(block.nbytes)
        return block

    monkeypatch.setattr(Checkpoint, "rows", rows)
    monkeypatch.setattr(convert_module, "BLOCK_BYTES", 5000)  # 19 rows of 64: cut to 16, two groups
    assert convert(source, tmp_path / "blocks").read_bytes() == whole.read_bytes()
    assert max(asked) <= 5000


def test_end_of_turn_ids_are_the_union(own_source: Path, tmp_path: Path) -> None:
    for path, ids in ((own_source / "config.json", [7, 300]), (own_source / "generation_config.json", 9)):
        fields = json.loads(path.read_text())
        path.write_text(json.dumps({**fields, "eos_token_id": ids}))
    text = json.loads((own_source / "config.json").read_text())["text_config"]["eos_token_id"]
    with Pack.open(convert(own_source, tmp_path / "p")) as pack:
        assert set(pack.eos_ids) == {7, 9, 300, text}
    (own_source / "generation_config.json").unlink()
    with Pack.open(convert(own_source, tmp_path / "q")) as pack:
        assert set(pack.eos_ids) == {7, 300, text}


def test_checkpoint_without_tokenizer_files(tmp_path: Path) -> None:
    src = make_checkpoint(tmp_path / "c", 0, layers=1, tokenizer=False)
    with Pack.open(convert(src, tmp_path / "p")) as pack:
        assert sorted(pack.files()) == ["generation_config.json", "preprocessor_config.json"]


def test_progress_goes_to_the_end_through_every_tensor(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    path = convert(source, tmp_path / "p", progress=lambda *step: seen.append(step))
    total = 2 * path.stat().st_size
    assert {step[1] for step in seen} == {total}
    assert [step[0] for step in seen] == sorted(step[0] for step in seen)
    assert seen[-1][0] == total
    with Pack.open(path) as pack:
        assert set(pack.names) < {step[2] for step in seen}


# Rules


SHAPES = {"embed_tokens.weight": (331, 64), "norm.weight": (64,), "layers.0.linear_attn.conv1d.weight": (192, 1, 4),
          "layers.0.linear_attn.in_proj_a.weight": (4, 64), "layers.0.linear_attn.in_proj_qkv.weight": (192, 64),
          "layers.0.linear_attn.A_log": (4,), "layers.0.linear_attn.dt_bias": (4,), "layers.0.any.bias": (64,),
          "layers.0.mlp.gate.weight": (16, 64),
          "layers.0.mlp.experts.gate_up_proj": (16, 96, 64), "layers.0.mlp.experts.down_proj": (16, 64, 48),
          "layers.1.mlp.experts.down_proj": (16, 64, 48)}


def test_rule_table_and_reasons() -> None:
    rows = rule_rows(assign(SHAPES, "q4_0", parse_rules("*.gate_up_proj = q8_0, embed*=f16,*=f32")[:2]))
    assert [tuple(row) for row in rows] == [
        ("embed_tokens.weight", 1, "f16", "rule embed*=f16"),
        ("norm.weight", 1, "f32", "norm"),
        ("layers.*.linear_attn.conv1d.weight", 1, "f32", "causal convolution"),
        ("layers.*.linear_attn.in_proj_a.weight", 1, "f32", "decay of the delta rule"),
        ("layers.*.linear_attn.in_proj_qkv.weight", 1, "q4_0", "default"),
        ("layers.*.linear_attn.A_log", 1, "f32", "decay of the delta rule"),
        ("layers.*.linear_attn.dt_bias", 1, "f32", "decay of the delta rule"),
        ("layers.*.any.bias", 1, "f32", "vector"),
        ("layers.*.mlp.gate.weight", 1, "f32", "router: a rounding error picks another expert"),
        ("layers.*.mlp.experts.gate_up_proj", 1, "q8_0", "rule *.gate_up_proj=q8_0"),
        ("layers.*.mlp.experts.down_proj", 2, "f32", "row length 48 is not a multiple of 32, so not q4_0")]


def test_first_matching_rule_wins() -> None:
    chosen = assign(SHAPES, "q4_0", parse_rules("layers.0.mlp.experts.gate_up_proj=f16,*.gate_up_proj=q8_0"))
    assert chosen["layers.0.mlp.experts.gate_up_proj"].format == "f16"
    assert assign(SHAPES, "q8_0")["embed_tokens.weight"].format == "q8_0"
    assert {a.format for a in assign(SHAPES, "q4_0", parse_rules("*=f32")).values()} == {"f32"}


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in F32_RULES])
def test_every_row_of_the_table_keeps_a_tensor_in_f32(source: Path, tmp_path: Path, pattern: str) -> None:
    """Without the row a matrix of the checkpoint would be quantised, a vector would lose its reason."""
    if pattern.startswith("vision_tower"):
        source = make_checkpoint(tmp_path / "c", family="minicpm")
    checkpoint = Checkpoint.open(source)
    shapes = pack_shapes(checkpoint.config, checkpoint.vision)
    reason = dict(F32_RULES)[pattern]
    kept = [name for name, a in assign(shapes, "f16").items() if a == ("f32", reason)]
    assert any(fnmatchcase(name, pattern) for name in kept)


def test_a_tower_has_eight_bits_beside_four_and_rules_of_its_own(source: Path) -> None:
    checkpoint = Checkpoint.open(source)
    shapes = pack_shapes(checkpoint.config, checkpoint.vision)
    name = "visual.blocks.0.attn.qkv.weight"
    assert assign(shapes, "q4_0")[name] == ("q8_0", "vision: four bits would save little")
    assert assign(shapes, "q8_0")[name] == ("q8_0", "default")
    assert assign(shapes, "q4_0", parse_rules("visual.*=f32"))[name] == ("f32", "rule visual.*=f32")
    assert assign(shapes, "f32", parse_rules("visual.*.attn.*=q4_0"))[name] == ("q4_0", "rule visual.*.attn.*=q4_0")
    assert any(row.tensors == "visual.blocks.*.attn.qkv.weight" for row in rule_rows(assign(shapes, "q4_0")))


@pytest.mark.parametrize(("rules", "text"), [
    ("embed*", "rule 'embed*' is not of the form pattern=format, for example *.experts.*=q8_0"),
    ("=q8_0", "rule '=q8_0' is not of the form pattern=format, for example *.experts.*=q8_0"),
    ("embed*=", "rule 'embed*=' is not of the form pattern=format, for example *.experts.*=q8_0"),
    ("embed*=q5_0", "rule 'embed*=q5_0': unknown weight format 'q5_0'; choose one of q4_0, q8_0, f16, f32"),
    ("embed*=f16,*.expert.*=q8_0", "rule '*.expert.*=q8_0' matches no tensor; names look like embed_tokens.weight"),
    ("*=q8_0", "rule '*=q8_0' matches norm.weight (norm), which stays f32; narrow the pattern, "
               "or set the default format instead"),
    ("*.gate.weight=f16", "rule '*.gate.weight=f16' matches layers.0.mlp.gate.weight (router: a rounding error picks "
                          "another expert), which stays f32; narrow the pattern, or set the default format instead"),
])
def test_rules_that_cannot_be_followed(source: Path, tmp_path: Path, rules: str, text: str) -> None:
    assert refusal(ConfigError, lambda: convert(source, tmp_path / "p", rules=rules)) == text
    assert list(tmp_path.iterdir()) == []


def test_unknown_default_format(source: Path, tmp_path: Path, cache: Path) -> None:
    assert refusal(ConfigError, lambda: cached_pack(source, "../q4_0")) == (
        "unknown weight format '../q4_0'; choose one of q4_0, q8_0, f16, f32")
    assert not cache.exists()
    assert refusal(ConfigError, lambda: convert(source, tmp_path / "p", "q4_k")) == (
        "unknown weight format 'q4_k'; choose one of q4_0, q8_0, f16, f32")


def test_rows_off_the_block_become_f32(tmp_path: Path) -> None:
    src = make_checkpoint(tmp_path / "c", 0, layers=1, moe_intermediate=36)
    with Pack.open(convert(src, tmp_path / "p", "q4_0")) as pack:
        gate_up, down = pack.expert(0, 0)
        assert (gate_up.format, down.format) == ("q4_0", "f32")
        assert gate_up.nbytes % 64  # so there is a gap before down
        np.testing.assert_array_equal(down.dequantize(), Checkpoint.open(src).expert_rows(0, "down", 0, 0, 64))


# Sources and destinations that are refused


def overwrite_element(src: Path, name: str, index: int, bits: int) -> None:
    info = Checkpoint.open(src).tensors[name]
    with open(info.file, "r+b") as file:
        file.seek(info.offset + 2 * index)
        file.write(bits.to_bytes(2, "little"))


NAN, MINUS_INF, HUGE = 0x7FC0, 0xFF80, 0x7180  # bf16; HUGE is 2^100
EXPERTS = "layers.2.mlp.experts."
DAMAGED = "holds NaN or infinity; the source is damaged"


@pytest.mark.parametrize(("name", "index", "bits", "format", "text"), [
    ("layers.0.linear_attn.in_proj_qkv.weight", 130 * 64 + 5, NAN, "q4_0",
     "layers.0.linear_attn.in_proj_qkv.weight: row 130 " + DAMAGED),
    ("embed_tokens.weight", 0, MINUS_INF, "f32", "embed_tokens.weight: row 0 " + DAMAGED),
    ("layers.1.input_layernorm.weight", 9, NAN, "q8_0",
     "layers.1.input_layernorm.weight: row 0 " + DAMAGED),
    ("layers.1.linear_attn.conv1d.weight", 4 * 77 + 2, NAN, "q4_0",
     "layers.1.linear_attn.conv1d.weight: row 77 " + DAMAGED),
    (EXPERTS + "gate_up_proj", (3 * 64 + 50) * 64, NAN, "q4_0",
     "layers.2.mlp.experts.gate_up_proj of expert 3: row 50 " + DAMAGED),
    (EXPERTS + "down_proj", (15 * 64 + 63) * 32 + 31, HUGE, "q8_0",
     "layers.2.mlp.experts.down_proj of expert 15: row 63 reaches 1.268e+30, beyond what q8_0 can hold; "
     "store this tensor as f32"),
])
def test_values_no_format_holds_name_tensor_and_row(
    own_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    name: str, index: int, bits: int, format: str, text: str,
) -> None:
    monkeypatch.setattr(convert_module, "BLOCK_BYTES", 16 * 4 * 64)  # the row is not in the first block
    overwrite_element(own_source, name, index, bits)
    assert refusal(FormatError, lambda: convert(own_source, tmp_path / "p", format)) == text
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_converting_a_pack_again(source: Path, tmp_path: Path) -> None:
    pack = convert(source, tmp_path / "p")
    remedy = "is already a pack; convert the checkpoint it was made from"
    assert refusal(PackError, lambda: convert(pack, tmp_path / "q")) == f"{pack} {remedy}"
    (tmp_path / "dir").mkdir()
    shutil.copy(source / "config.json", tmp_path / "dir")
    shutil.copy(pack, tmp_path / "dir" / "model.safetensors")
    assert refusal(PackError, lambda: convert(tmp_path / "dir", tmp_path / "q")) == f"{tmp_path}/dir {remedy}"
    assert not (tmp_path / "q").exists()


def test_destinations(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_bytes(b"precious")
    assert refusal(PackError, lambda: convert(source, path)) == (
        f"{path} exists; remove it, choose another name or ask for it to be overwritten")
    assert path.read_bytes() == b"precious"
    convert(source, path, overwrite=True)
    Pack.open(path).close()
    for overwrite in (False, True):
        assert refusal(PackError, lambda over=overwrite: convert(source, tmp_path, overwrite=over)) == (
            f"{tmp_path} is a directory; give the name of the pack file to write")
    assert refusal(PackError, lambda: convert(source, tmp_path / "no" / "p")) == (
        f"{tmp_path}/no is not a directory; create it before writing p there")


@pytest.mark.parametrize("shards", [1, 3])
def test_no_file_of_the_checkpoint_is_overwritten(tmp_path: Path, shards: int) -> None:
    src = make_checkpoint(tmp_path / "c", 0, layers=1, shards=shards)
    before = {path: path.read_bytes() for path in src.iterdir()}
    assert len(before) >= 6
    os.symlink(src / "config.json", tmp_path / "link")  # as in a download cache, whose directories hold links
    os.link(src / "tokenizer.json", tmp_path / "second-name")
    for path in (*before, tmp_path / "link", tmp_path / "second-name", src / ".." / "c" / "config.json"):
        for overwrite in (False, True):
            assert refusal(PackError, lambda path=path, over=overwrite: convert(src, path, overwrite=over)) == (
                f"{path} is a file of the checkpoint itself; choose another name for the pack")
    assert {path: path.read_bytes() for path in src.iterdir()} == before
    convert(src, src / "model.pack")  # a new name beside them is nobody's


def test_a_link_to_nowhere(own_source: Path, tmp_path: Path, cache: Path) -> None:
    path = own_source / "tokenizer.json"
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    for action in (lambda: convert(own_source, tmp_path / "p"), lambda: cached_pack(own_source)):
        assert refusal(CheckpointError, action) == (
            f"cannot read {path}: No such file or directory; fetch the file again")


def test_sources(tmp_path: Path) -> None:
    assert refusal(CheckpointError, lambda: convert(tmp_path / "absent", tmp_path / "p")).startswith(
        f"{tmp_path}/absent does not exist")
    (tmp_path / "file").write_bytes(bytes(100))
    assert refusal(CheckpointError, lambda: convert(tmp_path / "file", tmp_path / "p")).startswith(
        f"{tmp_path}/file is a file")


def test_generation_config_with_nonsense(own_source: Path, tmp_path: Path) -> None:
    path = own_source / "generation_config.json"
    path.write_text('{"eos_token_id": "<|im_end|>"}')
    assert refusal(CheckpointError, lambda: convert(own_source, tmp_path / "p")) == (
        f"{path}: eos_token_id is '<|im_end|>', expected a token id or a list; fetch the file again")
    path.write_text("{")
    assert refusal(CheckpointError, lambda: convert(own_source, tmp_path / "p")).startswith(f"{path} is not JSON")


def test_damage_on_the_way_to_the_disk_is_found(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finished file is read back once; one that does not hold what was written is not left behind."""
    real = os.replace

    def replace(part: Path, path: Path) -> None:
        with open(part, "r+b") as file:
            file.seek(100_000)
            byte = file.read(1)
            file.seek(100_000)
            file.write(bytes([byte[0] ^ 1]))
        real(part, path)

    monkeypatch.setattr(os, "replace", replace)
    assert "does not match its checksum" in refusal(PackError, lambda: convert(source, tmp_path / "p"))
    assert list(tmp_path.iterdir()) == []


# The same bytes whatever happens on the way


CONVERT = """
import os, signal
from fermi_engine import pack_writer
from fermi_engine.convert import convert
pack_writer.SYNC_BYTES = 1
steps = 0
def progress(done, total, name):
    global steps
    steps += 1
    print(name, flush=True)
    if steps == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
convert(sys.argv[1], sys.argv[2], progress=progress)
"""


def test_hash_seed_does_not_matter(source: Path, tmp_path: Path) -> None:
    for seed in ("1", "2"):
        run = run_python(CONVERT, source, tmp_path / seed, 0, env={**os.environ, "PYTHONHASHSEED": seed})
        assert run.communicate()[1] == ""
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_killed_after_some_tensors_and_resumed(source: Path, tmp_path: Path) -> None:
    """kill -9 right after a tensor, three times in a row, then to the end: only the rest is done, same bytes."""
    whole = convert(source, tmp_path / "whole")
    cut = tmp_path / "cut"
    done: list[str] = []
    for kill_at in (1, 20, 13):
        run = run_python(CONVERT, source, cut, kill_at)
        names = run.communicate()[0].split()
        assert run.returncode == -signal.SIGKILL
        assert not cut.exists()
        assert not set(names) & set(done)
        done += names
    resumed: list[str] = []
    convert(source, cut, progress=lambda done, total, name: resumed.append(name))
    assert resumed[0] not in done
    assert cut.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut", "whole"]


def test_killed_at_any_moment_and_resumed(source: Path, tmp_path: Path) -> None:
    """kill -9 from outside at moments drawn from a fixed seed; by luck some fall before or after the writing."""
    whole = convert(source, tmp_path / "whole").read_bytes()
    rng = np.random.default_rng(0)
    for attempt in range(4):
        path = tmp_path / f"cut{attempt}"
        run = run_python(CONVERT, source, path, 0)
        run.stdout.readline()  # the first tensor is written
        time.sleep(float(rng.uniform(0, 0.05)))
        run.kill()
        run.communicate()
        if not path.exists():
            convert(source, path)
        assert path.read_bytes() == whole


def test_interrupted_by_an_exception_and_resumed(source: Path, tmp_path: Path) -> None:
    whole = convert(source, tmp_path / "whole")
    seen: list[str] = []

    def stop(done: int, total: int, name: str) -> None:
        seen.append(name)
        if len(seen) == 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "cut", progress=stop)
    assert (tmp_path / "cut.fermi-part").exists()
    resumed: list[str] = []
    convert(source, tmp_path / "cut", progress=lambda done, total, name: resumed.append(name))
    assert resumed[0] not in seen
    assert (tmp_path / "cut").read_bytes() == whole.read_bytes()


def test_a_source_on_a_failing_disk_costs_no_work(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = convert(source, tmp_path / "whole")
    seen: list[str] = []
    with monkeypatch.context() as patch:
        def fail_then(done: int, total: int, name: str) -> None:
            seen.append(name)
            if len(seen) == 30:
                patch.setattr(os, "preadv", fail)

        def fail(*_: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        assert refusal(CheckpointError, lambda: convert(source, tmp_path / "cut", progress=fail_then)).startswith(
            "cannot read tensor ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut.fermi-part", "cut.fermi-part.journal", "whole"]
    resumed: list[str] = []
    convert(source, tmp_path / "cut", progress=lambda done, total, name: resumed.append(name))
    assert resumed[0] not in seen
    assert (tmp_path / "cut").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("change", ["source", "format"])
def test_part_file_of_another_source_or_format_is_not_continued(
    own_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The sampled hash of a large source may miss a change, size and time of its files do not."""
    monkeypatch.setattr(Checkpoint, "identity", lambda self: {})

    def stop(done: int, total: int, name: str) -> None:
        if name == "layers.1.mlp.experts.blob":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(own_source, tmp_path / "cut", progress=stop)
    if change == "source":
        overwrite_element(own_source, "embed_tokens.weight", 3, 0x3F80)
    format = "q8_0" if change == "format" else "q4_0"
    convert(own_source, tmp_path / "cut", format)
    convert(own_source, tmp_path / "fresh", format)
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "fresh").read_bytes()


# The cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FERMI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def packs_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.suffix != ".lock")


def test_cache_is_reused_and_keyed(own_source: Path, cache: Path) -> None:
    first = cached_pack(own_source, "q4_0")
    stamp = first.stat().st_mtime_ns
    assert first.parent == cache
    assert cached_pack(own_source, "q4_0") == first
    assert first.stat().st_mtime_ns == stamp
    other = cached_pack(own_source, "q8_0")
    assert Pack.open(other).default_format == "q8_0"
    (own_source / "chat_template.jinja").write_text("{{ messages }}")
    touched = cached_pack(own_source, "q4_0")
    assert Pack.open(touched).files()["chat_template.jinja"] == b"{{ messages }}"
    os.utime(own_source / "model.safetensors", ns=(1, 1))
    again = cached_pack(own_source, "q4_0")
    assert packs_in(cache) == sorted({first.name, other.name, touched.name, again.name})
    assert len(packs_in(cache)) == 4


def test_cache_with_a_damaged_pack_is_refreshed(own_source: Path, cache: Path) -> None:
    path = cached_pack(own_source, "q4_0")
    good = path.read_bytes()
    path.write_bytes(good[:-10])
    assert cached_pack(own_source, "q4_0").read_bytes() == good


def test_a_pack_in_the_cache_needs_no_lock(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a cache that may only be read still serves."""
    path = cached_pack(source)
    monkeypatch.delattr(convert_module, "_lock")
    assert cached_pack(source) == path


@pytest.mark.parametrize(("settings", "expected"), [
    ({"FERMI_CACHE": "a", "XDG_CACHE_HOME": "b"}, "a"), ({"XDG_CACHE_HOME": "b"}, "b/fermi_engine"),
    ({"XDG_CACHE_HOME": ""}, ".cache/fermi_engine"), ({}, ".cache/fermi_engine")])
def test_cache_directory(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict, expected: str
) -> None:
    for name in ("FERMI_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, str(tmp_path / value) if value else "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cached_pack(source, "q4_0").parent == cache_directory() == tmp_path / expected


def test_cache_that_cannot_be_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FERMI_CACHE", str(tmp_path / "file" / "cache"))
    assert refusal(PackError, lambda: cached_pack(source)) == (
        f"cannot use the cache directory {tmp_path}/file/cache: Not a directory; set FERMI_CACHE to a directory you "
        "can write to, or convert the checkpoint to a pack first")


CACHED = """
from fermi_engine.convert import cached_pack
written = []
path = cached_pack(sys.argv[1], "q4_0", progress=lambda done, total, name: written.append(name))
print(path, bool(written))
"""


def test_two_processes_ask_for_the_same_pack(source: Path, cache: Path) -> None:
    """One converts; the others wait for it and use its pack."""
    runs = [run_python(CACHED, source) for _ in range(3)]
    answers = [run.communicate() for run in runs]
    assert [err for _, err in answers] == [""] * 3
    paths, converted = zip(*(out.split() for out, _ in answers), strict=True)
    assert len(set(paths)) == 1
    assert sorted(converted) == ["False", "False", "True"]
    assert packs_in(cache) == [Path(paths[0]).name]


def test_a_killed_process_does_not_block_the_cache(source: Path, cache: Path) -> None:
    suicidal = CACHED.replace("written.append(name)", "os.kill(os.getpid(), 9)")
    killed = run_python("import os" + suicidal, source)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    with Pack.open(cached_pack(source, "q4_0")) as pack:
        pack.check()


# Memory


# VmHWM, not ru_maxrss: the latter of a child starts at what its parent had in memory.
MEASURE = """
import re, time
from fermi_engine.convert import convert
begin = time.perf_counter()
convert(sys.argv[1], sys.argv[2], sys.argv[3])
peak = re.search("VmHWM:[^0-9]*([0-9]+) kB", open("/proc/self/status").read())[1]
print(int(peak) // 1024, time.perf_counter() - begin)
"""


@pytest.mark.soak
def test_two_gigabytes_in_bounded_memory_with_a_kill_on_the_way(tmp_path: Path) -> None:
    """2.2 GB with a fused tensor of 1 GiB. Nothing maps the source, so the limit holds for all resident memory."""
    src = make_checkpoint(tmp_path / "c", 0, big=True)
    assert max(info.nbytes for info in Checkpoint.open(src).tensors.values()) >= 1 << 30
    for format in ("q4_0", "f32"):
        run = run_python(MEASURE, src, tmp_path / format, format)
        out, err = run.communicate()
        assert run.returncode == 0, err
        peak, seconds = out.split()
        print(f"{format}: peak {peak} MB, {float(seconds):.1f} s")
        assert int(peak) < 400
    run = run_python(CONVERT, src, tmp_path / "cut", 0)
    while "shared_expert.down_proj" not in run.stdout.readline():  # what comes before the experts
        assert run.poll() is None
    time.sleep(1)
    run.kill()
    run.communicate()
    assert (tmp_path / "cut.fermi-part").stat().st_size > 100 * MB  # in the middle of the experts' 600 MB
    resumed: list[str] = []
    convert(src, tmp_path / "cut", progress=lambda done, total, name: resumed.append(name))
    assert resumed[0] == "layers.0.mlp.experts.blob"
    assert subprocess.run(["cmp", tmp_path / "cut", tmp_path / "q4_0"], check=False).returncode == 0
    shutil.rmtree(tmp_path)  # 9 GB that pytest would keep
