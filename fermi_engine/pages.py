"""Pages of memory and the system calls about them: which node they lie on, in what size, whether they are there at all.

The system calls themselves: libnuma adds a library that may be absent and turns their errors into text on stderr.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator

import numpy as np

PAGE, HUGE_PAGE = 4096, 2 << 20
PIECE = 64 << 20  # bytes between two calls of progress: Ctrl-C waits no longer than one of them takes
DEFAULT, PREFERRED, INTERLEAVE = 0, 1, 3  # MPOL_*
MODE_MASK = 0xff  # above it get_mempolicy adds flags
MEMS_ALLOWED, MOVE = 4, 2  # MPOL_F_MEMS_ALLOWED, MPOL_MF_MOVE
HUGEPAGE, POPULATE_READ, DONTNEED = 14, 22, 4  # MADV_*
SYSTEM_CALLS = {"mprotect": 10, "mincore": 27, "madvise": 28, "mlock": 149, "munlock": 150, "set_mempolicy": 238,
                "get_mempolicy": 239, "move_pages": 279}
MOST_NODES = 1024


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


def pieces(length: int) -> Iterator[tuple[int, int]]:
    """`length` bytes as (begin, end), in pieces after each of which progress is told."""
    for at in range(0, length, PIECE):
        yield at, min(at + PIECE, length)


def touch(data: np.ndarray, offsets: np.ndarray) -> None:
    """Map the pages at these offsets."""
    data[offsets].max(initial=0)
