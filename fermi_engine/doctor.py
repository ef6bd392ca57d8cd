"""What this machine offers the engine, and what is missing: CPU, backends, threads, memory, cache, optional packages.

Imports no NumPy, so that it can also answer on a CPU that is too old for it. Everything that /proc or /sys may lack
(containers, emulators, other kernels) is `unknown` then, never an error.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fermi_engine.errors import BackendError
from fermi_engine.kernels import dispatch, threads
from fermi_engine.report import size

UNKNOWN = "unknown"
EXTRAS = (  # package, extra that brings it, what needs it
    ("pycuda", "cuda", "the GPU backend"),
    ("starlette", "server", "the HTTP server"),
    ("uvicorn", "server", "the HTTP server"),
)


@dataclass
class Findings:
    """`facts`: label -> text. `backends`: backend -> ops it runs. `missing`: what is absent and how to get it.

    `problems` keep the engine from running here at all.
    """

    facts: dict[str, str] = field(default_factory=dict)
    backends: dict[str, list[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def examine(root: Path = Path("/")) -> Findings:
    """Look at this machine; `root` stands for / when /proc and /sys are read, so that tests can bring their own."""
    found = Findings()
    found.facts["CPU"] = _cpu_model(root)
    _examine_kernels(found)
    found.facts["threads"] = _threads(root)
    found.facts["NUMA nodes"] = _numa(root)
    found.facts["memory"] = _memory(root)
    found.facts["huge pages"] = _huge_pages(root)
    found.facts["locked memory"] = _locked(root)
    if found.problems:
        found.facts["cache"] = UNKNOWN
    else:
        found.facts["cache"] = _cache()
    _examine_extras(found)
    if found.problems:
        found.facts["GPU"] = UNKNOWN
    else:
        _examine_gpu(found)
    return found


def _examine_kernels(found: Findings) -> None:
    """CPU features, floor, backends and the op table; each failure is a problem with its remedy."""
    forced = os.environ.get("FERMI_BACKEND")
    found.facts["FERMI_BACKEND"] = forced or "not set: the best backend of each op"
    try:
        features = dispatch.cpu_features()
        found.facts["CPU features"] = " ".join(name for name in dispatch.FEATURES if name in features) or "none known"
        found.facts["x86-64-v2"] = _outcome(found, dispatch.check_cpu)
        found.facts["backends"] = ", ".join(f"{b.name} {_runs(b.name)}" for b in dispatch.BACKENDS)
        for op, kernel in dispatch.table().items():
            found.backends.setdefault(kernel.backend, []).append(op)
    except BackendError as err:
        found.problems.append(str(err))


def _outcome(found: Findings, check: Callable[[], None]) -> str:
    try:
        check()
    except BackendError as err:
        found.problems.append(str(err))
        return "no"
    return "yes"


def _runs(backend: str) -> str:
    return "(supported)" if backend in dispatch.supported() else "(not on this CPU)"


def _cpu_model(root: Path) -> str:
    lines = (read(root / "proc/cpuinfo") or "").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), UNKNOWN)


def _threads(root: Path) -> str:
    """The default, and the three numbers it follows from."""
    sysfs, proc = root / "sys", root / "proc"
    allowed = sorted(os.sched_getaffinity(0))
    cores = len({threads.core_of(sysfs, cpu) for cpu in allowed})
    quota = threads.cpu_quota(sysfs, proc)
    limit = "no CPU quota" if quota is None else f"a CPU quota of {quota:g}"
    return (f"{threads.default_threads(sysfs, proc)}: {cores} physical cores among the {len(allowed)} of {os.cpu_count()} "
            f"logical CPUs this process may use, {limit}; --threads changes it")


def _numa(root: Path) -> str:
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    described = []
    for node in nodes:
        total = _kilobytes(read(node / "meminfo") or "", "MemTotal:")
        cpus = read(node / "cpulist") or UNKNOWN
        described.append(f"{node.name[4:]}: CPUs {cpus}" + (f", {size(total)}" if total else ""))
    return f"{len(nodes)} ({'; '.join(described)})" if nodes else UNKNOWN


def _memory(root: Path) -> str:
    text = read(root / "proc/meminfo") or ""
    total, available = _kilobytes(text, "MemTotal:"), _kilobytes(text, "MemAvailable:")
    if not total:
        return UNKNOWN
    return f"{size(total)}, " + (f"{size(available)} available" if available is not None else "available unknown")


def _huge_pages(root: Path) -> str:
    mode = read(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = mode[mode.find("[") + 1 : mode.find("]")] if "[" in mode else UNKNOWN
    text = read(root / "proc/meminfo") or ""
    page, count = _kilobytes(text, "Hugepagesize:"), _word(text, "HugePages_Total:")
    reserved = f", {count if count != '0' else 'none'} of {size(page)} reserved" if page and count else ""
    return f"transparent: {chosen}{reserved}"


def _locked(root: Path) -> str:
    """How much --mlock may lock; the limit binds nobody who has CAP_IPC_LOCK."""
    capabilities = _word(read(root / "proc/self/status") or "", "CapEff:") or "0"
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if hard == resource.RLIM_INFINITY or int(capabilities, 16) >> 14 & 1:
        return "no limit"
    return f"at most {size(hard)}; --mlock needs the size of the model: raise `ulimit -l` for it"


def _cache() -> str:
    from fermi_engine.convert import cache_directory

    path = cache_directory().absolute()
    exists = next((p for p in (path, *path.parents) if p.exists()), path)
    try:
        free = size(shutil.disk_usage(exists).free)
    except OSError as err:
        free = f"{UNKNOWN} ({err.strerror})"
    writable = "" if os.access(exists, os.W_OK | os.X_OK) else ", not writable: set FERMI_CACHE to another directory"
    return f"{path}, {free} free{writable}"


def _examine_gpu(found: Findings) -> None:
    """The card after its self-test and whose matrix products it can run, or why there is none."""
    from fermi_engine.errors import DeviceError
    from fermi_engine.kernels.gpu import open_device

    try:
        device = open_device("cuda")
    except DeviceError as err:
        found.facts["GPU"] = f"none ({err})"
        return
    found.facts["GPU"] = f"{', '.join(device.facts().values())}, {size(device.free_bytes)} of {size(device.total_bytes)} free"
    try:
        vendor = f"--gemm vendor takes {device.vendor()} for the dense ones, those of experts stay own"
    except DeviceError as err:
        vendor = str(err)
    found.facts["GPU products"] = f"own kernels unless asked for others: the same bits on every card; {vendor}"
    device.close()


def _examine_extras(found: Findings) -> None:
    for package, extra, purpose in EXTRAS:
        if importlib.util.find_spec(package) is None:
            found.missing.append(f"{package} (for {purpose}): pip install 'fermi-engine[{extra}]'")
    if not _loads("libcuda.so.1"):
        found.missing.append("NVIDIA driver (for the GPU backend): libcuda.so.1 does not load; install the driver "
                             "that supports your card (Fermi cards: series 390 is the last)")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _word(text: str, key: str) -> str | None:
    """The word after `key` in a file of `key value` lines."""
    words = text.split()
    return words[words.index(key) + 1] if key in words[:-1] else None


def _kilobytes(text: str, key: str) -> int | None:
    """A `key value kB` line in bytes."""
    word = _word(text, key)
    return int(word) * 1024 if word and word.isdecimal() else None


def read(path: Path) -> str | None:
    """A small text file, or None where it is not to be had."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
