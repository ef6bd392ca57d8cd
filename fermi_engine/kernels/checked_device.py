"""What every device shares: checks of arguments, the limits of compute capability 2.0, failure injection."""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from fermi_engine.errors import DeviceError, DeviceMemoryError
from fermi_engine.kernels import sm20
from fermi_engine.kernels.gpu import DeviceBuffer, Dim, Faults, Recording, Stream, Work

# Compute capability 2.0, the floor: enforced on every device, so that what runs anywhere runs there.
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
MAX_GRID = 65535
MAX_SHARED_BYTES = 48 * 1024
MAX_ARGUMENT_BYTES = 4096


class CheckedDevice(ABC):
    """Argument checks, limits and failure injection; a device implements the underscored methods, whose arguments are sound.

    Wrong arguments raise ValueError or TypeError: they are defects of the caller, not of the device.
    """

    def __init__(self, name: str, total_bytes: int, multiprocessors: int) -> None:
        self.name, self.total_bytes, self.multiprocessors = name, total_bytes, multiprocessors
        self.faults = Faults()
        self.launched: Counter[str] = Counter()  # launches by entry point, so that a test can ask who really ran
        self._addresses: list[int] = []  # of _buffers, rising
        self._buffers: dict[int, DeviceBuffer] = {}
        self._page_locked: dict[int, tuple[int, Any]] = {}  # address -> (bytes, whatever keeps it)
        self._recording: Recording | None = None

    def alloc(self, nbytes: int, name: str = "buffer") -> DeviceBuffer:
        if nbytes < 1:
            raise ValueError(f"alloc of {nbytes} bytes for {name!r}")
        if self.faults.due("alloc"):
            raise self._no_memory(nbytes, name, "failure injected by a test")
        buffer = DeviceBuffer(self._alloc(nbytes, name), nbytes, name)
        bisect.insort(self._addresses, buffer.address)
        self._buffers[buffer.address] = buffer
        return buffer

    def free(self, buffer: DeviceBuffer) -> None:
        self._area(buffer, 0, 0)
        self._free(buffer)
        del self._buffers[buffer.address]
        self._addresses.remove(buffer.address)

    def pinned(self, nbytes: int) -> np.ndarray:
        if nbytes < 1:
            raise ValueError(f"{nbytes} bytes of pinned memory")
        self._pinned_fault(nbytes)
        array, owner = self._pinned(nbytes)
        self._page_locked[array.ctypes.data] = nbytes, owner
        return array

    def pin(self, array: np.ndarray) -> None:
        first, nbytes = contiguous(array).ctypes.data, array.nbytes
        if any(first < base + size and base < first + nbytes for base, (size, _) in self._page_locked.items()):
            raise DeviceError(f"page-locking {nbytes} bytes failed: some of them are page-locked already")
        self._pinned_fault(nbytes)
        self._page_locked[first] = nbytes, self._pin(array)

    def unpin(self, array: np.ndarray) -> None:
        if array.ctypes.data not in self._page_locked:
            raise ValueError("unpin of memory that is not page-locked, or not from its begin")
        self._unpin(array.ctypes.data, self._page_locked[array.ctypes.data][1])
        del self._page_locked[array.ctypes.data]

    def page_locked(self, array: np.ndarray) -> int | None:
        """Address of the page-locked memory that holds all of `array`, None for pageable memory."""
        first, end = array.ctypes.data, array.ctypes.data + array.nbytes
        return next((base for base, (size, _) in self._page_locked.items() if base <= first and end <= base + size), None)

    def h2d(self, dst: DeviceBuffer, src: np.ndarray, stream: Stream, offset: int = 0, label: str = "") -> None:
        address = self._area(dst, offset, contiguous(src).nbytes)
        self._copy_fault("h2d", src.nbytes, dst.name)
        if src.nbytes:
            self._h2d(address, src, stream, label or dst.name)

    def d2h(self, dst: np.ndarray, src: DeviceBuffer, stream: Stream, offset: int = 0, label: str = "") -> None:
        if not dst.flags.writeable:
            raise ValueError("d2h into a read-only array")
        address = self._area(src, offset, contiguous(dst).nbytes)
        self._copy_fault("d2h", dst.nbytes, src.name)
        if dst.nbytes:
            self._d2h(dst, address, stream, label or src.name)

    def d2d(self, dst: DeviceBuffer, src: DeviceBuffer, nbytes: int, stream: Stream, dst_offset: int = 0,
            src_offset: int = 0, label: str = "") -> None:
        to, come = self._area(dst, dst_offset, nbytes), self._area(src, src_offset, nbytes)
        if to < come + nbytes and come < to + nbytes:
            raise ValueError(f"d2d within {dst.name!r}: the two areas of {nbytes} bytes overlap")
        self._copy_fault("d2d", nbytes, dst.name)
        if nbytes:
            self._d2d(to, come, nbytes, stream, label or dst.name)

    def memset(self, dst: DeviceBuffer, value: int, nbytes: int, stream: Stream, offset: int = 0) -> None:
        if not 0 <= value <= 255 or self._recording is not None:
            raise ValueError(f"memset to {value}, or within record")
        address = self._area(dst, offset, nbytes)
        if nbytes:
            self._memset(address, value, nbytes, stream, f"memset {dst.name}")

    def launch(self, entry: str, grid: Dim, block: Dim, args: Mapping[str, Any], stream: Stream, shared_bytes: int = 0,
               work: Work | None = None, label: str = "") -> None:
        found = sm20.entry(entry)
        packed = sm20.pack_arguments(found.struct, args)
        for name in sm20.pointer_fields(found.struct):
            if args[name] is not None:
                self._check_pointer(entry, name, sm20.address_of(args[name]))
        check_limits(entry, grid, block, self._needs(found), shared_bytes, len(packed))
        row = found, grid, block, shared_bytes, packed, work or Work(), label or entry
        if self._recording is not None:
            self._recording.rows.append(row)
            return
        if self.faults.due("launch"):
            raise _launch_fault(row)
        self.launched[entry] += 1
        self._launch(*row[:5], stream, *row[5:])

    @contextmanager
    def record(self) -> Iterator[Recording]:
        if self._recording is not None:
            raise ValueError("record within record")
        self._recording = Recording()
        try:
            yield self._recording
        finally:
            self._recording = None

    def replay(self, recording: Recording, stream: Stream) -> None:
        failing = self.faults.due_within("launch", len(recording))
        if failing is None:
            self._counted_replay(recording, stream)
            return
        self._counted_replay(Recording(recording.rows[:failing]), stream)
        raise _launch_fault(recording.rows[failing])

    def _counted_replay(self, recording: Recording, stream: Any) -> None:
        self.launched.update(row[0].name for row in recording.rows)
        self._replay(recording, stream)

    def _replay(self, recording: Recording, stream: Any) -> None:
        for row in recording.rows:
            self._launch(*row[:5], stream, *row[5:])

    def sgemm(self, m: int, n: int, k: int, a: DeviceBuffer | int, b: DeviceBuffer | int, c: DeviceBuffer | int,
              stream: Stream, b_transposed: bool = True, lda: int | None = None, ldb: int | None = None,
              ldc: int | None = None) -> None:
        if min(m, n, k) < 1 or self._recording is not None:
            raise ValueError(f"sgemm of [{m}, {k}] and [{k}, {n}]")
        b_rows, b_columns = (n, k) if b_transposed else (k, n)
        areas = []
        for name, pointer, rows, columns, ld in (("a", a, m, k, lda), ("b", b, b_rows, b_columns, ldb), ("c", c, m, n, ldc)):
            ld = columns if ld is None else ld
            if ld < columns:
                raise ValueError(f"sgemm: rows of {name} have {columns} floats and start every {ld}")
            address = sm20.address_of(pointer)
            self._check_pointer("sgemm", name, address, 4 * ((rows - 1) * ld + columns))
            areas.append((address, ld))
        if self.faults.due("launch"):
            raise DeviceError(f"sgemm {m} x {n} x {k} failed: failure injected by a test")
        self._sgemm(m, n, k, areas, b_transposed, stream)

    def holder(self, address: int) -> DeviceBuffer | None:
        """The buffer that `address` lies in."""
        i = bisect.bisect_right(self._addresses, address) - 1
        buffer = self._buffers[self._addresses[i]] if i >= 0 else None
        return buffer if buffer and address < buffer.address + buffer.nbytes else None

    def _check_pointer(self, entry: str, argument: str, address: int, nbytes: int = 1) -> None:
        buffer = self.holder(address)
        if buffer is None:
            raise ValueError(f"{entry}: argument {argument} is {address:#x}, which lies in no buffer of the device")
        if address + nbytes > buffer.address + buffer.nbytes:
            raise ValueError(f"{entry}: argument {argument} needs {nbytes} bytes from byte {address - buffer.address} of "
                             f"{buffer.name!r}, which has {buffer.nbytes}")

    def _area(self, buffer: DeviceBuffer, offset: int, nbytes: int) -> int:
        if self._buffers.get(buffer.address) is not buffer:
            raise ValueError(f"buffer {buffer.name!r} is not, or no longer, a buffer of this device")
        if offset < 0 or nbytes < 0 or offset + nbytes > buffer.nbytes:
            raise ValueError(f"bytes {offset}..{offset + nbytes} of buffer {buffer.name!r}, which has {buffer.nbytes}")
        return buffer.address + offset

    def _pinned_fault(self, nbytes: int) -> None:
        if self.faults.due("pinned"):
            raise DeviceMemoryError(f"page-locking {nbytes} bytes failed: failure injected by a test")

    def _copy_fault(self, kind: str, nbytes: int, name: str) -> None:
        if self._recording is not None:
            raise ValueError(f"{kind} copy ({name}) within record")
        if self.faults.due("copy"):
            raise DeviceError(f"{kind} copy of {nbytes} bytes ({name}) failed: failure injected by a test")

    def _no_memory(self, nbytes: int, name: str, why: str) -> DeviceMemoryError:
        return DeviceMemoryError(f"alloc of {nbytes} bytes for {name!r} on {self.name} failed, {self.free_bytes} of "
                                 f"{self.total_bytes} are free: {why}")

    @property
    @abstractmethod
    def free_bytes(self) -> int: ...

    @abstractmethod
    def _alloc(self, nbytes: int, name: str) -> int: ...

    @abstractmethod
    def _free(self, buffer: DeviceBuffer) -> None: ...

    @abstractmethod
    def _pinned(self, nbytes: int) -> tuple[np.ndarray, Any]: ...

    @abstractmethod
    def _pin(self, array: np.ndarray) -> Any: ...

    @abstractmethod
    def _unpin(self, address: int, owner: Any) -> None: ...

    @abstractmethod
    def _h2d(self, address: int, src: np.ndarray, stream: Any, label: str) -> None: ...

    @abstractmethod
    def _d2h(self, dst: np.ndarray, address: int, stream: Any, label: str) -> None: ...

    @abstractmethod
    def _d2d(self, dst: int, src: int, nbytes: int, stream: Any, label: str) -> None: ...

    @abstractmethod
    def _memset(self, address: int, value: int, nbytes: int, stream: Any, label: str) -> None: ...

    @abstractmethod
    def _needs(self, entry: sm20.Entry) -> tuple[int, int]: ...  # bytes of static shared memory, threads a block at most

    @abstractmethod
    def _launch(self, entry: sm20.Entry, grid: Dim, block: Dim, shared_bytes: int, packed: bytes, stream: Any, work: Work,
                label: str) -> None: ...

    @abstractmethod
    def _sgemm(self, m: int, n: int, k: int, areas: list[tuple[int, int]], b_transposed: bool, stream: Any) -> None: ...


