"""How many threads a machine gets and on which CPUs: cores of a made-up /sys, quotas of made-up control groups."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fermi_engine.config import MOST_THREADS
from fermi_engine.errors import ConfigError
from fermi_engine.kernels.threads import (
    core_of,
    cores_to_use,
    cpu_quota,
    cpus_to_pin,
    default_threads,
    describe,
    node_of,
    pinned,
)

ROOT = Path(__file__).resolve().parents[1]
V1 = "4:cpu,cpuacct:{}\n1:name=systemd:/elsewhere\n"


def tree(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """A /sys and a /proc; names are relative to /sys/fs/cgroup, `own` is /proc/self/cgroup."""
    for name, text in files.items():
        path = root / ("proc/self/cgroup" if name == "own" else f"sys/fs/cgroup/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "sys", root / "proc"


QUOTAS = {  # what the machine holds, and the CPUs it grants
    "nothing": ({}, None),
    "no limit": ({"own": "0::/\n", "cpu.max": "max 100000\n"}, None),
    "a container's root": ({"own": "0::/\n", "cpu.max": "150000 100000\n"}, 1.5),
    "no /proc": ({"cpu.max": "150000 100000\n"}, 1.5),
    "own group": ({"own": "0::/a/b\n", "a/b/cpu.max": "300000 100000\n", "c/cpu.max": "100000 100000\n"}, 3.0),
    "a group above": ({"own": "0::/a/b/c\n", "a/b/c/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
    "the smallest counts": ({"own": "0::/a/b\n", "a/b/cpu.max": "400000 100000\n", "a/cpu.max": "50000 50000\n",
                             "cpu.max": "800000 100000\n"}, 1.0),
    "own is the smallest": ({"own": "0::/a/b\n", "a/b/cpu.max": "100000 100000\n", "a/cpu.max": "200000 100000\n"}, 1.0),
    "a path of the host": ({"own": "0::/docker/1f\n", "cpu.max": "250000 100000\n"}, 2.5),
    "moved from outside": ({"own": "0::/../../x\n", "cpu.max": "250000 100000\n"}, 2.5),
    "hybrid": ({"own": "5:cpu:/\n0::/a\n", "unified/a/cpu.max": "200000 100000\n"}, 2.0),
    "v1": ({"own": V1.format("/a/b"), "cpu/a/b/cpu.cfs_quota_us": "-1\n", "cpu/a/b/cpu.cfs_period_us": "100000\n",
            "cpu/a/cpu.cfs_quota_us": "350000\n", "cpu/a/cpu.cfs_period_us": "100000\n",
            "cpu/elsewhere/cpu.cfs_quota_us": "100000\n", "cpu/elsewhere/cpu.cfs_period_us": "100000\n"}, 3.5),
    "v1, a container's root": ({"own": V1.format("/docker/1f"), "cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
                                "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 2.0),
    "half-written": ({"own": "nonsense\n0::/a\n", "a/cpu.max": "100000", "cpu.max": "\n",
                      "cpu/cpu.cfs_quota_us": "100000\n"}, None),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_the_smallest_quota_on_the_way_to_the_root(tmp_path: Path, name: str) -> None:
    files, expected = QUOTAS[name]
    assert cpu_quota(*tree(tmp_path, files)) == expected


def test_threads_are_cores_within_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    sysfs, proc = tree(tmp_path, {"own": "0::/a\n", "a/cpu.max": "max 100000\n"})
    for cpu in range(8):
        topology = sysfs / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{cpu // 2}\n")
    assert core_of(sysfs, 7) == ("0", "3")
    assert default_threads(sysfs, proc) == 4
    for quota, expected in (("350000", 3), ("50000", 1), ("900000", 4)):
        (sysfs / "fs/cgroup/a/cpu.max").write_text(f"{quota} 100000\n")
        assert default_threads(sysfs, proc) == expected


def test_no_more_threads_than_the_pool_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(MOST_THREADS + 44)))
    assert default_threads(*tree(tmp_path, {})) == MOST_THREADS
    workers = re.search(r"#define MAX_WORKERS (\d+)", (ROOT / "csrc/pool.c").read_text())
    assert int(workers[1]) + 1 == MOST_THREADS


Machine = Callable[..., tuple[Path, Path]]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Two packages of three cores; CPU c and c + 6 are the two threads of a core, as this kernel numbers them."""

    def make(allowed: set[int] | None = None, quota: str = "max", nodes: int = 2) -> tuple[Path, Path]:
        sysfs, proc = tree(tmp_path, {"own": "0::/\n", "cpu.max": f"{quota} 100000\n"})
        for cpu in range(12):
            folder, package = sysfs / f"devices/system/cpu/cpu{cpu}", cpu % 6 // 3
            (folder / "topology").mkdir(parents=True, exist_ok=True)
            (folder / "topology/physical_package_id").write_text(f"{package}\n")
            (folder / "topology/core_id").write_text(f"{(0, 1, 8)[cpu % 3]}\n")
            (folder / f"node{package if nodes == 2 else 0}").mkdir(exist_ok=True)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)) if allowed is None else allowed)
        return sysfs, proc

    return make


