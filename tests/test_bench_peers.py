"""The peer side of the speed comparison: the GGUF writer, and the runner with stand-ins for llama.cpp."""

from __future__ import annotations

import json
import math
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from fermi_engine.compression.rules import assign
from fermi_engine.errors import FermiError
from fermi_engine.shapes import expected_shapes
from tools.bench import make_gguf as maker
from tools.bench import peers
from tools.bench.geometries import geometry

SSSE3_INFO = "CPU : SSE3 = 1 | SSSE3 = 1 | LLAMAFILE = 1 | OPENMP = 1 | REPACK = 1 | "
AVX2_INFO = ("CPU : SSE3 = 1 | SSSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | BMI2 = 1 | LLAMAFILE = 1 | "
             "OPENMP = 1 | REPACK = 1 | ")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> gguf.GGUFReader:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    assert maker.make_gguf(path, "small") == path.stat().st_size
    assert [file.name for file in path.parent.iterdir()] == ["small.gguf"]
    return gguf.GGUFReader(path)


def tensor(reader: gguf.GGUFReader, name: str) -> np.ndarray:
    """Float32 values, rows first."""
    found = next(t for t in reader.tensors if t.name == name)
    return gguf.quants.dequantize(found.data, found.tensor_type)


def peer_tensors(name: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """GGUF name -> (shape, format) by the gguf package's own table of names and this project's shapes and rules."""
    config = geometry(name)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35MOE, config.num_hidden_layers)
    shapes, found = expected_shapes(config), {}
    formats = assign(shapes, "q4_0")
    for canonical, shape in shapes.items():
        stem = canonical if canonical.startswith("lm_head") else f"model.{canonical}"
        parts = [stem.replace("gate_up", half) for half in ("gate", "up")] if "gate_up" in stem else [stem]
        for part in parts:
            shape_here = tuple(n // len(parts) if i == len(shape) - 2 else n for i, n in enumerate(shape))
            renamed = part.replace("dt_bias", "dt_proj.bias")
            suffix = next((s for s in (".weight", ".bias") if renamed.endswith(s)), "")
            peer = table.get_name(renamed.removesuffix(suffix))
            ending = suffix or (".weight" if ".experts." in part else "")
            found[f"{peer}{ending}"] = (tuple(n for n in shape_here if n != 1), formats[canonical].format)
    return found


@pytest.mark.parametrize("name", maker.NAMES)
def test_the_gguf_has_the_tensors_and_formats_of_a_pack_of_the_same_geometry(name: str) -> None:
    made = {t.name: (t.shape, "q4_0" if t.fill == "q4_0" else "f32") for t in maker.tensors(geometry(name))}
    assert made == peer_tensors(name)


def test_the_file_holds_what_was_planned(small: gguf.GGUFReader) -> None:
    planned = {t.name: (t.shape, t.nbytes) for t in maker.tensors(geometry("small"))}
    assert {t.name: (tuple(int(n) for n in reversed(t.shape)), int(t.n_bytes)) for t in small.tensors} == planned
    assert small.get_field("general.architecture").contents() == "qwen35moe"
    assert small.get_field("qwen35moe.full_attention_interval").contents() == 4
    assert len(small.get_field("tokenizer.ggml.tokens").contents()) == geometry("small").vocab_size


def test_weights_are_finite_of_unit_gain_and_no_two_rows_equal(small: gguf.GGUFReader) -> None:
    rows = tensor(small, "output.weight")
    assert np.isfinite(rows).all()
    assert len(np.unique(rows, axis=0)) == len(rows)
    # The square of a weight has a relative deviation below 2, and a block shares its scale: 32 weights count as one.
    blocks = rows.size / maker.BLOCK_WEIGHTS
    gain = np.mean(rows.astype(np.float64)**2) * rows.shape[1]
    assert gain == pytest.approx(1.0, abs=5 * 2 / math.sqrt(blocks))
    experts = tensor(small, "blk.0.ffn_up_exps.weight").reshape(geometry("small").num_experts, -1)
    assert len(np.unique(experts, axis=0)) == len(experts)


def test_the_router_spreads_tokens_over_all_experts(small: gguf.GGUFReader) -> None:
    config, tokens = geometry("small"), 512
    inputs = np.random.default_rng(1).standard_normal((tokens, config.hidden_size))
    logits = inputs @ tensor(small, "blk.0.ffn_gate_inp.weight").T
    chosen = np.argsort(logits, axis=1)[:, -config.num_experts_per_tok:]
    share = np.bincount(chosen.ravel(), minlength=config.num_experts) / tokens
    # The deviation is known from the router's 16 x 64 weights, with a relative error of 1 / sqrt(2 x 1024).
    noise = 5 / math.sqrt(2 * config.num_experts * config.hidden_size)
    assert logits.std() == pytest.approx(maker.ROUTER_GAIN, rel=noise)
    # Even use is 4 of 16; logits as far apart as their deviation of 4 leave every expert its tokens.
    assert 0.05 < share.min() <= share.max() < 0.6


def test_the_seed_decides_the_bytes(tmp_path: Path) -> None:
    contents = []
    for seed in (0, 0, 1):
        maker.make_gguf(tmp_path / "x.gguf", "small", seed)
        contents.append((tmp_path / "x.gguf").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_a_failed_write_leaves_nothing_and_says_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(part: Path, *_: Any) -> None:
        part.write_bytes(b"begun")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(maker, "_write", full)
    with pytest.raises(FermiError, match=r"No space left.*it needs 10\.5 GB"):
        maker.make_gguf(tmp_path / "x.gguf", "qwen3.6-35b-a3b-reap128")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("path", "name", "says"), [
    ("x.gguf", "minicpm-v-4.6", "not one with experts; choose"), ("none/x.gguf", "small", "is no folder")])
def test_the_writer_names_what_is_wrong(tmp_path: Path, path: str, name: str, says: str) -> None:
    with pytest.raises(FermiError, match=says):
        maker.make_gguf(tmp_path / path, name)


def test_a_missing_build_is_one_line_that_says_how_to_make_it(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["--builds", str(tmp_path), "--gguf", "x.gguf"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"--build --builds {tmp_path}" in said


@pytest.mark.parametrize(("build", "info", "right"), [
    ("ssse3", SSSE3_INFO, True), ("avx2", AVX2_INFO, True), ("ssse3", AVX2_INFO, False), ("avx2", SSSE3_INFO, False),
    ("ssse3", "CPU : SSE3 = 1 | ", False), ("avx2", AVX2_INFO + "AVX512 = 1 | ", False),
    ("avx2", AVX2_INFO.replace("FMA = 1 | ", ""), False), ("avx2", AVX2_INFO + "AMX_INT8 = 1 | ", False)])
def test_a_build_with_other_instruction_sets_is_refused(build: str, info: str, right: bool) -> None:
    if right:
        peers.BUILDS[build].check(info)
    else:
        with pytest.raises(peers.PeerError, match=f"build {build} reports"):
            peers.BUILDS[build].check(info)


def test_the_ssse3_build_switches_every_later_set_off() -> None:
    flags = peers.BUILDS["ssse3"].cmake_flags
    assert {flag for flag in flags if flag.startswith("-DGGML_") and flag.endswith("=ON")} == {"-DGGML_SSE42=ON"}
    assert {f"-DGGML_{name}=OFF" for name in (*peers.AVX2_SETS, "NATIVE", "AVX512", "AVX_VNNI")} <= set(flags)


def test_the_environment_does_not_reach_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "CFLAGS", "LLAMA_CPP_LIB_PATH", "PYTHONPATH", "CMAKE_ARGS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PIP_INDEX_URL", "kept")
    found = peers.environment()
    assert (found["PIP_INDEX_URL"], found["OPENBLAS_NUM_THREADS"]) == ("kept", "1")
    assert not {"OMP_NUM_THREADS", "CFLAGS", "LLAMA_CPP_LIB_PATH", "PYTHONPATH", "CMAKE_ARGS"} & set(found)


def stand_in(builds: Path, script: str) -> None:
    """A build `ssse3` whose Python is a shell script."""
    python = builds / "ssse3" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    python.chmod(0o755)
    (builds / "ssse3" / "build.json").write_text('{"cmake_flags": ["-DX=ON"]}', encoding="utf-8")


def timing(tmp_path: Path, script: str, *more: str) -> int:
    stand_in(tmp_path, script)
    model = tmp_path / "m.gguf"
    model.write_bytes(b"model")
    return peers.main(["--builds", str(tmp_path), "--gguf", str(model), "--only", "ssse3",
                       "--json", str(tmp_path / "out.json"), *more])


def test_a_run_gives_medians_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"kind": "load", "seconds": 1.5, "system_info": SSSE3_INFO, "buffers": []},
             {"kind": "prefill", "threads": 2, "tokens": 128, "seconds": [16.0, 64.0, 8.0]},
             {"kind": "decode", "threads": 2, "context": 128, "seconds": [0.25, 9.0, 0.125], "finite": True},
             {"kind": "memory", "resident": 10**9, "anonymous": 10**6, "mapped": 10**9, "peak": 10**9}]
    script = f'echo "$2" > {tmp_path}/job\n' + "\n".join(f"echo '{json.dumps(line)}'" for line in lines)
    assert timing(tmp_path, script, "--threads", "2", "--decode", "3") == 0
    job = json.loads((tmp_path / "job").read_text(encoding="utf-8"))
    assert (job["threads"], job["prefill"], job["decode"], job["repack"]) == ([2], [128], 3, True)
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    [result] = found["results"]
    assert [r["tok_s"] for r in result["records"] if "tok_s" in r] == [128 / 16.0, 1 / 0.25]
    assert (result["build"], found["gguf_bytes"]) == ({"cmake_flags": ["-DX=ON"]}, 5)
    said = capsys.readouterr().out
    assert [text for text in ("8.00", "4.00", "1.00 GB") if text not in said] == []


