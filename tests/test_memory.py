"""Where the weights lie: copies, huge pages, locks, and the room for them."""

from __future__ import annotations

import errno
import mmap
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fermi_engine import memory, pages
from fermi_engine.errors import ConfigError, PackError
from fermi_engine.numa import Placement
from fermi_engine.pages import HUGE_PAGE, PAGE
from fermi_engine.report import size
from tests.memory_nodes import Machine, mapped

ROOT = Path(__file__).resolve().parents[1]
def permissions(data: np.ndarray) -> set[str]:
    """`r--p` and the like, of all parts of the process's memory that an array touches."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first < data.ctypes.data + data.size and data.ctypes.data < last:
            found.add(line.split()[1])
    return found


def test_a_resident_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PIECE", 1 << 20)
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


class OldLinux(pages.Kernel):
    """Before 5.14: MADV_POPULATE_READ is unknown."""

    def region(self, name: str, data: np.ndarray, *args: int) -> None:
        if (name, args) == ("madvise", (pages.POPULATE_READ,)):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().region(name, data, *args)


@pytest.mark.parametrize("kernel", [pages.SYSTEM, OldLinux()], ids=["populate", "touch"])
def test_warm_maps_every_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: pages.Kernel) -> None:
    monkeypatch.setattr(pages, "PIECE", 1 << 20)
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


@pytest.mark.parametrize("kernel", [pages.SYSTEM, OldLinux()], ids=["populate", "touch"])
def test_a_file_that_shrank_under_its_mapping(tmp_path: Path, kernel: pages.Kernel) -> None:
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
    pages.SYSTEM.region("munlock", data)
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
        huge = ("madvise", data.size, pages.HUGEPAGE)
        assert kernel.regions == [huge]
        kernel = Machine(data, np.zeros(8, int))
        same, words = memory.prepare(data, file.fileno(), Placement("interleave", (0, 1)), mlock=True, kernel=kernel)
        assert same is data
        assert words == "mapped, locked, numa interleave on nodes 0+1 (50+50 %)"
        assert kernel.regions == [huge, ("madvise", data.size, pages.POPULATE_READ), ("mlock", data.size)]
        copy, words = memory.prepare(data, file.fileno(), Placement("off"), load="resident", mlock=True)
        assert words == "resident, locked, numa off"
        assert np.array_equal(copy, data)
        pages.SYSTEM.region("munlock", copy)


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