def test_cores_come_in_turn_from_each_package(machine: Machine) -> None:
    sysfs, _ = machine()
    assert [node_of(sysfs, cpu) for cpu in (0, 3, 6, 9)] == [0, 1, 0, 1]
    assert cores_to_use(sysfs) == [0, 3, 1, 4, 2, 5]
    assert cores_to_use(sysfs, hyper_threads=True) == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_packages_that_share_a_memory_node(machine: Machine) -> None:
    sysfs, _ = machine(nodes=1)
    assert cores_to_use(sysfs) == [0, 3, 1, 4, 2, 5]


def test_cores_of_memory_nodes_within_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes decide where packages do not (a package of two chips)."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    for cpu in range(4):
        topology = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{cpu}\n")
        (topology.parent / f"node{cpu // 2}").mkdir()
    assert cores_to_use(tmp_path) == [0, 2, 1, 3]


def test_the_affinity_mask_limits_the_cores(machine: Machine) -> None:
    sysfs, _ = machine({1, 7, 8, 10, 11})
    assert cores_to_use(sysfs) == [1, 10, 8, 11]  # 7 is the second thread of 1's core
    assert cores_to_use(sysfs, hyper_threads=True) == [1, 10, 8, 11, 7]


def test_hyper_threads_count_when_asked_for(machine: Machine) -> None:
    assert default_threads(*machine()) == 6
    assert default_threads(*machine(), hyper_threads=True) == 12
    assert default_threads(*machine(quota="850000"), hyper_threads=True) == 8


def test_one_core_for_each_pinned_thread(machine: Machine) -> None:
    sysfs, _ = machine()
    assert cpus_to_pin(4, sysfs) == [0, 3, 1, 4]
    assert len(set(cpus_to_pin(12, sysfs, hyper_threads=True))) == 12
    with pytest.raises(ConfigError, match=r"^--pin gives .* 7 threads, 6 physical cores; lower --threads or "):
        cpus_to_pin(7, sysfs)
    with pytest.raises(ConfigError, match="13 threads, 12 logical CPUs"):
        cpus_to_pin(13, sysfs, hyper_threads=True)


WORDS = {  # threads, machine, options -> what is printed
    "all cores": (6, {}, {}, "threads 6 of 6 cores, hyper-threads off"),
    "one core": (1, {"allowed": {4}}, {"pin": True}, "threads 1 of 1 core, hyper-threads off, pinned"),
    "hyper-threads": (12, {}, {"hyper_threads": True}, "threads 12 of 6 cores, hyper-threads on"),
    "no hyper-threads": (2, {"allowed": {0, 3}}, {"hyper_threads": True},
                         "threads 2 of 2 cores, hyper-threads not present"),
    "too many": (7, {}, {}, "threads 7 of 6 cores, hyper-threads off, more threads than that: expect less speed"),
    "a quota": (2, {"quota": "250000"}, {}, "threads 2 of 6 cores, hyper-threads off, CPU quota 2.5"),
    "half a CPU": (1, {"quota": "50000"}, {}, "threads 1 of 6 cores, hyper-threads off, CPU quota 0.5"),
    "beyond a quota": (3, {"quota": "250000"}, {}, "threads 3 of 6 cores, hyper-threads off, CPU quota 2.5, "
                                                   "more threads than that: expect less speed"),
    "a quota that does not matter": (6, {"quota": "600000"}, {}, "threads 6 of 6 cores, hyper-threads off"),
}


@pytest.mark.parametrize("name", WORDS)
def test_the_choice_in_words(machine: Machine, name: str) -> None:
    count, about, options, words = WORDS[name]
    assert describe(count, *machine(**about), **options) == words


def test_a_pinned_caller_leaves_its_mask_as_it_was() -> None:
    before, inside = os.sched_getaffinity(0), []
    cpu = max(before)

    def work() -> None:
        with pinned(cpu):
            inside.append(os.sched_getaffinity(0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert inside == [{cpu}]
    assert os.sched_getaffinity(0) == before
    later: list[set[int]] = []
    thread = threading.Thread(target=lambda: later.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    assert later == [before]
    with pinned(None):
        assert os.sched_getaffinity(0) == before


def test_settings_of_other_libraries_change_nothing() -> None:
    code = "from fermi_engine.kernels.threads import default_threads; print(default_threads())"
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY")
    plain = {name: value for name, value in os.environ.items() if name not in names}
    found = {subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60,
                            check=True).stdout
             for env in (plain, {**plain, **dict.fromkeys(names, "1")}, {**plain, "OMP_NUM_THREADS": "64"})}
    assert found == {f"{default_threads()}\n"}


BLAS = {"dot", "matmul", "inner", "vdot", "tensordot", "einsum", "linalg"}  # what NumPy hands to a library with threads


def test_no_other_library_brings_threads_to_the_forward_pass() -> None:
    """Its threads spin on the cores of ours: OpenBLAS's for a tenth of a second after each product."""
    names = ("kernels/cpu.py", "session.py", "state.py", "generate.py", "sampling.py")
    for path in [*(ROOT / "fermi_engine/model").glob("*.py"), *(ROOT / "fermi_engine" / name for name in names)]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        assert not [node for node in nodes if isinstance(node, (ast.BinOp, ast.AugAssign))
                    and isinstance(node.op, ast.MatMult)], path
        assert not [node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr in BLAS
                    and isinstance(node.value, ast.Name) and node.value.id in ("np", "numpy")], path
