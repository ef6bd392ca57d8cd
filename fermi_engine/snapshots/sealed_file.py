"""Arrays and text in one safetensors file that proves every byte of itself: the layout of packs, their seal included.

The last tensor, `_seal`, holds a blake2b digest of every other tensor and one over the header and those digests. A file is read
through one descriptor, which stays good when another process replaces or removes the name. No mmap: a file that is cut short
under a mapping kills the reader.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fermi_engine.errors import SnapshotError
from fermi_engine.pack import DIGEST_BYTES, PAD_PREFIX, SEAL, seal_digest, tensor_digest
from fermi_engine.pack_writer import PackPlan, Wanted
from fermi_engine.safetensors_header import Entry, header_of

CHUNK_BYTES = 4 << 20  # read or written at a time and hashed while still in the cache
_DTYPES = {np.dtype(np.uint8): "U8", np.dtype(np.int32): "I32", np.dtype(np.float32): "F32"}
READERS = 4  # threads that read and hash: hashing is slower than reading


class Tensor(NamedTuple):
    """dtype "U8", "I32" or "F32"; `parts`, which can be gone through more than once, are contiguous arrays whose bytes, one after
    the other, are the tensor's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Iterable[np.ndarray]

    def views(self) -> Iterator[memoryview]:
        """The bytes, in pieces of at most CHUNK_BYTES; writing to them writes to `parts`."""
        for part in self.parts:
            if part.size:
                whole = memoryview(part).cast("B")
                for begin in range(0, len(whole), CHUNK_BYTES):
                    yield whole[begin : begin + CHUNK_BYTES]


def tensor(name: str, array: np.ndarray) -> Tensor:
    """A contiguous array (uint8, int32 or float32) as a tensor of its own shape."""
    return Tensor(name, _DTYPES[array.dtype], array.shape, (array,))


def plan(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> PackPlan:
    """Header and places of a file of these tensors."""
    return PackPlan.build([Wanted(t.name, t.dtype, t.shape) for t in tensors], metadata)


def write(fd: int, planned: PackPlan, tensors: Sequence[Tensor]) -> None:
    """Write the file that `plan` has planned, from its first byte to its seal. OSError where the disk refuses."""
    views = {t.name: t for t in tensors}
    _write(fd, memoryview(planned.header), 0)
    digests = b""
    for slot in planned.slots[:-1]:
        digest, position = tensor_digest(), len(planned.header) + slot.begin
        zeros = Tensor(slot.name, "U8", slot.shape, (np.zeros(slot.end - slot.begin, np.uint8),))  # of a pad
        for view in (zeros if slot.name.startswith(PAD_PREFIX) else views[slot.name]).views():
            digest.update(view)
            _write(fd, view, position)
            position += len(view)
        assert position == len(planned.header) + slot.end, slot.name
        digests += digest.digest()
    seal = digests + seal_digest(planned.header, digests)
    _write(fd, memoryview(seal), len(planned.header) + planned.slots[-1].begin)


def _write(fd: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


@dataclass(frozen=True)
class SealedFile:
    """An open file whose header and seal fit each other; its tensors are proven as they are read. A context manager."""

    path: Path
    fd: int
    metadata: dict[str, str]
    entries: dict[str, Entry]  # of all tensors but pads and seal
    _all: dict[str, Entry]
    _digests: dict[str, bytes]
    _start: int

    @classmethod
    def open(cls, path: Path) -> SealedFile:
        """Raises FileNotFoundError for no file; SnapshotError, one line, for anything that is not whole or no regular file of
        this name (a link is not followed); OSError where it cannot be read."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise SnapshotError(f"{path} is no regular file")
            return cls._read(path, fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def _read(cls, path: Path, fd: int) -> SealedFile:
        with open(fd, "rb", buffering=0, closefd=False) as file:
            header = header_of(file, path, SnapshotError)
        count = len(header.tensors) - 1
        found = header.tensors.get(SEAL)
        if found is None or found.end - found.begin != DIGEST_BYTES * (count + 1):
            raise SnapshotError(f"{path} has no seal: it is no file of this engine's")
        raw = os.pread(fd, header.data_start, 0)
        seal = os.pread(fd, found.end - found.begin, header.data_start + found.begin)
        digests, last = seal[:-DIGEST_BYTES], seal[-DIGEST_BYTES:]
        if last != seal_digest(raw, digests):
            raise SnapshotError(f"{path} is damaged: its seal does not fit its header")
        names = sorted((name for name in header.tensors if name != SEAL), key=lambda name: header.tensors[name][2:])
        by_name = {name: digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES] for i, name in enumerate(names)}
        entries = {name: header.tensors[name] for name in names if not name.startswith(PAD_PREFIX)}
        return cls(path, fd, header.metadata, entries, header.tensors, by_name, header.data_start)

    def __enter__(self) -> SealedFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Fill the parts of `tensors`, which must be all of the file's, with their dtypes and shapes.

        Raises SnapshotError when they are not or a byte is wrong; the parts hold anything then. OSError as `open`.
        """
        wanted = {t.name: (t.dtype, t.shape) for t in tensors}
        found = {name: (entry.dtype, entry.shape) for name, entry in self.entries.items()}
        for name in (*wanted, *found):
            if wanted.get(name) != found.get(name):
                raise SnapshotError(f"{self.path}: tensor {name} is {_words(found.get(name))}, "
                                    f"expected {_words(wanted.get(name))}")
        pads = [Tensor(name, "U8", entry.shape, (np.empty(entry.shape, np.uint8),))
                for name, entry in self._all.items() if name.startswith(PAD_PREFIX)]
        if sum(entry.end - entry.begin for entry in self._all.values()) <= CHUNK_BYTES:  # not worth a thread
            for t in (*tensors, *pads):
                self._fill(t)
            return
        with ThreadPoolExecutor(READERS) as readers:
            for _ in readers.map(self._fill, (*tensors, *pads)):
                pass

    def _fill(self, t: Tensor) -> None:
        digest, position = tensor_digest(), self._start + self._all[t.name].begin
        for view in t.views():
            while view:
                got = os.preadv(self.fd, [view], position)
                if not got:
                    raise SnapshotError(f"{self.path} became shorter while it was read")
                digest.update(view[:got])
                view, position = view[got:], position + got
        if digest.digest() != self._digests[t.name]:
            raise SnapshotError(f"{self.path} is damaged: tensor {t.name} does not match its digest")


def _words(kind: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if kind is None else f"{kind[0]} {list(kind[1])}"
