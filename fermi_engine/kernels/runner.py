"""Calls of C kernels over NumPy arrays: at once, under a clock, or recorded into a Program."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from fermi_engine.errors import BackendError
from fermi_engine.kernels.dispatch import Kernel, library
from fermi_engine.kernels.program import Clock, Program
from fermi_engine.kernels.threads import default_threads, pinned


class Runner:
    """One table of C functions bound to a thread count.

    `ran` records op -> backend of each call made, so that a test can ask who really ran. `clock` adds up the time of each op
    while it is on. Inside `record()` nothing runs: the calls become a Program over the arrays they were given and returned.
    """

    def __init__(self, table: dict[str, Kernel], threads: int | None = None) -> None:
        module = library()
        self._ffi, self._lib = module.ffi, module.lib
        self._table = table
        self.threads = threads or default_threads()
        self.ran: dict[str, str] = {}
        self.clock = Clock()
        self._program: Program | None = None
        self._own_cpu: int | None = None

    def pin(self, cpus: list[int]) -> None:
        """Worker i on logical CPU cpus[i] from now on, the calling thread on cpus[0] inside `held`; all free for none.

        The workers are one pool for the process: the last call counts. Raises BackendError when the system refuses.
        """
        code = self._lib.fermi_pin(self._ffi.new("int[]", cpus), len(cpus))
        if code:
            raise BackendError(f"--pin: CPUs {cpus} are refused ({os.strerror(code)}); leave --pin out")
        self._own_cpu = cpus[0] if cpus else None

    def held(self) -> AbstractContextManager[None]:
        """Keeps the calling thread on its CPU, where `pin` gave it one."""
        return pinned(self._own_cpu)

    @contextmanager
    def record(self) -> Iterator[Program]:
        """Collect the calls made inside into a Program; their results hold nothing before it runs."""
        program = Program(self._ffi, self._lib, self.threads, self.clock)
        self._program = program
        try:
            yield program
        finally:
            self._program = None
        program.seal()

    @property
    def backends(self) -> dict[str, str]:
        """Op -> backend that serves it."""
        return {op: kernel.backend for op, kernel in self._table.items()}

    def empty(self, shape: tuple[int, ...] | int, dtype: Any = np.float32) -> np.ndarray:
        """Where every result comes from; tests replace it to poison outputs and to guard their edges."""
        return np.empty(shape, dtype)

    def _run(self, op: str, struct: str, items: int, grain: int, fields: dict[str, Any]) -> None:
        kernel = self._table[op]
        self.ran[op] = kernel.backend
        args = self._ffi.new(struct, fields)
        if self._program is not None:
            self._program.add(op, kernel.pointer, args, items, grain, fields)
        elif self.clock.on:
            with self.record() as program:
                program.add(op, kernel.pointer, args, items, grain, fields)
            program.run()
        else:
            self._lib.fermi_run(kernel.pointer, args, items, grain, self.threads)

    def _f32(self, array: np.ndarray) -> Any:
        return self._pointer(array, np.float32, "float[]")

    def _pointer(self, array: np.ndarray, dtype: Any, ctype: str) -> Any:
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise TypeError(f"kernel argument must be C-contiguous {np.dtype(dtype)}, got {array.dtype} "
                            f"with strides {array.strides}")
        if self._program is not None:
            self._program.keep(array)
        return self._ffi.from_buffer(ctype, array)

    def _i32(self, array: np.ndarray) -> Any:
        return self._pointer(array, np.int32, "int32_t[]")
