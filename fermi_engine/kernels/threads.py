"""How many threads to use: physical cores within the affinity mask and the CPU quota, never hyper-threads."""

from __future__ import annotations

import os
from pathlib import Path


def default_threads(sysfs: Path = Path("/sys")) -> int:
    """Physical cores this process may use, at least 1. `sysfs` is replaceable for tests."""
    cpus = sorted(os.sched_getaffinity(0))
    cores = {_core_of(sysfs, cpu) for cpu in cpus}
    quota = cpu_quota(sysfs)
    return max(1, min(len(cores), int(quota)) if quota else len(cores))


def cpu_quota(sysfs: Path = Path("/sys")) -> float | None:
    """CPUs' worth of time the control group grants, or None without a limit (cgroup v2, then v1)."""
    v2 = _read(sysfs / "fs/cgroup/cpu.max")
    if v2:
        limit, period = v2.split()
        return None if limit == "max" else int(limit) / int(period)
    limit = _read(sysfs / "fs/cgroup/cpu/cpu.cfs_quota_us")
    period = _read(sysfs / "fs/cgroup/cpu/cpu.cfs_period_us")
    if limit and period and int(limit) > 0:
        return int(limit) / int(period)
    return None


def _core_of(sysfs: Path, cpu: int) -> tuple[str, str]:
    """(package, core) of a logical CPU; a CPU without topology counts as a core of its own."""
    topology = sysfs / f"devices/system/cpu/cpu{cpu}/topology"
    package, core = _read(topology / "physical_package_id"), _read(topology / "core_id")
    return (package, core) if package and core else ("?", str(cpu))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