def _launch_fault(row: tuple[Any, ...]) -> DeviceError:
    return DeviceError(f"{launch_text(row[0].name, row[1], row[2])} failed: failure injected by a test")


def contiguous(array: np.ndarray) -> np.ndarray:
    """`array`. TypeError unless it is C-contiguous."""
    if not array.flags.c_contiguous:
        raise TypeError(f"a copy needs C-contiguous host memory, got strides {array.strides}")
    return array


def launch_text(entry: str, grid: Dim, block: Dim) -> str:
    """How messages name a launch."""
    return f"launch of {entry} with grid {tuple(grid)} and block {tuple(block)}"


def check_limits(entry: str, grid: Dim, block: Dim, needs: tuple[int, int], dynamic_shared: int,
                 argument_bytes: int) -> None:
    """DeviceError, naming the kernel and the number, when a launch exceeds what compute capability 2.0 takes.

    needs: the kernel's bytes of static shared memory and the threads a block it was compiled for.
    """
    excess = _excess(grid, block, needs, dynamic_shared, argument_bytes)
    if excess is not None:
        raise DeviceError(f"{launch_text(entry, grid, block)}: {excess}")


def _excess(grid: Dim, block: Dim, needs: tuple[int, int], dynamic_shared: int, argument_bytes: int) -> str | None:
    for axis, g, b, most in zip("xyz", grid, block, MAX_BLOCK, strict=True):
        if not 1 <= g <= MAX_GRID:
            return f"grid.{axis} is {g}, sm_20 takes 1..{MAX_GRID}"
        if not 1 <= b <= most:
            return f"block.{axis} is {b}, sm_20 takes 1..{most}"
    static_shared, bound = needs
    threads = block[0] * block[1] * block[2]
    if threads > MAX_THREADS:
        return f"{threads} threads a block, sm_20 takes {MAX_THREADS}"
    if threads > bound:
        return f"{threads} threads a block, the kernel is compiled for {bound}"
    if static_shared + dynamic_shared > MAX_SHARED_BYTES:
        return (f"{static_shared} bytes of static and {dynamic_shared} of dynamic shared memory, sm_20 has "
                f"{MAX_SHARED_BYTES}")
    if argument_bytes > MAX_ARGUMENT_BYTES:
        return f"{argument_bytes} bytes of arguments, sm_20 takes {MAX_ARGUMENT_BYTES}"
    return None
