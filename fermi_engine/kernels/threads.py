"""How many threads to use: physical cores within the affinity mask and the CPU quota, never hyper-threads."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from fermi_engine.config import MOST_THREADS


def default_threads(sysfs: Path = Path("/sys"), proc: Path = Path("/proc")) -> int:
    """Physical cores this process may use, 1..MOST_THREADS. `sysfs` and `proc` are replaceable for tests."""
    cores = len({core_of(sysfs, cpu) for cpu in os.sched_getaffinity(0)})
    quota = cpu_quota(sysfs, proc)
    return max(1, min(cores, MOST_THREADS, int(quota) if quota is not None else cores))


def cpu_quota(sysfs: Path = Path("/sys"), proc: Path = Path("/proc")) -> float | None:
    """CPUs' worth of time the control groups of this process grant, or None without a limit (cgroup v2 and v1).

    A group is also held to the limits of all groups above it, so the smallest on the way to the root counts.
    """
    mounts = sysfs / "fs/cgroup"
    v2 = [_v2_quota(group) for mount in (mounts, mounts / "unified") for group in _groups(mount, proc, "")]
    v1 = [_v1_quota(group) for mount in (mounts / "cpu", mounts / "cpu,cpuacct") for group in _groups(mount, proc, "cpu")]
    return min((quota for quota in v2 + v1 if quota is not None), default=None)


def core_of(sysfs: Path, cpu: int) -> tuple[str, str]:
    """(package, core) of a logical CPU; a CPU without topology counts as a core of its own."""
    topology = sysfs / f"devices/system/cpu/cpu{cpu}/topology"
    package, core = _read(topology / "physical_package_id"), _read(topology / "core_id")
    return (package, core) if package and core else ("?", str(cpu))


def _groups(mount: Path, proc: Path, controller: str) -> list[Path]:
    """Directories from this process's group up to the mount; the group may lie outside what a container sees of it."""
    path = next((fields[2] for fields in _memberships(proc) if controller in fields[1].split(",")), "/")
    inner = PurePosixPath(path.lstrip("/"))
    if ".." in inner.parts:  # the process was moved here from outside this namespace
        return [mount]
    return [mount / group for group in (inner, *inner.parents)]


def _memberships(proc: Path) -> list[list[str]]:
    """[id, controllers, path] of each line of /proc/self/cgroup; v2 names no controllers."""
    lines = (_read(proc / "self/cgroup") or "").splitlines()
    return [fields for fields in (line.split(":", 2) for line in lines) if len(fields) == 3]


def _v2_quota(group: Path) -> float | None:
    limit, _, period = (_read(group / "cpu.max") or "").partition(" ")
    return _ratio(limit, period)


def _v1_quota(group: Path) -> float | None:
    return _ratio(_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us"))


def _ratio(limit: str | None, period: str | None) -> float | None:
    """None for no limit, which v2 calls `max` and v1 -1, and for files that are not there."""
    if limit and period and limit.isdecimal() and period.isdecimal() and int(limit) and int(period):
        return int(limit) / int(period)
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
