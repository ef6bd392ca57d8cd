"""Host memory that is kept rather than worked on: where it comes from, how it is filled, and what is the same piece of it."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

COPY_THREADS = 8  # at most: more do not make memory faster
COPY_BYTES = 1 << 22  # below that a copy is not worth a thread
LARGE_BYTES = 1 << 22  # from which on NumPy asks for huge pages

Allocate = Callable[..., np.ndarray]  # of a shape and a type


def allocate(shape: tuple[int, ...], dtype: Any = np.float32, at_once: bool = True) -> np.ndarray:
    """Memory that is kept, with undefined content; all of what snapshots take comes from here.

    Large pieces come from the system in small pages: NumPy would ask for huge ones, for which a machine whose memory is full of
    files moves them about first (measured: 0.03 to 0.5 s for 66 MB, here 0.03 to 0.06 s), and that only pays off for memory that
    is worked on. at_once: now, which is the faster way; else when it is written.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < LARGE_BYTES:
        return np.empty(shape, dtype)
    populate = getattr(mmap, "MAP_POPULATE", 0) if at_once else 0
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate)
    return np.frombuffer(memory, dtype).reshape(shape)


def copied(array: np.ndarray) -> np.ndarray:
    """A copy in such memory."""
    copy = allocate(array.shape, array.dtype)
    copy[...] = array
    return copy


def memory_of(arrays: Iterable[np.ndarray]) -> dict[int, int]:
    """Bytes of what the arrays lie in, by identity: views of one allocation are that one."""
    found: dict[int, int] = {}
    for array in arrays:
        while isinstance(array.base, np.ndarray):
            array = array.base
        found[id(array)] = array.nbytes
    return found


def copy_arrays(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """(to, from) each, by as many threads as memory can use that was written before."""
    pairs, count = list(pairs), _copy_threads()
    if sum(target.nbytes for target, _ in pairs) < COPY_BYTES or count < 2:
        copy_some(pairs)
    else:
        list(copiers().map(copy_some, [pairs[which::count] for which in range(count)]))


def copy_some(pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """The same by the calling thread."""
    for target, source in pairs:
        np.copyto(target, source)


def _copy_threads() -> int:
    return min(COPY_THREADS, len(os.sched_getaffinity(0)))


@cache
def copiers() -> ThreadPoolExecutor:
    """Threads that copy."""
    return ThreadPoolExecutor(_copy_threads(), "copy")
