"""`doctor` on machines made of a few files, on old CPUs, and with nothing of /proc and /sys at all."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fermi_engine import doctor
from fermi_engine.cli import app as cli
from fermi_engine.errors import DeviceError
from fermi_engine.kernels import dispatch, gpu
from fermi_engine.kernels.emulated import EmulatedDevice

ROOT = Path(__file__).resolve().parents[1]
MACHINE = {
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) CPU X5675  @ 3.07GHz\nmodel name\t: another\n",
    "proc/meminfo": "MemTotal:       12000000 kB\nMemAvailable:    9000000 kB\nHugePages_Total:      64\n"
                    "Hugepagesize:       2048 kB\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:    6000000 kB\n",
    "sys/devices/system/node/node0/cpulist": "0-5\n",
    "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:    6000000 kB\n",
    "sys/devices/system/node/node1/cpulist": "6-11\n",
    "sys/fs/cgroup/cpu.max": "150000 100000\n",
}


@pytest.fixture(autouse=True)
def _no_forced_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FERMI_BACKEND", raising=False)
    monkeypatch.setenv("FERMI_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages of three cores with two threads each, under a quota of 1.5 CPUs; CPUs 0..9 allowed."""
    root = tmp_path / "machine"
    cores = {f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": f"{value}\n" for cpu in range(12)
             for name, value in (("physical_package_id", cpu // 6), ("core_id", cpu % 3))}
    for name, text in {**MACHINE, **cores}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10)))
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    return root


def test_a_machine_is_read_from_proc_and_sys(machine: Path, tmp_path: Path) -> None:
    facts = doctor.examine(machine).facts
    assert facts["CPU"] == "Intel(R) Xeon(R) CPU X5675  @ 3.07GHz"
    assert facts["memory"] == "12.3 GB, 9.22 GB available"
    assert facts["NUMA nodes"] == "2 (0: CPUs 0-5, 6.14 GB; 1: CPUs 6-11, 6.14 GB)"
    assert facts["huge pages"] == "transparent: madvise, 64 of 2.10 MB reserved"
    assert facts["threads"].startswith("1: 6 physical cores among the 10 of 12 logical CPUs this process may use, "
                                       "a CPU quota of 1.5")
    assert facts["cache"].startswith(f"{tmp_path / 'cache'}, ")
    assert re.search(r", \d[\d.]* [kMGT]B free$", facts["cache"])


def test_the_limit_of_locked_memory(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 8 << 20))
    assert doctor.examine(machine).facts["locked memory"].startswith("at most 8.39 MB; --mlock needs ")
    (machine / "proc/self").mkdir(parents=True, exist_ok=True)
    (machine / "proc/self/status").write_text("CapEff:\t0000000000004000\n")  # CAP_IPC_LOCK
    assert doctor.examine(machine).facts["locked memory"] == "no limit"


