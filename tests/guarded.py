"""Kernels whose every result starts as NaN between guard bytes, at addresses no vector load likes."""

from __future__ import annotations

from typing import Any

import numpy as np

from fermi_engine.compare import Arrays
from fermi_engine.kernels import dispatch
from fermi_engine.kernels.cpu import CpuKernels

GUARD = 64
FILL = 0xA5


class GuardedKernels(CpuKernels):
    """CpuKernels over poisoned, guarded memory. `grain`: items a thread takes at a time, in place of each op's own."""

    def __init__(self, backend: str, threads: int = 1, grain: int | None = None) -> None:
        super().__init__(dispatch.table(backend), threads)
        self._grain = grain
        self._guards: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...] | int, dtype: Any = np.float32) -> np.ndarray:
        """NaN, or the lowest integer, everywhere."""
        array, *guards = guarded(shape, dtype)
        self._guards += guards
        array[...] = np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).min
        return array

    def _run(self, op: str, struct: str, items: int, grain: int, fields: dict[str, Any]) -> None:
        super()._run(op, struct, items, self._grain or grain, fields)

    def overruns(self) -> int:
        """Guard bytes that changed."""
        return sum(int((guard != FILL).sum()) for guard in self._guards)


def guarded(shape: tuple[int, ...] | int, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An array that starts one element past a multiple of 64 bytes, and the guard bytes before and after it."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.full(3 * GUARD + dtype.itemsize + size, FILL, np.uint8)
    start = GUARD + -memory.ctypes.data % 64 + dtype.itemsize
    array = memory[start:start + size].view(dtype).reshape(shape)
    return array, memory[:start], memory[start + size:]


def misplaced(arrays: Arrays) -> Arrays:
    """Copies of inputs at such addresses."""
    copies = {}
    for name, array in arrays.items():
        copies[name] = guarded(array.shape, array.dtype)[0]
        copies[name][...] = array
    return copies
