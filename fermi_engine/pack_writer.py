"""Writes a pack: all sizes are known beforehand, bytes go out in file order, and only a finished file gets its name.

The file grows as `PATH.fermi-part`. `PATH.fermi-part.journal` says first whose it is, then gains one JSON line per
finished tensor, after its bytes are on disk; a later run of the same plan re-hashes what the journal claims and goes on
after the last tensor that holds. The bytes of the result do not depend on interruptions. A lock on the part file keeps a
second writer out and dies with its owner. A part file without a journal of ours is somebody else's and stays untouched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fermi_engine.errors import FormatError, PackError
from fermi_engine.pack import DIGEST_BYTES, LINE, PAD_PREFIX, PAGE, PART_SUFFIX, SEAL, Pack, seal_digest, tensor_digest
from fermi_engine.report import Progress

JOURNAL_SUFFIX = ".journal"  # after the part file's name
SYNC_BYTES = 64 << 20  # finished bytes that may wait for one fsync: small tensors share it, a crash costs no more
_HOPELESS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the rest would not fit either: leave nothing behind
_JOURNAL_START = '{"plan": "'  # of every journal, so also of one that another plan left
ITEM_BYTES = {"U8": 1, "I32": 4, "F32": 4}


class Slot(NamedTuple):
    """One tensor of a plan; `begin` and `end` in bytes from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Wanted(NamedTuple):
    """A tensor to place: dtype "U8", "I32" or "F32", `align` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    align: int = LINE


@dataclass(frozen=True)
class PackPlan:
    """Where everything goes: the header (its length field and padding included) and all slots, pads and seal too."""

    header: bytes
    slots: tuple[Slot, ...]

    @classmethod
    def build(cls, wanted: Sequence[Wanted], metadata: Mapping[str, str]) -> PackPlan:
        """Place tensors in the given order, filling gaps with `_pad.N`; `_seal` comes last."""
        slots: list[Slot] = []
        for name, dtype, shape, align in wanted:
            _pad(slots, align)
            _append(slots, name, dtype, tuple(shape))
        _pad(slots, LINE)
        _append(slots, SEAL, "U8", (DIGEST_BYTES * (len(slots) + 1),))
        return cls(_header(slots, metadata), tuple(slots))

    @property
    def total_bytes(self) -> int:
        """Size of the finished file."""
        return len(self.header) + self.slots[-1].end


def _end(slots: list[Slot]) -> int:
    return slots[-1].end if slots else 0


def _append(slots: list[Slot], name: str, dtype: str, shape: tuple[int, ...]) -> None:
    begin = _end(slots)
    slots.append(Slot(name, dtype, shape, begin, begin + math.prod(shape) * ITEM_BYTES[dtype]))


def _pad(slots: list[Slot], align: int) -> None:
    gap = -_end(slots) % align
    if gap:
        _append(slots, f"{PAD_PREFIX}{sum(s.name.startswith(PAD_PREFIX) for s in slots)}", "U8", (gap,))


def _header(slots: list[Slot], metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    for slot in slots:
        fields[slot.name] = {"dtype": slot.dtype, "shape": slot.shape, "data_offsets": (slot.begin, slot.end)}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


class PackWriter:
    """Writes one plan; use as a context manager and `put` the tensors of `remaining()` in that order, then `finish`.

    `origin` names the state of the source (sizes, time stamps): a part file of another plan or origin is not continued.
    Leaving with a FormatError removes the part file, for the same values would be refused again; so does a disk that is
    full. After anything else it stays for a resume.
    """

    def __init__(self, path: str | os.PathLike[str], plan: PackPlan, origin: str = "") -> None:
        self.path, self.plan = Path(path), plan
        self.part = self.path.with_name(self.path.name + PART_SUFFIX)
        self.journal = self.part.with_name(self.part.name + JOURNAL_SUFFIX)
        self._first_line = f'{_JOURNAL_START}{seal_digest(plan.header, b"").hex()}", "origin": {json.dumps(origin)}}}\n'
        self._digests: list[bytes] = []  # of finished slots, in order
        self._journalled = 0  # how many of them the journal has
        self._unsynced = 0  # bytes
        self._refused = False  # by the disk, so that what was written last may not be there
        _check_target(self.path)
        _check_leftovers(self.part, self.journal)
        _check_space(self.path, self.part, plan.total_bytes)
        self._fd = self._lock()
        try:
            self._guard(self._recover)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._fd < 0:
            return
        if kind and issubclass(kind, FormatError):
            self._discard()
        elif not self._refused:
            with contextlib.suppress(OSError):
                self._sync()
        self._release()

    @property
    def done_bytes(self) -> int:
        """Bytes of the file that are written, whether by this run or by one before it."""
        done = len(self._digests)
        return len(self.plan.header) + (self.plan.slots[done - 1].end if done else 0)

    def remaining(self) -> Iterator[Slot]:
        """The slots still to `put`, in file order; pads and the seal are the writer's own."""
        for slot in self.plan.slots[len(self._digests):]:
            if slot.name != SEAL and not slot.name.startswith(PAD_PREFIX):
                yield slot

    def put(self, name: str, chunks: Iterable[Any]) -> None:
        """Write one tensor from uint8 buffers that together have exactly its size.

        ValueError for a tensor out of order or of another size, PackError where the disk refuses.
        """
        self._fill_pads()
        slot = self.plan.slots[len(self._digests)]
        if slot.name != name:
            raise ValueError(f"{name} is out of order, {slot.name} comes next")
        digest, position = tensor_digest(), slot.begin
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            if position + len(view) > slot.end:
                raise ValueError(f"{name} has more than the planned {slot.end - slot.begin} bytes")
            digest.update(view)
            self._guard(self._write, view, len(self.plan.header) + position)
            position += len(view)
        if position != slot.end:
            raise ValueError(f"{name} has {position - slot.begin} bytes, planned {slot.end - slot.begin}")
        self._finished(slot, digest.digest())

    def finish(self) -> Path:
        """Write the seal, put everything on disk, give the file its name. PackError where the disk refuses."""
        self._fill_pads()
        slot = self.plan.slots[len(self._digests)]
        if slot.name != SEAL:
            raise ValueError(f"{slot.name} is not written yet")
        digests = b"".join(self._digests)
        seal = digests + seal_digest(self.plan.header, digests)
        self._guard(self._write, memoryview(seal), len(self.plan.header) + slot.begin)
        self._guard(self._publish)
        self._release()
        return self.path

    def _publish(self) -> None:
        os.fsync(self._fd)
        os.replace(self.part, self.path)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        self.journal.unlink(missing_ok=True)

    def _fill_pads(self) -> None:
        while (slot := self.plan.slots[len(self._digests)]).name.startswith(PAD_PREFIX):
            zeros, digest = bytes(slot.end - slot.begin), tensor_digest()
            digest.update(zeros)
            self._guard(self._write, memoryview(zeros), len(self.plan.header) + slot.begin)
            self._finished(slot, digest.digest())

    def _write(self, view: memoryview, offset: int) -> None:
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def _finished(self, slot: Slot, digest: bytes) -> None:
        self._digests.append(digest)
        self._unsynced += slot.end - slot.begin
        if self._unsynced >= SYNC_BYTES:
            self._guard(self._sync)

    def _sync(self) -> None:
        """Data first, then the journal lines that vouch for it."""
        lines = [_journal_line(self.plan.slots[i].name, self._digests[i])
                 for i in range(self._journalled, len(self._digests))]
        os.fdatasync(self._fd)
        _append_synced(self.journal, "".join(lines))
        self._journalled, self._unsynced = len(self._digests), 0

    def _lock(self) -> int:
        """Open and lock the part file; the lock must be on the file that still has that name."""
        try:
            fd = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as err:
            raise PackError(f"cannot write {self.part}: {err.strerror}; choose a directory you can write to") from None
        problem = f"{self.part} is being written by another process; wait for it or choose another name"
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(self.part).st_ino:
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError as err:
            problem = f"cannot lock {self.part}: {err.strerror}; choose a directory on a local disk"
        os.close(fd)
        raise PackError(problem)

    def _recover(self) -> None:
        """Keep the longest prefix of tensors that journal and bytes agree on; start over where there is none."""
        lines = _read_lines(self.journal)
        start = len(self.plan.header)
        keep = 0
        if lines[:1] == [self._first_line] and os.pread(self._fd, start, 0) == self.plan.header:
            keep = len(lines[0])
            for slot, line in zip(self.plan.slots[:-1], lines[1:], strict=False):
                digest = _hash_range(self._fd, start + slot.begin, start + slot.end)
                if line != _journal_line(slot.name, digest):
                    break
                self._digests.append(digest)
                keep += len(line)
        self._journalled = len(self._digests)
        if keep:
            os.truncate(self.journal, keep)
            os.ftruncate(self._fd, self.done_bytes)
            return
        self._start_over()

    def _start_over(self) -> None:
        """In an order that leaves, wherever it is cut off, an empty part file or one with a journal of ours."""
        os.ftruncate(self._fd, 0)
        os.fdatasync(self._fd)
        self.journal.unlink(missing_ok=True)
        _append_synced(self.journal, self._first_line)
        self._write(memoryview(self.plan.header), 0)

    def _guard(self, step: Callable[..., None], *args: Any) -> None:
        """Run a step that touches the disk; its OSError becomes one line that says what to do."""
        try:
            step(*args)
        except OSError as err:
            self._refused = True
            if err.errno not in _HOPELESS:
                raise PackError(f"cannot write {self.part}: {err.strerror}; run it again to go on from there once "
                                "the disk takes writes, or choose another place") from None
            needed, free = self.plan.total_bytes - self.done_bytes, _free_bytes(self.path)
            self._discard()
            raise PackError(f"cannot write {self.part}: {err.strerror}; {needed} more bytes are needed, {free} are "
                            "free; make room or choose another place, then run it again") from None

    def _discard(self) -> None:
        for path in (self.part, self.journal):  # in this order, or what is left for a moment would look like another's
            with contextlib.suppress(OSError):
                path.unlink()
        self._digests, self._journalled, self._unsynced = [], 0, 0

    def _release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _check_target(path: Path) -> None:
    if path.is_dir():
        raise PackError(f"{path} is a directory; give the name of the pack file to write")
    if not path.parent.is_dir():
        raise PackError(f"{path.parent} is not a directory; create it before writing {path.name} there")