def test_without_a_quota_every_core_counts(machine: Path) -> None:
    (machine / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    assert doctor.examine(machine).facts["threads"].startswith(
        "6: 6 physical cores among the 10 of 12 logical CPUs this process may use, no CPU quota")


def test_the_quota_of_the_own_control_group_counts(machine: Path) -> None:
    for name, text in {"proc/self/cgroup": "0::/service/job\n", "sys/fs/cgroup/cpu.max": "max 100000\n",
                       "sys/fs/cgroup/service/cpu.max": "250000 100000\n"}.items():
        (machine / name).parent.mkdir(parents=True, exist_ok=True)
        (machine / name).write_text(text)
    facts = doctor.examine(machine).facts
    assert facts["threads"].startswith("2: 6 physical cores ")
    assert "a CPU quota of 2.5" in facts["threads"]


def test_no_proc_and_no_sys_is_no_error(tmp_path: Path) -> None:
    found = doctor.examine(tmp_path / "empty")
    assert [found.facts[name] for name in ("CPU", "NUMA nodes", "memory")] == [doctor.UNKNOWN] * 3
    assert found.facts["huge pages"] == "transparent: unknown"
    cpus = len(os.sched_getaffinity(0))
    assert found.facts["threads"].startswith(f"{cpus}: {cpus} physical cores among the {cpus} of ")
    assert found.problems == []


def test_half_written_files_are_no_error(machine: Path) -> None:
    (machine / "proc/meminfo").write_text("MemTotal:")
    (machine / "sys/devices/system/node/node1/meminfo").unlink()
    (machine / "sys/devices/system/node/node0/cpulist").unlink()
    facts = doctor.examine(machine).facts
    assert facts["memory"] == doctor.UNKNOWN
    assert facts["NUMA nodes"] == "2 (0: CPUs unknown, 6.14 GB; 1: CPUs 6-11)"


def test_every_op_is_listed_under_the_backend_that_runs_it() -> None:
    found = doctor.examine()
    assert {op: name for name, ops in found.backends.items() for op in ops} == {
        op: kernel.backend for op, kernel in dispatch.table().items()}
    assert sum(map(len, found.backends.values())) == len(dispatch.ops()) > 0
    assert found.facts["x86-64-v2"] == "yes"
    assert found.facts["FERMI_BACKEND"] == "not set: the best backend of each op"


def test_a_forced_backend_shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("FERMI_BACKEND", "scalar")
    assert cli.run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^FERMI_BACKEND +scalar$", out, re.MULTILINE)
    assert re.search(rf"^ *scalar +{len(dispatch.ops())} ", out, re.MULTILINE)
    assert not re.search(r"^ *ssse3 +\d", out, re.MULTILINE)
    assert all(op in out for op in dispatch.ops())


def test_a_backend_that_cannot_run_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("FERMI_BACKEND", "avx9")
    assert cli.run(["doctor"]) == 1
    assert capsys.readouterr().err.startswith("problem: unknown backend 'avx9'")


def test_an_old_cpu_is_described_without_numpy() -> None:
    script = ("import sys\nfrom fermi_engine.cli import app as cli\nfrom fermi_engine.kernels import dispatch\n"
              "dispatch.cpu_features = lambda: frozenset({'ssse3'})\n"
              "print(cli.run(['doctor']), 'numpy' in sys.modules)\n")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "1 False"
    assert re.search(r"^x86-64-v2 +no$", done.stdout, re.MULTILINE)
    assert re.search(r"^CPU features +ssse3$", done.stdout, re.MULTILINE)
    assert done.stderr.startswith("problem: this CPU lacks sse4.1, sse4.2, popcnt: x86-64-v2")


def test_kernels_that_are_not_built_are_a_problem(monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture) -> None:
    import fermi_engine.kernels

    monkeypatch.delattr(fermi_engine.kernels, "_cpu", raising=False)
    monkeypatch.setitem(sys.modules, "fermi_engine.kernels._cpu", None)
    assert cli.run(["doctor"]) == 1
    assert capsys.readouterr().err.startswith("problem: the CPU kernels are not built")


LACKS = {  # what the interpreter fails at, and the Debian package that brings it
    "ensurepip": "python3-venv", "Python.h": "python3-dev"}


@pytest.mark.parametrize("lacks", [*LACKS, "nothing"])
def test_system_packages_names_what_the_interpreter_lacks(tmp_path: Path, lacks: str) -> None:
    scripts = {"id": "echo 1000", "python": f'case "$2" in *{lacks}*) exit 1;; esac', "gcc": "", "make": ""}
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(["sh", ROOT / "tools/system_packages.sh", "compiler"], capture_output=True, text=True,
                          check=False, env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": str(tmp_path / "python")})
    if lacks == "nothing":
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    else:
        expected = f"system packages are missing: {LACKS[lacks]} (on Debian: sudo apt-get install {LACKS[lacks]})\n"
        assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


def test_system_packages_accepts_this_interpreter(tmp_path: Path) -> None:
    """It runs these tests from an environment, with kernels that were built for it."""
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    done = subprocess.run(["sh", ROOT / "tools/system_packages.sh", "compiler"], capture_output=True, text=True,
                          check=False, env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": sys.executable})
    assert "python3" not in done.stderr


def test_missing_packages_come_with_their_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"starlette"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in present else None)
    monkeypatch.setattr(doctor, "_loads", lambda library: False)
    missing = doctor.examine().missing
    assert missing[:2] == ["pycuda (for the GPU backend): pip install 'fermi-engine[cuda]'",
                           "uvicorn (for the HTTP server): pip install 'fermi-engine[server]'"]
    assert missing[2].startswith("NVIDIA driver (for the GPU backend): libcuda.so.1 does not load")
    assert len(missing) == 3
    present |= {"pycuda", "uvicorn"}
    monkeypatch.setattr(doctor, "_loads", lambda library: True)
    assert doctor.examine().missing == []


def test_whose_products_the_gpu_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "open_device", lambda kind: EmulatedDevice())
    facts = doctor.examine().facts
    assert facts["GPU"].startswith("emulated sm_20")
    assert facts["GPU products"].startswith("own kernels unless asked for others")
    assert "--gemm vendor takes NumPy" in facts["GPU products"]

    def none(self: EmulatedDevice) -> str:
        raise DeviceError("the vendor's sgemm is not available: none is installed")

    monkeypatch.setattr(EmulatedDevice, "vendor", none)
    monkeypatch.setattr(EmulatedDevice, "facts", lambda self: {"device": self.name})
    assert doctor.examine().facts["GPU products"].endswith("the vendor's sgemm is not available: none is installed")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "pycuda", None)
    facts = doctor.examine().facts
    assert facts["GPU"].startswith("none (the CUDA device needs pycuda")
    assert "GPU products" not in facts


def test_an_unwritable_cache_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert doctor.examine().facts["cache"].endswith("not writable: set FERMI_CACHE to another directory")
