"""A device on the CPU: the kernels of csrc/sm20 run by csrc/emulator, memory between guard zones, adversarial streams.

Memory is poisoned when it is allocated and when it is freed, and watched: a write beside a buffer is found after the launch
that did it, a write to a freed buffer when the device is synchronised or closed. Copies from pageable memory read the source
when they are given, as CUDA does by staging it; copies to pageable memory are finished when the call returns, as CUDA's are.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from fermi_engine.errors import DeviceError
from fermi_engine.kernels import emulator_build, sm20
from fermi_engine.kernels.checked_device import MAX_THREADS, CheckedDevice, launch_text
from fermi_engine.kernels.gpu import DeviceBuffer, Dim, Span, Work
from fermi_engine.kernels.schedule import EmulatedEvent, EmulatedStream, Operation, Rates, Scheduler

ALIGNMENT = 256
GUARD_BYTES = 1024  # on either side of a buffer
GUARD, FRESH, FREED = 0x7FED7FED, 0x7FCE7FCE, 0x7FDD7FDD  # NaN as float and as half
C2075_BYTES, C2075_MULTIPROCESSORS = 6 << 30, 14
KEPT_FREED_BYTES = 256 << 20  # freed memory that is watched before the host gets it back
MESSAGE_BYTES = 1024


class _Memory:
    """A device allocation in host memory: [guard | data | guard]."""

    def __init__(self, nbytes: int, name: str, guard: int) -> None:
        padded = -(-nbytes // 4) * 4
        self.raw = np.empty(padded + 2 * guard + ALIGNMENT, np.uint8)
        start = -(self.raw.ctypes.data + guard) % ALIGNMENT + guard
        self.nbytes, self.name, self.guard = nbytes, name, guard
        self.address = self.raw.ctypes.data + start
        self.data = self.raw[start : start + nbytes]
        for first, end in ((start - guard, start), (start + nbytes // 4 * 4, start + padded + guard)):
            self.raw[first:end].view(np.uint32)[:] = GUARD
        self.poison(FRESH)

    def poison(self, pattern: int) -> None:
        whole = self.nbytes // 4 * 4
        self.data[:whole].view(np.uint32)[:] = pattern
        self.data[whole:] = np.frombuffer(np.uint32(pattern).tobytes(), np.uint8)[: self.nbytes - whole]

    def is_poison(self, pattern: int) -> bool:
        whole = self.nbytes // 4 * 4
        return bool((self.data[:whole].view(np.uint32) == pattern).all())

    @property
    def guards(self) -> tuple[int, int]:
        """Addresses of the two guard zones."""
        return self.address - self.guard, self.address + self.nbytes


class EmulatedDevice(CheckedDevice):
    """See gpu.Device. `seed` None: every operation at once, blocks and threads in rising order; else both are shuffled.

    mode: `plain`; `checked` also finds races within and between blocks, and every access outside a live buffer, a shared
    array or its alignment (10 to 50 times slower); `asan` is for a process that runs under AddressSanitizer.
    """

    def __init__(self, total_bytes: int = C2075_BYTES, seed: int | None = None, mode: str = "plain",
                 rates: Rates | None = None) -> None:
        if mode not in emulator_build.MODES:
            raise ValueError(f"no emulator mode {mode!r}; there are {', '.join(emulator_build.MODES)}")
        super().__init__("emulated sm_20", total_bytes, C2075_MULTIPROCESSORS)
        self.mode, self.seed = mode, seed
        self._scheduler = Scheduler(seed, rates or Rates(), self._alive)
        self._guard = 0 if mode == "asan" else GUARD_BYTES
        self._memory: dict[int, _Memory] = {}
        self._freed: list[_Memory] = []
        self._used = 0
        self._launches = 0
        self._epoch = 1
        self._broken: str | None = None
        self._tables: Any = None  # what launches hand over about memory; made anew after each change

    # memory

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self._used

    def _alloc(self, nbytes: int, name: str) -> int:
        self._alive()
        rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if rounded > self.free_bytes:
            raise self._no_memory(nbytes, name, "out of memory")
        memory = _Memory(nbytes, name, self._guard)
        self._memory[memory.address] = memory
        self._used += rounded
        self._tables = None
        return memory.address

    def _free(self, buffer: DeviceBuffer) -> None:
        self._unused(buffer.address, f"free of {buffer.name!r}")
        memory = self._memory.pop(buffer.address)
        self._used -= -(-memory.nbytes // ALIGNMENT) * ALIGNMENT
        memory.poison(FREED)
        self._freed.append(memory)
        while sum(m.nbytes for m in self._freed) > KEPT_FREED_BYTES:
            self._check_freed(self._freed.pop(0))
        self._tables = None

    def _unused(self, address: int, what: str) -> None:
        for operation in self._scheduler.pending():
            if address in operation.arrays or any(b.address == address for b in operation.buffers):
                raise DeviceError(f"{what} while {operation.label!r} on stream {operation.stream.name!r} is under way")

    def _pinned(self, nbytes: int) -> tuple[np.ndarray, Any]:
        memory = _Memory(nbytes, "pinned", self._guard)
        return memory.data, memory

    def _pin(self, array: np.ndarray) -> Any:
        return array

    def _unpin(self, address: int, owner: Any) -> None:
        self._unused(address, "unpin")

    def view(self, address: int, nbytes: int) -> np.ndarray:
        """The bytes of device memory from `address` on, for tests."""
        buffer = self.holder(address)
        if buffer is None or address + nbytes > buffer.address + buffer.nbytes:
            raise ValueError(f"{nbytes} bytes at {address:#x} lie in no buffer")
        first = address - buffer.address
        return self._memory[buffer.address].data[first : first + nbytes]

    # streams

    def stream(self, name: str) -> EmulatedStream:
        return self._scheduler.stream(name)

    def event(self) -> EmulatedEvent:
        return EmulatedEvent(self._scheduler)

    def _give(self, stream: EmulatedStream, label: str, run: Any, engine: str, seconds: float, nbytes: int,
              addresses: tuple[int, ...], array: np.ndarray | None = None) -> Operation:
        buffers = tuple(b for b in map(self.holder, addresses) if b is not None)
        pinned = self.page_locked(array) if array is not None else None
        return self._scheduler.give(stream, label, run, engine=engine, seconds=seconds, nbytes=nbytes, buffers=buffers,
                                    arrays=() if pinned is None else (pinned,))

    def _h2d(self, address: int, src: np.ndarray, stream: EmulatedStream, label: str) -> None:
        source = _bytes(src if self.page_locked(src) is not None else src.copy())
        self._give(stream, label, lambda: self._copy(self.view(address, source.nbytes), source), "h2d",
                   src.nbytes / self._scheduler.rates.h2d, src.nbytes, (address,), src)

    def _d2h(self, dst: np.ndarray, address: int, stream: EmulatedStream, label: str) -> None:
        target = _bytes(dst)
        self._give(stream, label, lambda: self._copy(target, self.view(address, target.nbytes)), "d2h",
                   dst.nbytes / self._scheduler.rates.d2h, dst.nbytes, (address,), dst)
        if self.page_locked(dst) is None:
            stream.synchronize()

    def _d2d(self, dst: int, src: int, nbytes: int, stream: EmulatedStream, label: str) -> None:
        self._give(stream, label, lambda: self._copy(self.view(dst, nbytes), self.view(src, nbytes)), "compute",
                   2 * nbytes / self._scheduler.rates.memory, nbytes, (dst, src))

    def _memset(self, address: int, value: int, nbytes: int, stream: EmulatedStream, label: str) -> None:
        self._give(stream, label, lambda: self.view(address, nbytes).fill(value), "compute",
                   nbytes / self._scheduler.rates.memory, nbytes, (address,))

    @staticmethod
    def _copy(target: np.ndarray, source: np.ndarray) -> None:
        target[:] = source

    def synchronize(self) -> None:
        self._alive()
        self._scheduler.drain()
        for memory in self._freed:
            self._check_freed(memory)

    def start_trace(self) -> None:
        self.synchronize()
        self._scheduler.trace = []
        self._trace_start_s = self._scheduler.host_s

    def end_trace(self) -> list[Span]:
        self.synchronize()
        spans, self._scheduler.trace = self._scheduler.trace or [], None
        start = self._trace_start_s
        moved = [Span(s.label, s.stream, s.engine, s.begin_s - start, s.end_s - start, s.nbytes) for s in spans]
        return sorted(moved, key=lambda span: span.begin_s)

    def vendor(self) -> str:
        self._alive()
        return f"NumPy {np.__version__}"

    def facts(self) -> dict[str, str]:
        return {"device": self.name, "kernels": f"compiled for the CPU by {emulator_build.compiler()[1]}, mode {self.mode}",
                "vendor sgemm": self.vendor()}

    def close(self) -> None:
        if self._broken is None:
            self.synchronize()
        self._broken = "the device is closed"
        self._memory.clear()
        self._buffers.clear()
        self._addresses.clear()
        self._page_locked.clear()

    # launches

    def _needs(self, entry: sm20.Entry) -> tuple[int, int]:
        return _needs(entry, self.mode)

    def _launch(self, entry: sm20.Entry, grid: Dim, block: Dim, shared_bytes: int, packed: bytes, stream: EmulatedStream,
                work: Work, label: str) -> None:
        self._launches += 1
        seed = 0 if self.seed is None else (self.seed + 1) * 1000003 + self._launches
        rates = self._scheduler.rates
        seconds = rates.launch_s + max(work.flops / rates.flops, work.bytes / rates.memory)
        pointers = _pointers(entry.struct, packed)
        self._give(stream, label, lambda: self._run(entry, grid, block, shared_bytes, packed, seed), "compute", seconds,
                   int(work.bytes), pointers)

    def _run(self, entry: sm20.Entry, grid: Dim, block: Dim, shared_bytes: int, packed: bytes, seed: int) -> None:
        """One launch, now; DeviceError, and a device that stays broken, when the kernel breaks a rule."""
        ffi, lib = _library(entry.op, self.mode)
        request = ffi.new("fermi_request *")
        name, args = ffi.new("char[]", entry.name.encode()), ffi.new("char[]", packed)
        variables = _variables(entry, self.mode)
        ranges, areas = self._memory_tables(ffi)
        request.entry, request.args, request.args_bytes = name, args, len(packed)
        request.grid, request.block, request.dynamic_shared = grid, block, shared_bytes
        request.seed, request.epoch = seed, self._epoch
        request.variables, request.variable_count = variables, len(variables)
        request.ranges, request.range_count = ranges, len(ranges)
        message = ffi.new("char[]", MESSAGE_BYTES)
        if lib.fermi_launch(request, message, MESSAGE_BYTES):
            text = emulator_build.with_lines(ffi.string(message).decode(), entry.op, self.mode)
            self._fail(f"{launch_text(entry.name, grid, block)} failed: {text}")
        self._epoch = request.epoch
        which = ffi.new("int64_t *")
        if len(areas) and not lib.fermi_intact(areas, len(areas), self._guard, GUARD, which):
            memory = list(self._memory.values())[which[0] // 2]
            side = ("before", "behind")[which[0] % 2]
            self._fail(f"{launch_text(entry.name, grid, block)} failed: wrote {side} buffer {memory.name!r} of "
                       f"{memory.nbytes} bytes")

    def _memory_tables(self, ffi: Any) -> tuple[Any, Any]:
        """(ranges of live and freed memory by address, addresses of all guard zones)."""
        if self._tables is None:
            rows = sorted([(m, True) for m in self._memory.values()] + [(m, False) for m in self._freed],
                          key=lambda row: row[0].address)
            ranges = ffi.new("fermi_range[]", len(rows))
            for row, (memory, live) in zip(ranges, rows, strict=True):
                row.base, row.size, row.live = memory.address, memory.nbytes, live
                row.name = memory.name.encode()[:39]
            zones = [zone for memory in self._memory.values() for zone in memory.guards] if self._guard else []
            self._tables = ranges, ffi.new("uint64_t[]", zones)
        return self._tables

    def _sgemm(self, m: int, n: int, k: int, areas: list[tuple[int, int]], b_transposed: bool,
               stream: EmulatedStream) -> None:
        shapes = ((m, k), (n, k) if b_transposed else (k, n), (m, n))

        def run() -> None:
            a, b, c = (self._matrix(*area, *shape) for area, shape in zip(areas, shapes, strict=True))
            c[...] = a @ (b.T if b_transposed else b)

        self._give(stream, f"sgemm {m} x {n} x {k}", run, "compute", 2.0 * m * n * k / self._scheduler.rates.flops, 0,
                   tuple(address for address, _ in areas))

    def _matrix(self, address: int, ld: int, rows: int, columns: int) -> np.ndarray:
        floats = self.view(address, 4 * ((rows - 1) * ld + columns)).view(np.float32)
        return np.lib.stride_tricks.as_strided(floats, (rows, columns), (4 * ld, 4))

    # failures

    def _alive(self) -> None:
        if self._broken is not None:
            raise DeviceError(self._broken)

    def _fail(self, text: str) -> None:
        self._broken = text
        self._scheduler.forget()
        raise DeviceError(text)

    def _check_freed(self, memory: _Memory) -> None:
        if not memory.is_poison(FREED):
            self._fail(f"buffer {memory.name!r} of {memory.nbytes} bytes was written to after it had been freed")


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _pointers(struct: str, packed: bytes) -> tuple[int, ...]:
    """Device addresses among packed arguments."""
    return tuple(address for address in sm20.unpack_pointers(struct, packed) if address)


@functools.cache
def _declarations() -> Any:
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(sm20.plain_c((sm20.csrc() / "emulator" / "launch.h").read_text()))
    return ffi


@functools.cache
def _library(op: str, mode: str) -> tuple[Any, Any]:
    """cffi's view of an op's shared object, built when needed."""
    ffi = _declarations()
    return ffi, ffi.dlopen(str(emulator_build.build(op, mode).path))


@functools.cache
def _needs(entry: sm20.Entry, mode: str) -> tuple[int, int]:
    build = emulator_build.build(entry.op, mode)
    return sum(variable.size for variable in build.of_entry(entry.name)), build.bound(entry.name) or MAX_THREADS


@functools.cache
def _variables(entry: sm20.Entry, mode: str) -> Any:
    rows = emulator_build.build(entry.op, mode).of_entry(entry.name)
    variables = _declarations().new("fermi_shared_variable[]", len(rows))
    for variable, row in zip(variables, rows, strict=True):
        variable.offset, variable.size, variable.name = row.offset, row.size, row.name.encode()[:55]
    return variables
