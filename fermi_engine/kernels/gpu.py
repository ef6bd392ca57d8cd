"""The device protocol: what the engine asks of a GPU.

`emulated` runs the kernels on the CPU under Fermi's rules, `cuda` on a card. All work is asynchronous on explicit streams;
the host waits by `synchronize` only. One thread at a time may use a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fermi_engine.errors import DeviceError

Dim = tuple[int, int, int]

FAULT_KINDS = ("alloc", "pinned", "copy", "launch")


@dataclass(frozen=True)
class DeviceBuffer:
    """Device memory: address, size in bytes, and a name for messages."""

    address: int
    nbytes: int
    name: str

    def at(self, offset: int) -> int:
        """Address of byte `offset`. ValueError outside the buffer (its end is allowed)."""
        if not 0 <= offset <= self.nbytes:
            raise ValueError(f"byte {offset} of buffer {self.name!r}, which has {self.nbytes}")
        return self.address + offset


@dataclass(frozen=True)
class Work:
    """What a launch has to do, for clocks and timelines: floating-point operations and bytes of device memory."""

    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Span:
    """One operation of a trace: what, on which stream and engine (h2d, d2h, compute), from when to when in seconds."""

    label: str
    stream: str
    engine: str
    begin_s: float
    end_s: float
    nbytes: int = 0


@dataclass
class Recording:
    """Launches that were checked when they were recorded: `rows` as their device keeps them."""

    rows: list[Any] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)


class Event(Protocol):
    """A point in a stream. Waiting for an event that was never recorded is no wait, as in CUDA."""

    def record(self, stream: Stream) -> None:
        """Take the present end of `stream`; an earlier record is forgotten."""

    def synchronize(self) -> None:
        """Hold the host until the recorded point is reached."""

    def seconds_since(self, earlier: Event) -> float:
        """Time between two recorded and reached points."""


class Stream(Protocol):
    """Operations that run in the order they were given."""

    name: str

    def wait(self, event: Event) -> None:
        """Hold all later operations of this stream until the point `event` now stands for."""

    def synchronize(self) -> None:
        """Hold the host until every operation given so far is done."""


class Device(Protocol):
    """A GPU. Every method raises DeviceError, naming the operation, its size and the driver's code, when a call fails."""

    name: str
    total_bytes: int
    multiprocessors: int
    faults: Faults

    @property
    def free_bytes(self) -> int:
        """Device memory that is not allocated."""

    def alloc(self, nbytes: int, name: str = "buffer") -> DeviceBuffer:
        """Device memory, aligned to 256 bytes, content undefined. DeviceMemoryError when it is not there."""

    def free(self, buffer: DeviceBuffer) -> None:
        """Give memory back; no operation that uses it may be under way."""

    def pinned(self, nbytes: int) -> np.ndarray:
        """Page-locked host memory, uint8 [nbytes], freed by `unpin`. DeviceMemoryError when the system refuses."""

    def pin(self, array: np.ndarray) -> None:
        """Page-lock existing C-contiguous memory until `unpin`. DeviceMemoryError when the system refuses."""

    def unpin(self, array: np.ndarray) -> None:
        """Undo `pinned` or `pin`; no copy that uses it may be under way."""

    def stream(self, name: str) -> Stream:
        """A new stream that waits for no other."""

    def event(self) -> Event:
        """A new event."""

    def h2d(self, dst: DeviceBuffer, src: np.ndarray, stream: Stream, offset: int = 0, label: str = "") -> None:
        """Copy all of C-contiguous `src` to byte `offset` of `dst`. From pinned memory this returns at once and `src` must
        stay as it is until the copy is done; pageable memory is read before the call returns."""

    def d2h(self, dst: np.ndarray, src: DeviceBuffer, stream: Stream, offset: int = 0, label: str = "") -> None:
        """Fill C-contiguous `dst` from byte `offset` of `src`. Into pinned memory this returns at once; with pageable memory
        the call returns when the stream has reached and finished the copy."""

    def d2d(self, dst: DeviceBuffer, src: DeviceBuffer, nbytes: int, stream: Stream, dst_offset: int = 0,
            src_offset: int = 0, label: str = "") -> None:
        """Copy `nbytes` bytes on the device; the two areas must not overlap."""

    def memset(self, dst: DeviceBuffer, value: int, nbytes: int, stream: Stream, offset: int = 0) -> None:
        """Set `nbytes` bytes from byte `offset` on to `value` (0..255)."""

    def launch(self, entry: str, grid: Dim, block: Dim, args: Mapping[str, Any], stream: Stream, shared_bytes: int = 0,
               work: Work | None = None, label: str = "") -> None:
        """Run an entry point of ops.h. `args` has every field of its struct; pointers are buffers, addresses or None."""

    def record(self) -> AbstractContextManager[Recording]:
        """Launches given within are checked and kept, on no stream, instead of run; nothing else may be given within."""

    def replay(self, recording: Recording, stream: Stream) -> None:
        """Run what was recorded, in order. The buffers that its arguments lie in must still be there."""

    def sgemm(self, m: int, n: int, k: int, a: DeviceBuffer | int, b: DeviceBuffer | int, c: DeviceBuffer | int,
              stream: Stream, b_transposed: bool = True, lda: int | None = None, ldb: int | None = None,
              ldc: int | None = None) -> None:
        """The vendor's float32 product, row-major: c [m, n] = a [m, k] times b [k, n], or times the transpose of b [n, k].
        lda, ldb, ldc: floats from row to row (default: dense). Its bits may differ between cards and sizes."""

    def vendor(self) -> str:
        """Name and version of the library behind `sgemm`. DeviceError, one line with the remedy, when none works here."""

    def start_trace(self) -> None:
        """Record a Span for every operation from now on."""

    def end_trace(self) -> list[Span]:
        """Wait for the device and return the spans, ordered by begin; times count from `start_trace`."""

    def facts(self) -> dict[str, str]:
        """What a report says about this device: label -> text."""

    def synchronize(self) -> None:
        """Hold the host until the device is idle."""

    def close(self) -> None:
        """Wait, then free everything. Later calls fail."""