@pytest.mark.parametrize(("script", "says"), [
    ("echo what >&2; echo bad tensor >&2; exit 3", "status 3; it said: bad tensor"),
    (f"""echo '{json.dumps({"kind": "load", "seconds": 1, "system_info": AVX2_INFO})}'""", "build ssse3 reports"),
    ("""echo '{"kind": "decode", "threads": 1, "context": 1, "seconds": [1], "finite": false}'""", "no numbers")])
def test_a_run_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, says: str) -> None:
    assert timing(tmp_path, script) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "says"), [
    ([], "give --gguf FILE"), (["--gguf", "x", "--threads", "0"], "count from 1"),
    (["--gguf", "x", "--decode", "-1"], "count from 1")])
def test_arguments_are_checked(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert peers.main(["--builds", str(tmp_path), *arguments]) == 2
    assert says in capsys.readouterr().err


class ArrayType:
    """Stands for a ctypes element type: `(ArrayType() * n)(*ids)` is the list of ids."""

    def __mul__(self, count: int) -> Any:
        return lambda *ids: list(ids)


class FakeLlama(types.ModuleType):
    """As much of llama_cpp as the worker calls; `steps` has the thread counts, the clearings and the batch sizes."""

    LLAMA_LOAD_MODE_MMAP, LLAMA_LOAD_MODE_MMAP_MLOCK = 1, 3

    def __init__(self) -> None:
        super().__init__("llama_cpp")
        self.steps: list[Any] = []
        self.settings = types.SimpleNamespace()
        self.llama_token = ArrayType()

    def __getattr__(self, name: str) -> Any:
        if name == "llama_log_callback":
            return lambda function: function
        if name.endswith("_default_params"):
            return lambda: self.settings
        return lambda *_: 1

    def llama_set_n_threads(self, _context: Any, threads: int, _batch: int) -> None:
        self.steps.append(f"threads {threads}")

    def llama_memory_clear(self, *_: Any) -> None:
        self.steps.append("clear")

    def llama_batch_get_one(self, ids: list[int], count: int) -> int:
        assert len(ids) == count
        assert set(ids) <= set(range(7))
        return count

    def llama_decode(self, _context: Any, batch: int) -> int:
        self.steps.append(batch)
        return 0

    def llama_vocab_n_tokens(self, _vocab: Any) -> int:
        return 7

    def llama_get_logits_ith(self, *_: Any) -> list[float]:
        return [1.0] * 6 + [math.nan]

    def llama_print_system_info(self) -> bytes:
        return b"info"


def test_the_worker_counts_no_warm_up_and_decodes_behind_the_first_prefill(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeLlama()
    job = {"gguf": "m", "repack": False, "threads": [1, 2], "prefill": [5, 30], "decode": 2, "repeats": 2, "seed": 0,
           "mlock": False}
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    monkeypatch.setattr(sys, "argv", ["worker", json.dumps(job)])
    runpy.run_path(str(peers.WORKER), run_name="__main__")
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    one = ["clear", 16, "clear", 30, "clear", 30, "clear", 5, "clear", 5, 1, 1, 1, 1, 1]
    assert fake.steps == ["threads 1", *one, "threads 2", *one]
    assert fake.settings.n_ctx >= 30 + 3 + 2
    assert fake.settings.use_extra_bufts is False
    assert [r["kind"] for r in records] == ["load", *["prefill", "prefill", "decode"] * 2, "memory"]
    assert [(r["tokens"], len(r["seconds"])) for r in records if r["kind"] == "prefill"] == [(30, 2), (5, 2)] * 2
    decoded = [r for r in records if r["kind"] == "decode"]
    assert [(r["context"], len(r["seconds"]), r["finite"]) for r in decoded] == [(5, 2, False)] * 2
