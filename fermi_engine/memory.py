"""Where the weights lie: mapped or copied, in small or huge pages, locked or not; numa.py: on which memory nodes."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
from pathlib import Path

import numpy as np

from fermi_engine.errors import ConfigError, PackError
from fermi_engine.kernels import threads
from fermi_engine.numa import Placement, even_out, shares, spread
from fermi_engine.pages import DONTNEED, HUGE_PAGE, HUGEPAGE, PAGE, POPULATE_READ, SYSTEM, Kernel, pieces, touch
from fermi_engine.report import Progress, size

MOSTLY = 0.9  # share of huge pages that counts as having them: the ends of a file lie in small ones
CAP_IPC_LOCK = 14


def prepare(mapping: np.ndarray, fd: int, placement: Placement, *, load: str = "mmap", huge_pages: bool = False,
            mlock: bool = False, kernel: Kernel = SYSTEM, progress: Progress | None = None) -> tuple[np.ndarray, str]:
    """The bytes to run from, and what was done, in words: `mapped, locked, numa interleave on nodes 0+1 (50+50 %)`.

    mapping: uint8, a whole file mapped read-only; fd: that file. load: 'mmap' returns the mapping, 'resident' a copy.
    mlock: everything is read and locked on return. huge_pages: of a mapping, too, where the file system has
    them. progress(done bytes, total bytes, what) is called after each piece.
    Raises ConfigError when memory or a limit is too small, PackError when the file cannot be read to its end.
    """
    said = ["resident" if load == "resident" else "mapped"]
    if load == "resident" or mlock:
        check_room(mapping.size, "--load resident" if load == "resident" else "--mlock")
    if mlock:
        check_lock_limit(mapping.size)
    data = mapping
    if load == "resident":
        data = load_resident(fd, mapping.size, huge_pages=huge_pages, kernel=kernel, progress=progress)
    else:
        advise_huge(data, kernel)
        if huge_pages:
            read_in_huge_pages(data, fd, kernel, progress)
        elif mlock:
            warm(data, fd, kernel, progress)
    if huge_pages:
        said.append(f"huge pages {100 * huge_share(data):.0f} %")
    where = str(placement)
    if placement.nodes and load == "resident":  # a copy lies where the policy put it, huge pages as a whole
        where += f" ({shares(spread(data, placement.nodes, kernel))})"
    elif placement.nodes:
        where += f" ({even_out(data, placement.nodes, kernel, progress)})"
    if mlock:
        lock(data, kernel)
        said.append("locked")
    return data, ", ".join([*said, where])


def load_resident(fd: int, length: int, *, huge_pages: bool = False, kernel: Kernel = SYSTEM,
                  progress: Progress | None = None) -> np.ndarray:
    """The first `length` bytes of a file in memory of their own, uint8, read-only, at a multiple of 2 MiB.

    Pages go where the policy of the calling thread sends them. Raises ConfigError where huge pages are switched off,
    PackError for a file that ends early.
    """
    if huge_pages:
        check_huge_pages()
    room = np.frombuffer(mmap.mmap(-1, length + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    begin = -room.ctypes.data % HUGE_PAGE
    data = room[begin:begin + length]
    if huge_pages:
        kernel.region("madvise", data, HUGEPAGE)
    for at, end in pieces(length):
        _read(fd, data[at:end], at)
        if progress:
            progress(end, length, "copying weights")
    kernel.region("mprotect", data, mmap.PROT_READ)
    data.flags.writeable = False
    return data


def advise_huge(mapping: np.ndarray, kernel: Kernel = SYSTEM) -> None:
    """Ask the page cache to read this mapping in units of 2 MiB: file systems with large folios do (ext4 from Linux 6.16,
    XFS); elsewhere nothing changes. Pages that are in memory already stay as they are.

    Worth a fifth of the speed of a decoded token: the kernels fetch weights far ahead, and a fetch waits for page tables.
    """
    with contextlib.suppress(OSError):
        kernel.region("madvise", mapping, HUGEPAGE)


def read_in_huge_pages(mapping: np.ndarray, fd: int, kernel: Kernel = SYSTEM, progress: Progress | None = None) -> None:
    """Have a mapped file in memory in huge pages, read anew where it lies there in small ones.

    Raises ConfigError where it stays in small ones, PackError where it cannot be read.
    """
    check_huge_pages()
    warm(mapping, fd, kernel, progress)
    if huge_share(mapping) < MOSTLY:
        kernel.region("madvise", mapping, DONTNEED)  # what is mapped cannot be dropped
        os.posix_fadvise(fd, 0, mapping.size, os.POSIX_FADV_DONTNEED)
        warm(mapping, fd, kernel, progress)
    if huge_share(mapping) < MOSTLY:
        raise ConfigError(f"--huge-pages: {100 * huge_share(mapping):.0f} % of the mapped file lie in huge pages; this kernel "
                          "or file system gives files small ones, or another process keeps them: use --load resident")


def warm(mapping: np.ndarray, fd: int, kernel: Kernel = SYSTEM, progress: Progress | None = None) -> None:
    """Read a mapped file and map every page, so that no later access waits for the disk. PackError: unreadable."""
    for at, end in pieces(mapping.size):
        try:
            kernel.region("madvise", mapping[at:end], POPULATE_READ)
        except OSError as err:
            if err.errno != errno.EINVAL:
                raise PackError(f"the weights cannot be read into memory ({err.strerror}); the file changed or its "
                                "disk fails: check it with `fermi-engine info --check`") from None
            _read_and_touch(mapping, fd, at, end)  # Linux before 5.14
        if progress:
            progress(end, mapping.size, "reading weights")


def _read_and_touch(mapping: np.ndarray, fd: int, at: int, end: int) -> None:
    """Read first: touching a page that the disk does not give ends the process."""
    scratch = np.empty(1 << 20, np.uint8)
    for start in range(at, end, scratch.size):
        _read(fd, scratch[:end - start], start)
    touch(mapping, np.arange(at, end, PAGE))


def lock(data: np.ndarray, kernel: Kernel = SYSTEM) -> None:
    """Keep every page in memory until the process ends. Raises ConfigError, and then nothing stays locked."""
    try:
        kernel.region("mlock", data)
    except OSError as err:
        kernel.region("munlock", data)
        raise ConfigError(f"--mlock: {size(data.size)} cannot be locked ({err.strerror}); free memory, raise `ulimit "
                          "-l`, or leave --mlock out") from None


def check_lock_limit(length: int, proc: Path = threads.PROC) -> None:
    """Raise the soft limit of locked memory where the hard one allows it. ConfigError, with both numbers, where not."""
    capabilities = int(threads.word_after(proc / "self/status", "CapEff:") or "0", 16)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    need = length + (threads.kilobytes(proc / "self/status", "VmLck:") or 0)
    if capabilities >> CAP_IPC_LOCK & 1 or soft == resource.RLIM_INFINITY or need <= soft:
        return
    if hard != resource.RLIM_INFINITY and need > hard:
        raise ConfigError(f"--mlock needs {size(need)} of locked memory, the limit is {size(hard)}; raise it as root "
                          "with `ulimit -l unlimited` (LimitMEMLOCK=infinity in a systemd unit), or leave --mlock out")
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (need, hard))


def check_room(length: int, option: str, sysfs: Path = threads.SYS, proc: Path = threads.PROC) -> None:
    """ConfigError, with both numbers, where fewer than `length` bytes of memory are to be had."""
    found = available(sysfs, proc)
    if found is not None and length > found:
        raise ConfigError(f"{option} needs {size(length)} of memory, {size(found)} are available; free memory, or "
                          f"leave {option} out")


def available(sysfs: Path = threads.SYS, proc: Path = threads.PROC) -> int | None:
    """Bytes to be had without swapping: of the machine, or what the control groups of this process leave of them."""
    mounts, numbers = sysfs / "fs/cgroup", [threads.kilobytes(proc / "meminfo", "MemAvailable:")]
    for mount in (mounts, mounts / "unified"):
        for group in threads.control_groups(mount, proc, ""):
            numbers.append(_left(group, "memory.max", "memory.current", "file"))
    for group in threads.control_groups(mounts / "memory", proc, "memory"):
        numbers.append(_left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"))
    return min((number for number in numbers if number is not None), default=None)


def _left(group: Path, limit: str, usage: str, cache: str) -> int | None:
    """What a control group still grants; the page cache it is charged with can be given up."""
    most, used = threads.read(group / limit) or "", threads.read(group / usage) or ""
    cached = threads.word_after(group / "memory.stat", cache) or "0"
    if not (most.isdecimal() and used.isdecimal() and cached.isdecimal()):
        return None
    return max(0, int(most) - max(0, int(used) - int(cached)))


def check_huge_pages(sysfs: Path = threads.SYS) -> None:
    """ConfigError where the system gives no transparent huge pages."""
    path = sysfs / "kernel/mm/transparent_hugepage/enabled"
    modes = threads.read(path)
    if not modes or "[never]" in modes:
        raise ConfigError(f"--huge-pages: transparent huge pages are {'off' if modes else 'not in this kernel'}; "
                          f"switch them on (echo madvise > {path}, as root), or leave --huge-pages out")


def huge_share(data: np.ndarray, proc: Path = threads.PROC) -> float:
    """Share that is mapped in huge pages, 0..1, whether memory of the process or of a file."""
    begin, end, inside, found = data.ctypes.data, data.ctypes.data + data.size, False, 0
    for line in (threads.read(proc / "self/smaps") or "").splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            first, last = (int(part, 16) for part in words[0].split("-"))
            inside = first < end and begin < last
        elif inside and words[0] in ("AnonHugePages:", "FilePmdMapped:", "ShmemPmdMapped:"):
            found += int(words[1]) * 1024
    return min(1.0, found / (-(-data.size // PAGE) * PAGE))


def _read(fd: int, into: np.ndarray, offset: int) -> None:
    while into.size:
        count = os.preadv(fd, [into], offset)
        if count == 0:
            raise PackError(f"the weights end at byte {offset}, {into.size} bytes early: the file changed while it was "
                            "in use; convert the checkpoint again")
        into, offset = into[count:], offset + count
