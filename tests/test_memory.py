"""Placement of the weights: a made-up machine with two and more memory nodes, and this one for everything else."""

from __future__ import annotations

import errno
import mmap
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fermi_engine import memory
from fermi_engine.errors import ConfigError, PackError
from fermi_engine.memory import HUGE_PAGE, PAGE, PIECE, Placement
from fermi_engine.report import size

ROOT = Path(__file__).resolve().parents[1]
PAGES = 2 * PIECE // PAGE + 1024  # two whole pieces and a part of one


class Machine(memory.Kernel):
    """Memory nodes of a machine that is not there, and the one array whose pages lie on them.

    where: node by page, -1 for not in memory. unit: pages that can move together only. shared: pages that another
    process maps. refused: errno of every call about policies. Calls about regions are recorded and do nothing.
    """

    def __init__(self, data: np.ndarray | None = None, where: np.ndarray | None = None, nodes: tuple[int, ...] = (0, 1),
                 own: tuple[int, tuple[int, ...]] = (memory.DEFAULT, ()), unit: int = 1, refused: int = 0) -> None:
        self.base, self.where = (0 if data is None else data.ctypes.data), where
        self.all, self.own, self.unit, self.refused = nodes, own, unit, refused
        self.shared = np.zeros(PAGES, bool)
        self.moves, self.regions = 0, []
        self.fails: dict[str, int] = {}

    def _get_policy(self, flags: int) -> tuple[int, tuple[int, ...]]:
        if self.refused:
            raise OSError(self.refused, os.strerror(self.refused))
        return (0, self.all) if flags == memory.MEMS_ALLOWED else self.own

    def set_policy(self, mode: int, nodes: tuple[int, ...] = ()) -> None:
        self.own = mode, nodes

    def nodes_of(self, addresses: np.ndarray, move_to: int | None = None) -> np.ndarray:
        pages = (addresses - self.base) // PAGE
        assert ((addresses - self.base) % PAGE == 0).all()
        if move_to is not None:
            units = np.unique(pages[~self.shared[pages]] // self.unit)
            together = (units[:, None] * self.unit + np.arange(self.unit)).ravel()
            together = together[together < len(self.where)]
            self.moves += together.size
            self.where[together] = move_to
        return np.where(self.where[pages] < 0, -errno.ENOENT, self.where[pages])

    def cached(self, data: np.ndarray) -> np.ndarray:
        return self.where[:-(-data.size // PAGE)] >= 0

    def region(self, name: str, data: np.ndarray, *args: int) -> None:
        self.regions.append((name, data.size, *args))
        if name in self.fails:
            raise OSError(self.fails[name], os.strerror(self.fails[name]))


@pytest.fixture(scope="module")
def weights() -> np.ndarray:
    """Memory that is never written: its pages cost nothing."""
    return np.frombuffer(mmap.mmap(-1, PAGES * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def nodes_in_sysfs(root: Path, nodes: tuple[int, ...], cpus: dict[int, int] | None = None) -> Path:
    """A /sys with memory nodes and logical CPUs (node by CPU), one core each."""
    for node in nodes:
        (root / f"devices/system/node/node{node}").mkdir(parents=True)
    for cpu, node in (cpus or {}).items():
        (root / f"devices/system/cpu/cpu{cpu}/node{node}").mkdir(parents=True)
    return root


CHOICES = {  # asked, machine -> placement in words, policy afterwards
    "two nodes": (None, {}, "numa interleave on nodes 0+1", (memory.INTERLEAVE, (0, 1))),
    "asked for": ("interleave", {}, "numa interleave on nodes 0+1", (memory.INTERLEAVE, (0, 1))),
    "others allowed": (None, {"nodes": (1, 3)}, "numa interleave on nodes 1+3", (memory.INTERLEAVE, (1, 3))),
    "one allowed": ("interleave", {"nodes": (1,)}, "numa off (node 1 only is allowed)", (memory.DEFAULT, ())),
    "off": ("off", {}, "numa off", (memory.DEFAULT, ())),
    "numactl --interleave": (None, {"nodes": (0, 1, 2), "own": (memory.INTERLEAVE, (0, 2))},
                             "numa interleave on nodes 0+2", (memory.INTERLEAVE, (0, 2))),
    "numactl --membind": (None, {"own": (2, (1,))}, "numa off (the memory policy this process was started under stays)",
                          (2, (1,))),
    "asked for, against numactl": ("interleave", {"own": (2, (1,))}, "numa interleave on nodes 0+1",
                                   (memory.INTERLEAVE, (0, 1))),
    "a container": (None, {"refused": errno.EPERM},
                    "numa off (the system forbids memory policies: Operation not permitted)", (memory.DEFAULT, ())),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_placement_and_the_policy(tmp_path: Path, name: str) -> None:
    asked, machine, words, policy = CHOICES[name]
    kernel = Machine(**machine)
    placement = memory.settle(asked, kernel, nodes_in_sysfs(tmp_path, (0, 1)))
    assert str(placement) == words
    assert kernel.own == policy
    assert placement.nodes == (policy[1] if placement.mode == "interleave" else ())


def test_one_node_asks_nothing_of_the_system(tmp_path: Path) -> None:
    kernel = Machine(refused=errno.ENOSYS)
    for asked in (None, "interleave", "local"):
        assert str(memory.settle(asked, kernel, nodes_in_sysfs(tmp_path / str(asked), (0,)))) == \
            "numa off (one memory node)"
    assert str(memory.settle(None, kernel, tmp_path / "no /sys")) == "numa off (one memory node)"


def test_a_mode_that_was_asked_for_and_is_forbidden(tmp_path: Path) -> None:
    sysfs = nodes_in_sysfs(tmp_path, (0, 1))
    for asked in ("interleave", "local"):
        with pytest.raises(ConfigError, match=rf"^--numa {asked}: .*Operation not permitted.*SYS_NICE.*--numa off$"):
            memory.settle(asked, Machine(refused=errno.EPERM), sysfs)


@pytest.mark.parametrize(("cpus", "home"), [
    ({0: 0, 1: 0, 2: 1, 3: 1, 4: 1}, 1),  # most cores
    ({0: 1, 1: 1, 2: 0, 3: 0}, 0),  # the first of equals
    ({2: 1, 3: 1}, 1),  # as taskset left it
])
def test_local_stays_on_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: dict[int, int],
                                 home: int) -> None:
    held: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, mask: held.append(mask))
    kernel = Machine()
    placement = memory.settle("local", kernel, nodes_in_sysfs(tmp_path, (0, 1), cpus))
    assert (placement.mode, placement.nodes, str(placement)) == ("local", (home,), f"numa local on node {home}")
    assert kernel.own == (memory.PREFERRED, (home,))
    assert held == [{cpu for cpu, node in cpus.items() if node == home}]


INDEX = np.arange(PAGES)
LAYOUTS = {  # node by page, nodes wanted, most pages that may have moved
    "read by one thread": (0 * INDEX, (0, 1), PAGES // 2),
    "alternating": (INDEX % 2, (0, 1), 0),
    "alternating by chance": (np.random.default_rng(1).integers(0, 2, PAGES), (0, 1), 0),
    "a half on each": (INDEX * 2 // PAGES, (0, 1), PAGES // 2),
    "one window on one node": (np.where(INDEX < PAGES // 8, 1, INDEX % 2), (0, 1), PAGES // 8),
    "on another node": (5 + 0 * INDEX, (0, 1), PAGES),
    "three nodes": (0 * INDEX, (0, 1, 2), PAGES * 2 // 3 + 1),
    "eight nodes": (INDEX % 8, tuple(range(8)), 0),
    "local": (INDEX % 2, (1,), PAGES // 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_pages_that_lie_badly_are_moved(weights: np.ndarray, name: str) -> None:
    where, nodes, most = LAYOUTS[name]
    kernel = Machine(weights, where.copy())
    text = memory.even_out(weights, nodes, kernel)
    counts = np.array([(kernel.where == node).sum() for node in nodes])
    # one page, or what chance leaves: six standard deviations of PAGES tosses
    np.testing.assert_allclose(counts, PAGES / len(nodes), atol=1 if most else 6 * PAGES**0.5 / 2)
    assert (kernel.moves > 0) == (most > 0)
    assert kernel.moves <= most
    assert "uneven" not in text


def test_the_shares_are_told(weights: np.ndarray) -> None:
    text = memory.even_out(weights, (0, 1), Machine(weights, 0 * INDEX))
    shares, _, rest = text.partition(" ")
    first, second = map(int, shares.split("+"))
    assert abs(first - 50) <= 5  # a sample of 4096: six standard deviations of 0.8 %
    assert abs(first + second - 100) <= 1
    assert rest == "%"
    assert memory.even_out(weights, (1,), Machine(weights, 1 + 0 * INDEX)) == "100 %"


@pytest.mark.parametrize("unit", [16, 512])
def test_large_units_of_the_page_cache_move_few_times(weights: np.ndarray, unit: int) -> None:
    kernel = Machine(weights, 0 * INDEX, unit=unit)
    assert "uneven" not in memory.even_out(weights, (0, 1), kernel)
    runs = kernel.where[:PAGES // unit * unit].reshape(-1, unit)
    assert (runs == runs[:, :1]).all()
    assert (runs[:, 0] == np.arange(len(runs)) % 2).all()
    # the first piece is tried in finer stripes, twice at most with one move to each node; everything else moves once
    assert kernel.moves <= PAGES // 2 + 2 * 2 * PIECE // PAGE


def test_pages_that_others_map_are_told(weights: np.ndarray) -> None:
    kernel = Machine(weights, 0 * INDEX)
    kernel.shared[:] = True
    assert memory.even_out(weights, (0, 1), kernel)== f"100+0 %: {memory.UNEVEN}"
    kernel.shared[PAGES // 8:] = False  # one window of eight stays: 44 % of all, but nothing of that window, on node 1
    assert "uneven" in memory.even_out(weights, (0, 1), kernel)


def test_pages_not_in_memory_are_left_to_the_policy(weights: np.ndarray) -> None:
    kernel = Machine(weights, -1 + 0 * INDEX)
    assert memory.even_out(weights, (0, 1), kernel) == "as pages are read"
    kernel = Machine(weights, np.where(INDEX % 3 == 0, 0, -1))
    memory.even_out(weights, (0, 1), kernel)
    assert (kernel.where[INDEX % 3 != 0] == -1).all()
    assert kernel.moves <= PAGES // 3 / 2 + 1


def test_a_small_file_is_judged_as_a_whole() -> None:
    counts = np.zeros((memory.WINDOWS, 3), np.int64)
    counts[:, 0], counts[0, 0] = 1, 0
    counts[:, 1] = 1
    assert memory.is_even(counts)  # 7 of 15, and windows of one or two pages
    assert not memory.is_even(300 * counts)


@pytest.fixture
def policy_of_a_thread() -> None:
    """Skips, visibly, where the system refuses policies (containers)."""
    try:
        memory.SYSTEM.nodes()
    except OSError as err:
        pytest.skip(f"memory policies: {err.strerror}")


def in_thread(work: Callable[[], Any]) -> list:
    """Results of `work` in a thread of its own, whose policy ends with it."""
    done: list = []
    thread = threading.Thread(target=lambda: done.append(work()))
    thread.start()
    thread.join()
    return done


@pytest.mark.usefixtures("policy_of_a_thread")
def test_a_policy_is_one_of_the_thread_and_its_children() -> None:
    before, nodes = memory.SYSTEM.policy(), memory.SYSTEM.nodes()
    assert nodes

    def work() -> tuple:
        memory.SYSTEM.set_policy(memory.INTERLEAVE, nodes)
        return memory.SYSTEM.policy(), in_thread(memory.SYSTEM.policy)[0]

    assert in_thread(work) == [((memory.INTERLEAVE, nodes), (memory.INTERLEAVE, nodes))]
    assert memory.SYSTEM.policy() == before
    with pytest.raises(OSError, match="Invalid argument"):
        memory.SYSTEM.set_policy(memory.INTERLEAVE, (memory.MOST_NODES - 1,))


@pytest.mark.usefixtures("policy_of_a_thread")
def test_the_system_tells_where_pages_are(tmp_path: Path) -> None:
    file, data = mapped(tmp_path, 64 * PAGE)
    with file:
        memory.warm(data, file.fileno())
        found = memory.SYSTEM.nodes_of(data.ctypes.data + PAGE * np.arange(64))
        assert set(found.tolist()) <= set(memory.SYSTEM.nodes())
        again = memory.SYSTEM.nodes_of(data.ctypes.data + PAGE * np.arange(64), move_to=int(found[0]))
        assert (again == found[0]).all()
        nowhere = memory.SYSTEM.nodes_of(np.array([PAGE]))
        assert nowhere[0] < 0


@pytest.mark.usefixtures("policy_of_a_thread")
def test_this_machine_places_a_file(tmp_path: Path) -> None:
    """On one node nothing has to move; on two, pages really do."""
    file, data = mapped(tmp_path, 256 * PAGE)
    nodes = memory.SYSTEM.nodes()
    with file:
        text = memory.even_out(data, nodes, memory.SYSTEM)
        found = memory.SYSTEM.nodes_of(data.ctypes.data + PAGE * np.arange(256))
    assert re.fullmatch(r"\d+(\+\d+)* %", text)
    assert max(abs(int((found == node).sum()) - 256 // len(nodes)) for node in nodes) <= 256 // len(nodes) // 4


def mapped(folder: Path, length: int) -> tuple:
    """A file of random bytes, open, and its read-only mapping."""
    path = folder / "weights"
    path.write_bytes(np.random.default_rng(length).bytes(length))
    file = open(path, "rb+")  # noqa: SIM115 - the caller closes it
    return file, np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)


def permissions(data: np.ndarray) -> set[str]:
    """`r--p` and the like, of all parts of the process's memory that an array touches."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first < data.ctypes.data + data.size and data.ctypes.data < last:
            found.add(line.split()[1])
    return found


def test_a_resident_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PIECE", 1 << 20)
    calls: list[tuple[int, int, str]] = []
    length = (3 << 20) + 12345
    file, data = mapped(tmp_path, length)
    with file:
        copy = memory.load_resident(file.fileno(), length, progress=lambda *call: calls.append(call))
    assert copy.dtype == np.uint8
    assert copy.size == length
    assert np.array_equal(copy, data)
    assert copy.ctypes.data % HUGE_PAGE == 0
    assert permissions(copy) == {"r--p"}
    assert not copy.flags.writeable
    assert calls == [(done, length, "copying weights") for done in (1 << 20, 2 << 20, 3 << 20, length)]


def test_a_file_that_shrank_is_no_copy(tmp_path: Path) -> None:
    file, _ = mapped(tmp_path, 3 * PAGE)
    with file, pytest.raises(PackError, match=rf"the weights end at byte {3 * PAGE}, 17 bytes early"):
        memory.load_resident(file.fileno(), 3 * PAGE + 17)


def test_huge_pages_or_a_reason(tmp_path: Path) -> None:
    """Most of the copy lies in huge pages where they are to be had; a fragmented memory may lack some."""
    file, data = mapped(tmp_path, 8 * HUGE_PAGE)
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    with file:
        if not modes.exists() or "[never]" in modes.read_text():
            with pytest.raises(ConfigError, match=r"^--huge-pages: transparent huge pages are"):
                memory.load_resident(file.fileno(), data.size, huge_pages=True)
            return
        copy = memory.load_resident(file.fileno(), data.size, huge_pages=True)
        assert np.array_equal(copy, data)
        assert memory.huge_share(copy) >= 0.5
        if "[madvise]" in modes.read_text():
            assert memory.huge_share(memory.load_resident(file.fileno(), data.size)) == 0


def test_a_mapped_file_in_huge_pages_or_a_reason(tmp_path: Path) -> None:
    """Written small, so that it has to be read anew; where files get small pages only, that is said."""
    path = tmp_path / "weights"
    with path.open("wb") as file:
        for _ in range(4 * HUGE_PAGE // PAGE):
            file.write(b"x" * PAGE)
            file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
        memory.advise_huge(data)
        try:
            memory.read_in_huge_pages(data, file.fileno())
        except ConfigError as err:
            assert "--huge-pages" in str(err)  # noqa: PT017
            assert memory.huge_share(data) < memory.MOSTLY
            return
        assert memory.huge_share(data) >= memory.MOSTLY
    assert (data == ord("x")).all()


def test_small_pages_of_a_file_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, data = mapped(tmp_path, 2 * HUGE_PAGE)
    monkeypatch.setattr(memory, "huge_share", lambda data: 0.25)
    monkeypatch.setattr(memory, "check_huge_pages", lambda: None)
    with file, pytest.raises(ConfigError, match=r"^--huge-pages: 25 % of the mapped file .* use --load resident$"):
        memory.read_in_huge_pages(data, file.fileno())


def test_the_share_of_huge_pages_counts_its_own_memory_only(tmp_path: Path) -> None:
    data = np.frombuffer(mmap.mmap(-1, 4 * PAGE), np.uint8)
    at = data.ctypes.data
    lines = [f"{at - 99 * PAGE:x}-{at:x} rw-p 0 00:00 0", "AnonHugePages:  396 kB",
             f"{at:x}-{at + 2 * PAGE:x} rw-p 00000000 00:00 0    [heap: 1-2]", "Rss:    8 kB", "AnonHugePages:    4 kB",
             f"{at + 2 * PAGE:x}-{at + 9 * PAGE:x} rw-p 00000000 00:00 0", "AnonHugePages:    4 kB",
             f"{at + 9 * PAGE:x}-{at + 19 * PAGE:x} rw-p 00000000 00:00 0", "AnonHugePages:    40 kB"]
    (tmp_path / "self").mkdir()
    (tmp_path / "self/smaps").write_text("\n".join(lines))
    assert memory.huge_share(data, tmp_path) == 0.5


@pytest.mark.parametrize(("modes", "words"), [("always madvise [never]\n", "off"), (None, "not in this kernel")])
def test_huge_pages_that_are_switched_off(tmp_path: Path, modes: str | None, words: str) -> None:
    if modes:
        path = tmp_path / "kernel/mm/transparent_hugepage/enabled"
        path.parent.mkdir(parents=True)
        path.write_text(modes)
    with pytest.raises(ConfigError, match=rf"pages are {words}; switch them on \(echo madvise .* --huge-pages out$"):
        memory.check_huge_pages(tmp_path)


def resident_bytes(data: np.ndarray) -> int:
    """Bytes of an array that are in memory and mapped."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            first, last = (int(part, 16) for part in words[0].split("-"))
            inside = first < data.ctypes.data + data.size and data.ctypes.data < last
        elif inside and words[0] == "Rss:":
            found += int(words[1]) * 1024
    return found


class OldLinux(memory.Kernel):
    """Before 5.14: MADV_POPULATE_READ is unknown."""

    def region(self, name: str, data: np.ndarray, *args: int) -> None:
        if (name, args) == ("madvise", (memory.POPULATE_READ,)):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().region(name, data, *args)


@pytest.mark.parametrize("kernel", [memory.SYSTEM, OldLinux()], ids=["populate", "touch"])
def test_warm_maps_every_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: memory.Kernel) -> None:
    monkeypatch.setattr(memory, "PIECE", 1 << 20)
    calls: list[int] = []
    length = (3 << 20) + 5
    file, data = mapped(tmp_path, length)
    with file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert resident_bytes(data) == 0
        memory.warm(data, file.fileno(), kernel, lambda done, total, what: calls.append(done))
        assert kernel.cached(data).all()
        assert resident_bytes(data) == -(-length // PAGE) * PAGE
    assert calls == [1 << 20, 2 << 20, 3 << 20, length]


@pytest.mark.parametrize("kernel", [memory.SYSTEM, OldLinux()], ids=["populate", "touch"])
def test_a_file_that_shrank_under_its_mapping(tmp_path: Path, kernel: memory.Kernel) -> None:
    """A plain touch would end the process with SIGBUS."""
    file, data = mapped(tmp_path, 8 * PAGE)
    with file:
        file.truncate(3 * PAGE)
        with pytest.raises(PackError, match=r"cannot be read into memory|end at byte 12288, 20480 bytes early"):
            memory.warm(data, file.fileno(), kernel)


def locked_bytes() -> int:
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmLck:"))


def test_locked_memory_is_locked(tmp_path: Path) -> None:
    file, data = mapped(tmp_path, 8 * PAGE)  # half of what any system lets anybody lock
    before = locked_bytes()
    with file:
        same, words = memory.prepare(data, file.fileno(), Placement("off"), mlock=True)
    assert same is data
    assert words == "mapped, locked, numa off"
    assert locked_bytes() - before == 8 * PAGE
    memory.SYSTEM.region("munlock", data)
    assert locked_bytes() == before


LOCKED_OUT = """
import os, resource, sys
import numpy as np
from fermi_engine import memory
from fermi_engine.errors import ConfigError
resource.setrlimit(resource.RLIMIT_MEMLOCK, (16 << 10, 32 << 10))
fd = os.open(sys.argv[1], os.O_RDONLY)
if os.geteuid() == 0:
    os.setuid(65534)  # root may lock as much as it likes
data = memory.load_resident(fd, 48 << 10)
for attempt in (lambda: memory.prepare(data, fd, memory.Placement("off"), mlock=True), lambda: memory.lock(data)):
    try:
        attempt()
        print("locked")
    except ConfigError as err:
        print(err)
memory.prepare(data[:24 << 10], fd, memory.Placement("off"), mlock=True)
print(*(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmLck:")))
"""


def test_the_limit_of_locked_memory(tmp_path: Path) -> None:
    """Beyond the hard limit: an error and nothing locked; beyond the soft one: it is raised."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(48 << 10))
    run = subprocess.run([sys.executable, "-c", LOCKED_OUT, str(path)], capture_output=True, text=True, timeout=60,
                         check=False, cwd=ROOT)
    limit, refused, left = run.stdout.splitlines() or [run.stderr, "", ""]
    assert limit == ("--mlock needs 49.2 kB of locked memory, the limit is 32.8 kB; raise it as root with `ulimit -l "
                     "unlimited` (LimitMEMLOCK=infinity in a systemd unit), or leave --mlock out"), run.stderr
    assert refused.startswith("--mlock: 49.2 kB cannot be locked (")
    assert left == "24"


def test_a_limit_counts_what_is_locked_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "self").mkdir()
    limits = [(8 << 20, 8 << 20)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))

    def status(locked: int, capabilities: int) -> None:
        (tmp_path / "self/status").write_text(f"CapEff:\t{capabilities:016x}\nVmLck:\t{locked} kB\n")

    status(4096, 0)
    memory.check_lock_limit(4 << 20, tmp_path)
    with pytest.raises(ConfigError, match=r"needs 8\.39 MB of locked memory, the limit is 8\.39 MB"):
        memory.check_lock_limit((4 << 20) + 1, tmp_path)
    status(4096, 1 << 14)
    memory.check_lock_limit(1 << 40, tmp_path)
    status(0, 0)
    limits.append((1 << 20, resource.RLIM_INFINITY))
    memory.check_lock_limit(1 << 21, tmp_path)
    assert limits[-1] == (1 << 21, resource.RLIM_INFINITY)


KB = 1024
ROOMS = {  # files under /proc and /sys/fs/cgroup -> bytes to be had
    "nothing known": ({}, None),
    "the machine": ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   5 kB\n"}, 5 * KB),
    "no limit": ({"proc/meminfo": "MemAvailable: 5 kB\n", "memory.max": "max\n", "memory.current": "99\n"}, 5 * KB),
    "a container": ({"proc/meminfo": "MemAvailable: 5 kB\n", "memory.max": "4096\n", "memory.current": "3000\n",
                     "memory.stat": "anon 900\nfile 2000\n"}, 4096 - 1000),
    "a group above": ({"proc/meminfo": "MemAvailable: 5 kB\n", "proc/self/cgroup": "0::/a/b\n", "a/memory.max": "700\n",
                       "a/memory.current": "200\n", "a/b/memory.max": "max\n"}, 500),
    "full": ({"memory.max": "100\n", "memory.current": "300\n"}, 0),
    "v1": ({"proc/meminfo": "MemAvailable: 5 kB\n", "proc/self/cgroup": "7:memory:/job\n0::/\n",
            "memory/job/memory.limit_in_bytes": "2048\n", "memory/job/memory.usage_in_bytes": "1500\n",
            "memory/job/memory.stat": "cache 1\ntotal_cache 1000\n"}, 2048 - 500),
}


@pytest.mark.parametrize("name", ROOMS)
def test_memory_to_be_had(tmp_path: Path, name: str) -> None:
    files, expected = ROOMS[name]
    for file, text in files.items():
        path = tmp_path / (file if file.startswith("proc/") else f"sys/fs/cgroup/{file}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory.available(tmp_path / "sys", tmp_path / "proc") == expected
    if expected is not None:
        memory.check_room(expected, "--mlock", tmp_path / "sys", tmp_path / "proc")
        with pytest.raises(ConfigError, match=rf"^--mlock needs .*, {re.escape(size(expected))} are available"):
            memory.check_room(expected + 1, "--mlock", tmp_path / "sys", tmp_path / "proc")


def test_room_is_checked_before_anything_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda *_: 12 << 20)
    monkeypatch.setattr(memory, "load_resident", None)
    monkeypatch.setattr(memory, "warm", None)
    data = np.broadcast_to(np.uint8(0), (10_430_000_000,))
    for choice, option in (({"load": "resident"}, "--load resident"), ({"mlock": True}, "--mlock")):
        with pytest.raises(ConfigError, match=f"^{option} needs 10.4 GB of memory, 12.6 MB are available; free memory, "
                                              f"or leave {option} out$"):
            memory.prepare(data, -1, Placement("off"), **choice)


def test_what_was_done_in_words(tmp_path: Path) -> None:
    file, data = mapped(tmp_path, 8 * PAGE)
    with file:
        kernel = Machine()
        same, words = memory.prepare(data, file.fileno(), Placement("off", reason="one memory node"), kernel=kernel)
        assert same is data
        assert words == "mapped, numa off (one memory node)"
        huge = ("madvise", data.size, memory.HUGEPAGE)
        assert kernel.regions == [huge]
        kernel = Machine(data, np.zeros(8, int))
        same, words = memory.prepare(data, file.fileno(), Placement("interleave", (0, 1)), mlock=True, kernel=kernel)
        assert same is data
        assert words == "mapped, locked, numa interleave on nodes 0+1 (50+50 %)"
        assert kernel.regions == [huge, ("madvise", data.size, memory.POPULATE_READ), ("mlock", data.size)]
        copy, words = memory.prepare(data, file.fileno(), Placement("off"), load="resident", mlock=True)
        assert words == "resident, locked, numa off"
        assert np.array_equal(copy, data)
        memory.SYSTEM.region("munlock", copy)


def test_a_copy_stays_where_the_policy_put_it(tmp_path: Path) -> None:
    """Its huge pages may be too few for equal shares: nothing is moved, nobody is told to mend it."""

    class OneNode(Machine):
        def cached(self, data: np.ndarray) -> np.ndarray:
            self.base, self.where = data.ctypes.data, np.zeros(-(-data.size // PAGE), int)
            return super().cached(data)

    file, data = mapped(tmp_path, 8 * PAGE)
    kernel = OneNode()
    with file:
        _, words = memory.prepare(data, file.fileno(), Placement("interleave", (0, 1)), load="resident", kernel=kernel)
    assert words == "resident, numa interleave on nodes 0+1 (100+0 %)"
    assert kernel.moves == 0


def test_a_lock_that_fails_leaves_nothing_locked(tmp_path: Path) -> None:
    file, data = mapped(tmp_path, 4 * PAGE)
    kernel = Machine()
    kernel.fails["mlock"] = errno.ENOMEM
    with file, pytest.raises(ConfigError, match=r"^--mlock: 16\.4 kB cannot be locked \(Cannot allocate memory\)"):
        memory.prepare(data, file.fileno(), Placement("off"), mlock=True, kernel=kernel)
    assert [name for name, *_ in kernel.regions] == ["madvise", "madvise", "mlock", "munlock"]
