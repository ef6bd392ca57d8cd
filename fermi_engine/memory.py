"""Where the weights lie: on which memory nodes, in small or huge pages, mapped or copied, locked or not.

A page of a file gets its memory when the page cache first reads it, by the policy of the thread that reads; mapping the
file later moves nothing. So the policy is set before anything is read, and pages that an earlier reader left on one
node are moved, in place: they stay well placed for every later start, and no second copy is needed.

Uses the system calls themselves: libnuma adds a library that may be absent and turns their errors into text on stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fermi_engine.errors import ConfigError, PackError
from fermi_engine.kernels import threads
from fermi_engine.report import size

PAGE, HUGE_PAGE = 4096, 2 << 20
PIECE = 64 << 20  # bytes between two calls of progress: Ctrl-C waits no longer than one of them takes
DEFAULT, PREFERRED, INTERLEAVE = 0, 1, 3  # MPOL_*
MODE_MASK = 0xff  # above it get_mempolicy adds flags
MEMS_ALLOWED, MOVE = 4, 2  # MPOL_F_MEMS_ALLOWED, MPOL_MF_MOVE
HUGEPAGE, POPULATE_READ, DONTNEED = 14, 22, 4  # MADV_*
MOSTLY = 0.9  # share of huge pages that counts as having them: the ends of a file lie in small ones
CAP_IPC_LOCK = 14
SYSTEM_CALLS = {"mprotect": 10, "mincore": 27, "madvise": 28, "mlock": 149, "munlock": 150, "set_mempolicy": 238,
                "get_mempolicy": 239, "move_pages": 279}
MOST_NODES = 1024
SAMPLE, WINDOWS = 4096, 8  # pages looked at, parts of the file they are counted in
# Least share of an even one. Of a sample on 2..8 nodes, each holding its share, the part found on one has a standard
# deviation of sqrt((nodes - 1) / pages) of itself: 1.6 .. 4.1 % in all, 4.4 .. 11.7 % in a window. Both limits are more
# than three and a half of them away.
LEAST_SHARE, LEAST_IN_WINDOW = 0.85, 0.5
STRIPES = (1, 16, HUGE_PAGE // PAGE)  # pages in a row on one node: the finest that the page cache's own units allow
UNEVEN = "uneven, and these pages cannot be moved: end other programs that use the file, or use --load resident"

Progress = Callable[[int, int, str], None]


class Kernel:
    """The system calls used here (Linux, x86-64); OSError when one fails. Tests put a made-up machine in its place."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long

    def nodes(self) -> tuple[int, ...]:
        """Memory nodes this process may use."""
        return self._get_policy(MEMS_ALLOWED)[1]

    def policy(self) -> tuple[int, tuple[int, ...]]:
        """Memory policy of the calling thread (MPOL_*) and its nodes."""
        return self._get_policy(0)

    def _get_policy(self, flags: int) -> tuple[int, tuple[int, ...]]:
        mode, mask = np.zeros(1, np.int32), np.zeros(MOST_NODES // 8, np.uint8)
        self._call("get_mempolicy", mode.ctypes.data, mask.ctypes.data, MOST_NODES + 1, 0, flags)
        return int(mode[0]) & MODE_MASK, tuple(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())

    def set_policy(self, mode: int, nodes: tuple[int, ...] = ()) -> None:
        """For the calling thread and the threads it starts from now on."""
        bits = np.zeros(MOST_NODES, np.uint8)
        bits[list(nodes)] = 1
        mask = np.packbits(bits, bitorder="little")
        self._call("set_mempolicy", mode, mask.ctypes.data, MOST_NODES + 1)

    def nodes_of(self, addresses: np.ndarray, move_to: int | None = None) -> np.ndarray:
        """Node of each page, int32; -errno where it is not mapped, or cannot be moved because another process maps it.

        addresses: of the first bytes of pages. move_to: move them to that node first.
        """
        addresses = np.ascontiguousarray(addresses, np.uint64)
        found = np.full(len(addresses), -errno.ENOENT, np.int32)
        target = None if move_to is None else np.full(len(addresses), move_to, np.int32)
        self._call("move_pages", 0, len(addresses), addresses.ctypes.data, 0 if target is None else target.ctypes.data,
                   found.ctypes.data, MOVE)
        return found

    def cached(self, data: np.ndarray) -> np.ndarray:
        """Which pages are in memory, bool; all of them for a file that this user may not write."""
        present = np.zeros(-(-data.size // PAGE), np.uint8)
        self.region("mincore", data, present.ctypes.data)
        return (present & 1).astype(bool)

    def region(self, name: str, data: np.ndarray, *args: int) -> None:
        """One of madvise, mlock, munlock, mprotect, mincore on the pages of an array that begins with a page."""
        self._call(name, data.ctypes.data, data.size, *args)

    def _call(self, name: str, *args: int) -> None:
        numbers = (ctypes.c_long(number) for number in (SYSTEM_CALLS[name], *args))
        if self._libc.syscall(*numbers) < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


SYSTEM = Kernel()


@dataclass(frozen=True)
class Placement:
    """mode: interleave, local or off. nodes: where pages belong, empty when off. reason: why off unasked."""

    mode: str
    nodes: tuple[int, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if self.mode == "off":
            return f"numa off ({self.reason})" if self.reason else "numa off"
        return f"numa {self.mode} on node{'s' * (len(self.nodes) > 1)} {'+'.join(map(str, self.nodes))}"


def settle(asked: str | None, kernel: Kernel = SYSTEM, sysfs: Path = threads.SYS) -> Placement:
    """Choose the placement and make it the policy of the calling thread, for good: threads it starts later inherit it.

    asked: interleave, local or off; None keeps what the process was started under (numactl), else interleaves where
    there are two nodes. 'local' keeps memory and the calling thread on the node with most cores in the affinity mask,
    the first of equals: taskset chooses another.
    Raises ConfigError where a mode was asked for and the system forbids it.
    """
    if asked == "off":
        return Placement("off")
    if len(list(sysfs.glob("devices/system/node/node[0-9]*"))) < 2:
        return Placement("off", reason="one memory node")
    try:
        return _settle(asked, kernel, sysfs)
    except OSError as err:
        if asked is None:
            return Placement("off", reason=f"the system forbids memory policies: {err.strerror}")
        raise ConfigError(f"--numa {asked}: the system forbids memory policies ({err.strerror}); allow them (docker "
                          "run --cap-add SYS_NICE), or use --numa off") from None


def _settle(asked: str | None, kernel: Kernel, sysfs: Path) -> Placement:
    nodes, (mode, own) = kernel.nodes(), kernel.policy()
    if len(nodes) < 2:
        return Placement("off", reason=f"node {nodes[0]} only is allowed")
    if asked == "local":
        node, cpus = _home(nodes, sysfs)
        kernel.set_policy(PREFERRED, (node,))
        os.sched_setaffinity(0, cpus)
        return Placement("local", (node,))
    if asked is None and mode not in (DEFAULT, INTERLEAVE):
        return Placement("off", reason="the memory policy this process was started under stays")
    if asked is None and mode == INTERLEAVE:
        return Placement("interleave", own)
    kernel.set_policy(INTERLEAVE, nodes)
    return Placement("interleave", nodes)


def _home(nodes: tuple[int, ...], sysfs: Path) -> tuple[int, set[int]]:
    """The node to stay on and its logical CPUs within the affinity mask."""
    allowed = os.sched_getaffinity(0)
    cpus = {node: {cpu for cpu in allowed if threads.node_of(sysfs, cpu) == node} for node in nodes}
    home = max(nodes, key=lambda node: (len({threads.core_of(sysfs, cpu) for cpu in cpus[node]}), -node))
    return home, cpus[home] or allowed


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
    for at, end in _pieces(length):
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
    for at, end in _pieces(mapping.size):
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
    _touch(mapping, np.arange(at, end, PAGE))


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


def even_out(data: np.ndarray, nodes: tuple[int, ...], kernel: Kernel, progress: Progress | None = None) -> str:
    """Move pages of `data` that are in memory so that they alternate between `nodes`, where they do not yet.

    Returns the share of each node in words. Pages that other processes map stay where they are, and the words say so.
    """
    counts = spread(data, nodes, kernel)
    if not counts.sum():
        return "as pages are read"
    if not is_even(counts):
        _move_all(data, nodes, kernel, progress)
        counts = spread(data, nodes, kernel)
    return shares(counts) if is_even(counts) else f"{shares(counts)}: {UNEVEN}"


def shares(counts: np.ndarray) -> str:
    """`50+50 %`: what each node holds."""
    return "+".join(f"{part:.0f}" for part in 100 * counts.sum(0)[:-1] / max(1, counts.sum())) + " %"


def spread(data: np.ndarray, nodes: tuple[int, ...], kernel: Kernel) -> np.ndarray:
    """Pages by window of the file and by node, int64 [WINDOWS, len(nodes) + 1], other nodes last.

    From a sample of those in memory, taken at random: steps of a fixed length can fall in with the alternation.
    """
    cached = np.flatnonzero(kernel.cached(data))
    counts = np.zeros((WINDOWS, len(nodes) + 1), np.int64)
    if cached.size:
        chosen = np.unique(np.random.default_rng(0).choice(cached, SAMPLE))
        _touch(data, chosen * PAGE)
        found = kernel.nodes_of(data.ctypes.data + chosen * PAGE)
        windows = np.searchsorted(cached, chosen) * WINDOWS // cached.size
        for window, node in zip(windows[found >= 0], found[found >= 0], strict=True):
            counts[window, nodes.index(node) if node in nodes else -1] += 1
    return counts


def is_even(counts: np.ndarray) -> bool:
    """Whether each node holds its share, of the whole and of every window."""
    fair = counts.shape[1] - 1
    share = counts[:, :-1].sum(0) * fair / max(1, counts.sum())
    in_window = counts[:, :-1] * fair / np.maximum(1, counts.sum(1, keepdims=True))
    enough = counts.sum(1) >= SAMPLE // WINDOWS // 2  # a small file has windows of a few pages, which say nothing
    return bool(share.min() >= LEAST_SHARE and in_window[enough].min(initial=1.0) >= LEAST_IN_WINDOW)


def _move_all(data: np.ndarray, nodes: tuple[int, ...], kernel: Kernel, progress: Progress | None) -> None:
    cached = kernel.cached(data)
    stripes = list(STRIPES)
    for at, end in _pieces(data.size):
        pages = at // PAGE + np.flatnonzero(cached[at // PAGE:-(-end // PAGE)])
        _touch(data, pages * PAGE)
        while not _move_piece(data.ctypes.data, pages, nodes, stripes[0], kernel) and len(stripes) > 1:
            stripes.pop(0)
        if progress:
            progress(end, data.size, "moving weights between memory nodes")


def _move_piece(base: int, pages: np.ndarray, nodes: tuple[int, ...], stripe: int, kernel: Kernel) -> bool:
    """False when pages that moved are elsewhere in the end: they are parts of larger units that moved again as a whole.

    One call a node, so that even such a unit moves no more than once for each of them.
    """
    addresses = base + pages * PAGE
    target = np.asarray(nodes, np.int32)[pages // stripe % len(nodes)]
    astray = kernel.nodes_of(addresses) != target
    for node in nodes:
        chosen = addresses[astray & (target == node)]
        if chosen.size:
            kernel.nodes_of(chosen, move_to=node)
    return not len(pages) or bool(np.mean(kernel.nodes_of(addresses) == target) >= LEAST_SHARE)


def _pieces(length: int) -> Iterator[tuple[int, int]]:
    for at in range(0, length, PIECE):
        yield at, min(at + PIECE, length)


def _touch(data: np.ndarray, offsets: np.ndarray) -> None:
    """Map the pages at these offsets."""
    data[offsets].max(initial=0)


def _read(fd: int, into: np.ndarray, offset: int) -> None:
    while into.size:
        count = os.preadv(fd, [into], offset)
        if count == 0:
            raise PackError(f"the weights end at byte {offset}, {into.size} bytes early: the file changed while it was "
                            "in use; convert the checkpoint again")
        into, offset = into[count:], offset + count