@dataclass
class Faults:
    """Failures on demand, for tests: `fail("alloc", 3)` makes the third allocation from now on fail, once."""

    _due: dict[str, set[int]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)

    def fail(self, kind: str, nth: int = 1) -> None:
        """Let the nth (from 1) call of `kind` from now on fail. Kinds: alloc, pinned, copy, launch."""
        if kind not in FAULT_KINDS or nth < 1:
            raise ValueError(f"no such fault: {kind} {nth}")
        self._due.setdefault(kind, set()).add(self.calls[kind] + nth)

    def due(self, kind: str) -> bool:
        """Count a call of `kind`; True if it is to fail."""
        self.calls[kind] += 1
        return self.calls[kind] in self._due.get(kind, ())

    def due_within(self, kind: str, count: int) -> int | None:
        """Count so many calls of `kind`; the index of the first that is to fail, behind which none is counted, or None."""
        before = self.calls[kind]
        failing = [nth - before for nth in self._due.get(kind, ()) if before < nth <= before + count]
        self.calls[kind] += min(failing, default=count)
        return min(failing) - 1 if failing else None


def open_device(kind: str, **options: Any) -> Device:
    """`cuda` (options: ordinal) or `emulated` (options of EmulatedDevice), imported only when chosen.

    A card has to pass the self-test first. Raises DeviceError when the kind is unknown, cannot run here or fails it.
    """
    if kind == "emulated":
        from fermi_engine.kernels.emulated import EmulatedDevice

        return EmulatedDevice(**options)
    if kind == "cuda":
        from fermi_engine.kernels import selftest
        from fermi_engine.kernels.cuda import CudaDevice

        device = CudaDevice(**options)
        selftest.check(device)
        return device
    raise DeviceError(f"unknown device {kind!r}; there are cuda and emulated")