def _check_leftovers(part: Path, journal: Path) -> None:
    """Refuse to touch what no writer left: a part file with content but no journal, or a journal that is none."""
    lines = _read_lines(journal)
    if lines and not lines[0].startswith(_JOURNAL_START):
        raise PackError(f"{journal} is in the way and no journal of a conversion; move it or choose another name")
    if not lines and part.is_file() and part.stat().st_size:
        raise PackError(f"{part} is in the way: no journal beside it says that a conversion left it; "
                        "move it or choose another name")


def _check_space(path: Path, part: Path, total_bytes: int) -> None:
    with contextlib.suppress(OSError):
        total_bytes -= part.stat().st_size
    free = _free_bytes(path)
    if free < total_bytes:
        raise PackError(f"cannot write {path}: {total_bytes} more bytes are needed, {free} are free; "
                        "make room or choose another place")


def _free_bytes(path: Path) -> int:
    stats = os.statvfs(path.parent)
    return stats.f_bavail * stats.f_frsize


def _journal_line(name: str, digest: bytes) -> str:
    return json.dumps({"tensor": name, "blake2b": digest.hex()}) + "\n"


def _read_lines(journal: Path) -> list[str]:
    try:
        return journal.read_text(encoding="ascii", errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as err:
        raise PackError(f"cannot read {journal}: {err.strerror}; choose another name") from None


def _append_synced(journal: Path, text: str) -> None:
    with open(journal, "a", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _hash_range(fd: int, begin: int, end: int) -> bytes:
    digest, buffer = tensor_digest(), bytearray(4 << 20)
    while begin < end:
        got = os.preadv(fd, [memoryview(buffer)[:min(len(buffer), end - begin)]], begin)
        if not got:
            break
        digest.update(memoryview(buffer)[:got])
        begin += got
    return digest.digest()


def read_back(path: Path, progress: Progress | None, total: int) -> None:
    """Check a pack that has just been written, the second half of `total` bytes of work. Raises PackError, and the file is gone
    then: nobody takes it for a whole one."""
    report = progress and (lambda done, _, name: progress(total // 2 + done, total, name))
    try:
        with Pack.open(path) as pack:
            pack.check(report or None)
    except PackError:
        path.unlink()
        raise
    if progress:
        progress(total, total, "done")
