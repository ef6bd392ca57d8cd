"""Program: a recorded list of kernel calls that runs as one call into C, and the clock that adds up the time of each op.

A decoded token is about a thousand calls of a few microseconds each; made one at a time from Python they would cost more
than the smaller half of them.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np


class Clock:
    """Seconds by op, and from `start` to `read`, while on."""

    def __init__(self) -> None:
        self.on = False
        self._seconds: dict[str, float] = {}
        self._began = 0.0

    def start(self) -> None:
        """Forget what was measured and go on from zero."""
        self._seconds, self.on, self._began = {}, True, time.perf_counter()

    def stop(self) -> tuple[dict[str, float], float]:
        """Op -> seconds, longest first, and the seconds since `start`; what is missing to them is Python's."""
        self.on = False
        wall = time.perf_counter() - self._began
        return dict(sorted(self._seconds.items(), key=lambda item: -item[1])), wall

    def add(self, ops: list[str], elapsed_ns: np.ndarray) -> None:
        """Count one run: nanoseconds of each step."""
        for op, ns in zip(ops, elapsed_ns.tolist(), strict=True):
            self._seconds[op] = self._seconds.get(op, 0.0) + ns * 1e-9


class Program:
    """Steps over fixed arrays. To run it on other values, write them into the arrays that were recorded."""

    def __init__(self, ffi: Any, lib: Any, threads: int, clock: Clock) -> None:
        self._ffi, self._lib, self._threads, self._clock = ffi, lib, threads, clock
        self.ops: list[str] = []
        self._rows: list[tuple[Any, Any, int, int]] = []
        self._alive: list[Any] = []  # arguments and every array they point into
        self._steps: Any = None

    def add(self, op: str, pointer: Any, args: Any, items: int, grain: int, fields: dict[str, Any]) -> None:
        """One more step; `fields` are the values that `args` was made of, some of which it points to."""
        self.ops.append(op)
        self._rows.append((pointer, args, items, grain))
        self._alive.append((args, fields))

    def keep(self, array: np.ndarray) -> None:
        """Hold on to an array that a step points into."""
        self._alive.append(array)

    def seal(self) -> None:
        """Make the list that C reads."""
        self._steps = self._ffi.new("fermi_step[]", self._rows)

    def run(self) -> None:
        """Run all steps in order."""
        if not self._clock.on:
            self._lib.fermi_run_steps(self._steps, len(self.ops), self._threads, self._ffi.NULL)
            return
        elapsed = np.zeros(len(self.ops), np.int64)
        self._lib.fermi_run_steps(self._steps, len(self.ops), self._threads, self._ffi.from_buffer("int64_t[]", elapsed))
        self._clock.add(self.ops, elapsed)
