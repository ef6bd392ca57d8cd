"""How many threads a machine gets by default: cores of a made-up /sys, quotas of a made-up tree of control groups."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from fermi_engine.config import MOST_THREADS
from fermi_engine.kernels.threads import core_of, cpu_quota, default_threads

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
