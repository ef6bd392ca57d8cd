"""The golden files: they replay, they are what the reference gives today, and damage or a wrong kernel is noticed."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fermi_engine import verify
from fermi_engine.errors import BackendError, VerifyError
from fermi_engine.kernels import dispatch
from fermi_engine.kernels.cpu import CpuKernels
from fermi_engine.safetensors_header import read_header
from fermi_engine.stages.table import STAGES, find_stage
from tests.stages import ORACLES
from tools import make_golden

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "golden"
NAMES = [stage.name for stage in STAGES]
BACKENDS = [*dispatch.supported(), "emulated"]


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    """A copy of the golden directory, where goldens may be made even in CI."""
    monkeypatch.delenv("CI", raising=False)
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden", ignore=shutil.ignore_patterns("tiny")))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# Replay


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_golden_replays(backend):
    seen, names = [], [stage.name for stage in STAGES if stage.form(backend)]
    rows = verify.replay(backend, on_result=lambda *progress: seen.append(progress))
    assert [row.stage for row in rows] == names
    assert verify.formless(backend) == [name for name in NAMES if name not in names]
    assert {row.backend for row in rows} == {backend}
    assert [row for row in rows if not row.passed] == []
    assert verify.first_divergence(rows) is None
    assert seen[-1] == (len(names), len(names), names[-1])


def test_without_a_backend_each_is_replayed(monkeypatch):
    monkeypatch.delenv("FERMI_BACKEND", raising=False)
    assert [row.backend for row in verify.replay(stages=["rope", "add"])] == dispatch.supported() * 2
    monkeypatch.setenv("FERMI_BACKEND", "scalar")
    assert [row.backend for row in verify.replay(stages=["rope"])] == ["scalar"]


def test_the_forward_hash_is_one_everywhere():
    expected = verify.load(GOLDEN, verify.FORWARD_STAGE).case.outputs["digest"].tobytes().hex()
    assert [verify.forward_hash(backend) for backend in dispatch.supported()] == [expected] * len(dispatch.supported())


def test_names_are_checked():
    with pytest.raises(VerifyError, match=r"unknown stage 'rms_nrom'.* like it are rms_norm"):
        verify.replay(stages=["rms_nrom"])
    with pytest.raises(BackendError, match="unknown backend"):
        verify.replay("avx9", ["rope"])


def test_verify_needs_no_torch():
    """In a process where torch, transformers and the reference cannot be imported."""
    code = ("import sys\n"
            "for name in ('torch', 'transformers', 'reference', 'safetensors'): sys.modules[name] = None\n"
            "from fermi_engine import verify\n"
            "assert all(row.passed for row in verify.replay(stages=['rms_norm', 'generate']))\n")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# A wrong kernel


def shifted(method, scale):
    def wrong(self, *args, **kwargs):
        return method(self, *args, **kwargs) * np.float32(scale)
    return wrong


@pytest.mark.parametrize("op", ["exp_f32", "gemm_f32", "rms_norm", "gdn_recurrent", "swiglu"])
def test_an_altered_kernel_is_the_first_that_diverges(op, monkeypatch):
    """By 2^-19 of its result (32 roundings); the kernels that come before pass."""
    monkeypatch.setattr(CpuKernels, op, shifted(getattr(CpuKernels, op), 1 + 2.0**-19))
    assert verify.first_divergence(verify.replay("scalar")).stage == op


def test_one_bit_of_a_forward_is_noticed(monkeypatch):
    """decoder_q4_0 has a statistical limit, and beside it a digest: here of a key in the cache."""
    rope = CpuKernels.rope

    def wrong(self, *args):
        out = rope(self, *args)
        out.view(np.uint32).reshape(-1)[0] ^= 1
        return out
    monkeypatch.setattr(CpuKernels, "rope", wrong)
    (row,) = verify.replay("scalar", ["decoder_q4_0"])
    assert not row.passed
    assert row.detail.startswith("digest")


# Damage


def test_table_manifest_and_files_are_the_same_stages():
    assert list(json.loads((GOLDEN / verify.MANIFEST).read_text())) == NAMES
    assert sorted(path.stem for path in GOLDEN.glob("*.safetensors")) == sorted(NAMES)
    assert all(path.stat().st_size <= make_golden.MAX_BYTES for path in GOLDEN.iterdir() if path.is_file())


def test_a_flipped_byte_anywhere_is_an_error_that_names_the_file(copy):
    path = copy / "rope.safetensors"
    whole = path.read_bytes()
    start = read_header(path).data_start
    for at in (3, 9, start - 20, *range(start, len(whole), 997), len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1:])
        with pytest.raises(VerifyError, match=r"^[^\n]*rope\.safetensors[^\n]*$"):
            verify.load(copy, "rope")


def test_other_damage(copy):
    path = copy / "rope.safetensors"
    whole = path.read_bytes()

    def refused(match):
        with pytest.raises(VerifyError, match=match):
            verify.replay("scalar", ["rope"], directory=copy)

    path.write_bytes(whole[:-1])
    refused(r"rope\.safetensors is truncated")
    shutil.copy(copy / "add.safetensors", path)
    refused(r"rope\.safetensors is not the file")
    path.unlink()
    refused(r"rope\.safetensors is missing")
    manifest = json.loads((copy / verify.MANIFEST).read_text())
    manifest["rope"] = manifest["add"]
    shutil.copy(copy / "add.safetensors", path)
    (copy / verify.MANIFEST).write_text(json.dumps(manifest))
    refused(r"rope\.safetensors calls itself 'add'")
    (copy / verify.MANIFEST).write_text("{}")
    refused("does not list rope")
    (copy / verify.MANIFEST).write_text("[")
    refused("cannot read .*MANIFEST")


# Making and checking


def test_the_goldens_are_what_the_reference_gives():
    assert make_golden.check(GOLDEN, list(STAGES)) == []


def test_making_again_gives_the_same_bytes(copy, monkeypatch):
    monkeypatch.setattr(make_golden, "uncommitted", list)
    before = contents(copy)
    assert make_golden.main(["--stage", "rope", "--stage", "gdn_gates", "--directory", str(copy)]) == 0
    assert contents(copy) == before


def test_check_tells_what_differs_and_writes_nothing(copy, monkeypatch, capsys):
    monkeypatch.setitem(vars(make_golden), "SEED", make_golden.SEED + 1)
    before = contents(copy)
    assert make_golden.main(["--check", "--stage", "router_topk", "--directory", str(copy)]) == 1
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[:-1]] == [
        ["router_topk", name] for name in ("bound.weights", "in.logits", "out.ids", "out.weights")]
    assert contents(copy) == before


@pytest.mark.parametrize(("change", "noticed"), [(0.5, False), (2.0, True)])
def test_a_float_may_move_by_the_error_in_the_file(copy, monkeypatch, change, noticed):
    """As if torch had other bits: an output off by half of the reference's error, and by twice."""
    oracle = ORACLES["rms_norm"]
    error = json.loads(verify.load(copy, "rms_norm").metadata["errors"])["y"]

    def moved(a, dtype):
        y = oracle.reference(a, dtype)["y"]
        y[0, 0] += change * error
        return {"y": y}
    monkeypatch.setitem(ORACLES, "rms_norm", dataclasses.replace(oracle, reference=moved))
    problems = make_golden.check(copy, [find_stage("rms_norm")])
    assert [name for _, name, _ in problems] == (["out.y"] if noticed else [])


