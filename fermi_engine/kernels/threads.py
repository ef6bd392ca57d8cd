"""Which logical CPUs the threads take: one of each physical core within the affinity mask, as the CPU quota grants."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from fermi_engine.config import MOST_THREADS
from fermi_engine.errors import ConfigError

SYS, PROC = Path("/sys"), Path("/proc")


def default_threads(sysfs: Path = SYS, proc: Path = PROC, hyper_threads: bool = False) -> int:
    """Physical cores this process may use, 1..MOST_THREADS. `sysfs` and `proc` are replaceable for tests.

    hyper_threads: count every logical CPU instead.
    """
    cpus = len(cores_to_use(sysfs, hyper_threads))
    quota = cpu_quota(sysfs, proc)
    return max(1, min(cpus, MOST_THREADS, int(quota) if quota is not None else cpus))


def cores_to_use(sysfs: Path = SYS, hyper_threads: bool = False) -> list[int]:
    """One logical CPU of each physical core within the affinity mask, in turn from each package and memory node.

    So the first n of them share the memory controllers evenly. hyper_threads: then the second ones of all cores, too.
    """
    cores: dict[tuple[str, str], list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        cores.setdefault(core_of(sysfs, cpu), []).append(cpu)
    groups: dict[tuple[str, int], list[list[int]]] = {}
    for (package, _), cpus in cores.items():
        groups.setdefault((package, node_of(sysfs, cpus[0])), []).append(cpus)
    ranks = {cpu: (sibling, core, group)
             for group, (_, members) in enumerate(sorted(groups.items()))
             for core, cpus in enumerate(members)
             for sibling, cpu in enumerate(cpus)}
    return sorted((cpu for cpu in ranks if hyper_threads or ranks[cpu][0] == 0), key=ranks.__getitem__)


def cpus_to_pin(count: int, sysfs: Path = SYS, hyper_threads: bool = False) -> list[int]:
    """A logical CPU for each of `count` threads, the calling one first. ConfigError where they would share cores."""
    cpus = cores_to_use(sysfs, hyper_threads)
    if count > len(cpus):
        kind = "logical CPUs" if hyper_threads else "physical cores"
        raise ConfigError(f"--pin gives each thread a CPU of its own: {count} threads, {len(cpus)} {kind}; "
                          "lower --threads or leave --pin out")
    return cpus[:count]


@contextmanager
def pinned(cpu: int | None) -> Iterator[None]:
    """Hold the calling thread on one logical CPU, or do nothing for None.

    Its own mask returns at the end: threads started later by anyone would inherit the single CPU.
    """
    if cpu is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def describe(count: int, sysfs: Path = SYS, proc: Path = PROC, hyper_threads: bool = False, pin: bool = False) -> str:
    """`threads 2 of 2 cores, hyper-threads off`, and what else decided about them."""
    cores, cpus = len(cores_to_use(sysfs)), len(os.sched_getaffinity(0))
    quota = cpu_quota(sysfs, proc)
    hyper = "off" if not hyper_threads else "on" if cpus > cores else "not present"
    parts = [f"threads {count} of {cores} core{'s' if cores != 1 else ''}", f"hyper-threads {hyper}"]
    if pin:
        parts.append("pinned")
    room = cpus if hyper_threads else cores
    if quota is not None and quota < room:
        parts.append(f"CPU quota {quota:g}")
    if count > min(room, max(1, quota or room)):
        parts.append("more threads than that: expect less speed")
    return ", ".join(parts)


def node_of(sysfs: Path, cpu: int) -> int:
    """Memory node of a logical CPU; 0 on a machine that names none."""
    found = sorted(sysfs.glob(f"devices/system/cpu/cpu{cpu}/node[0-9]*"))
    return int(found[0].name[4:]) if found else 0


def cpu_quota(sysfs: Path = SYS, proc: Path = PROC) -> float | None:
    """CPUs' worth of time the control groups of this process grant, or None without a limit (cgroup v2 and v1).

    A group is also held to the limits of all groups above it, so the smallest on the way to the root counts.
    """
    mounts = sysfs / "fs/cgroup"
    v2 = [_v2_quota(group) for mount in (mounts, mounts / "unified") for group in control_groups(mount, proc, "")]
    v1 = [_v1_quota(group) for mount in (mounts / "cpu", mounts / "cpu,cpuacct")
          for group in control_groups(mount, proc, "cpu")]
    return min((quota for quota in v2 + v1 if quota is not None), default=None)


def core_of(sysfs: Path, cpu: int) -> tuple[str, str]:
    """(package, core) of a logical CPU; a CPU without topology counts as a core of its own."""
    topology = sysfs / f"devices/system/cpu/cpu{cpu}/topology"
    package, core = read(topology / "physical_package_id"), read(topology / "core_id")
    return (package, core) if package and core else ("?", str(cpu))


def control_groups(mount: Path, proc: Path, controller: str) -> list[Path]:
    """Directories from this process's group up to the mount; the group may lie outside what a container sees of it.

    controller: `cpu` or `memory` of cgroup v1, empty for v2.
    """
    path = next((fields[2] for fields in _memberships(proc) if controller in fields[1].split(",")), "/")
    inner = PurePosixPath(path.lstrip("/"))
    if ".." in inner.parts:  # the process was moved here from outside this namespace
        return [mount]
    return [mount / group for group in (inner, *inner.parents)]


def _memberships(proc: Path) -> list[list[str]]:
    """[id, controllers, path] of each line of /proc/self/cgroup; v2 names no controllers."""
    lines = (read(proc / "self/cgroup") or "").splitlines()
    return [fields for fields in (line.split(":", 2) for line in lines) if len(fields) == 3]


def _v2_quota(group: Path) -> float | None:
    limit, _, period = (read(group / "cpu.max") or "").partition(" ")
    return _ratio(limit, period)


def _v1_quota(group: Path) -> float | None:
    return _ratio(read(group / "cpu.cfs_quota_us"), read(group / "cpu.cfs_period_us"))


def _ratio(limit: str | None, period: str | None) -> float | None:
    """None for no limit, which v2 calls `max` and v1 -1, and for files that are not there."""
    if limit and period and limit.isdecimal() and period.isdecimal() and int(limit) and int(period):
        return int(limit) / int(period)
    return None


def read(path: Path) -> str | None:
    """A small text file without white space around it, or None where it is not to be had."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def word_after(path: Path, key: str) -> str | None:
    """The word after `key` in a small file of `key value` lines, None without one."""
    words = (read(path) or "").split()
    return words[words.index(key) + 1] if key in words[:-1] else None


def kilobytes(path: Path, key: str) -> int | None:
    """A `key value kB` line in bytes."""
    word = word_after(path, key)
    return int(word) * 1024 if word and word.isdecimal() else None