def test_an_altered_rule_is_a_difference(copy, monkeypatch):
    stage = find_stage("rope")
    problems = make_golden.check(copy, [dataclasses.replace(stage, cpu=find_stage("add").cpu)])
    assert [name for _, name, _ in problems] == ["metadata"]


def test_ci_makes_no_goldens(copy, monkeypatch, capsys):
    monkeypatch.setenv("CI", "true")
    (copy / "rope.safetensors").unlink()
    before = contents(copy)
    assert make_golden.main(["--stage", "rope", "--directory", str(copy)]) == 2
    assert "CI" in capsys.readouterr().err
    assert contents(copy) == before


def test_uncommitted_sources_refuse_all_but_new_stages(copy, monkeypatch, capsys):
    monkeypatch.setattr(make_golden, "uncommitted", lambda: ["reference/rope.py"])
    before = contents(copy)
    (copy / "rope.safetensors").unlink()
    assert make_golden.main(["--stage", "rope", "--stage", "add", "--directory", str(copy)]) == 2
    assert "add has a golden and reference/rope.py has uncommitted changes" in capsys.readouterr().err
    assert make_golden.main(["--stage", "rope", "--directory", str(copy)]) == 0
    assert contents(copy) == before


def test_what_counts_as_uncommitted(tmp_path, monkeypatch):
    monkeypatch.setattr(make_golden, "ROOT", tmp_path)
    for name in ("reference/a.py", "tools/b.py", "fermi_engine/c.py", "tests/stages.py", "tests/test_x.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")

    def git(*args):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *args], cwd=tmp_path, check=True,
                       capture_output=True)

    assert make_golden.uncommitted() == []
    git("init")
    assert make_golden.uncommitted() == []
    git("add", ".")
    git("commit", "-m", "x")
    assert make_golden.uncommitted() == []
    (tmp_path / "fermi_engine/c.py").write_text("2")
    (tmp_path / "tests/test_x.py").write_text("2")
    assert make_golden.uncommitted() == []
    (tmp_path / "reference/a.py").write_text("2")
    (tmp_path / "tools/new.py").write_text("2")
    (tmp_path / "tests/stages.py").write_text("2")
    assert sorted(make_golden.uncommitted()) == ["reference/a.py", "tests/stages.py", "tools/new.py"]
