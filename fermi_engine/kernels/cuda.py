"""A CUDA card through pycuda: the device protocol with nothing but driver calls that CUDA 8.0 has.

The kernels are sm_20 PTX (or a cubin); a newer card's driver compiles them when an op is first used.
"""

from __future__ import annotations

import atexit
import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fermi_engine.errors import DeviceError, DeviceMemoryError
from fermi_engine.kernels import ptx, sm20
from fermi_engine.kernels.checked_device import CheckedDevice, launch_text
from fermi_engine.kernels.cublas import Cublas
from fermi_engine.kernels.gpu import DeviceBuffer, Dim, Recording, Span, Work

RECIPE = ("install it with `pip install pycuda`; on a Fermi card with driver 390: CUDA 8.0, gcc 5, and pycuda built from source "
          "without curand (README, GPU)")
FLOOR = (2, 0)
REGISTERS = 64  # of a thread, by whose number kernels are laid out; Fermi cards have 63
REFUSALS = {1: "invalid value", 2: "out of memory", 304: "operating system call failed", 712: "page-locked already",
            801: "not supported"}  # of cuMemHostRegister, for want of memory or permission
MAX_OPERATION = 1 << 30  # older pycuda takes the byte counts of memset and device copies as 32 bits


def _pycuda() -> Any:
    """pycuda.driver. DeviceError, one line with the recipe, when it is not there or does not load."""
    try:
        import pycuda.driver as driver
    except Exception as err:  # a missing libcuda or a mismatch of versions shows as ImportError or OSError, old ones as others
        first = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise DeviceError(f"the CUDA device needs pycuda, which does not load ({first}); {RECIPE}") from None
    return driver


class _Registered:
    """Host memory that cuMemHostRegister has page-locked; calling it undoes that."""

    def __init__(self, libcuda: ctypes.CDLL, address: ctypes.c_void_p, array: np.ndarray) -> None:
        self._libcuda, self._address, self._array = libcuda, address, array

    def __call__(self) -> None:
        status = self._libcuda.cuMemHostUnregister(self._address)
        if status:
            raise DeviceError(f"unlocking {self._array.nbytes} bytes failed: cuMemHostUnregister returned {status}")


class CudaEvent:
    """See gpu.Event."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        with device.checked("creating an event"):
            self.handle = device.driver.Event()
        device.handles.add(self)
        self.recorded = False

    def record(self, stream: CudaStream) -> None:
        with self._device.checked(f"recording an event on stream {stream.name!r}"):
            self.handle.record(stream.handle)
        self.recorded = True

    def synchronize(self) -> None:
        with self._device.checked("waiting for an event"):
            self.handle.synchronize()

    def seconds_since(self, earlier: CudaEvent) -> float:
        if not (self.recorded and earlier.recorded):
            raise DeviceError("time between events that were not both recorded and reached")
        with self._device.checked("reading the time between two events"):
            return float(self.handle.time_since(earlier.handle)) * 1e-3


class CudaStream:
    """See gpu.Stream."""

    def __init__(self, device: CudaDevice, name: str) -> None:
        self.name = name
        self._device = device
        with device.checked(f"creating stream {name!r}"):
            self.handle = device.driver.Stream()
        device.handles.add(self)

    def wait(self, event: CudaEvent) -> None:
        with self._device.checked(f"making stream {self.name!r} wait"):
            self.handle.wait_for_event(event.handle)

    def synchronize(self) -> None:
        with self._device.checked(f"waiting for stream {self.name!r}"):
            self.handle.synchronize()


class CudaDevice(CheckedDevice):
    """See gpu.Device. Works in the device's primary context, which cuBLAS and others in the process share."""

    def __init__(self, ordinal: int = 0) -> None:
        self.driver = _pycuda()
        self._broken: str | None = None
        try:
            self.driver.init()
            count = self.driver.Device.count()
        except self.driver.Error as err:
            raise DeviceError(f"no usable NVIDIA driver ({err}); install one, or run on the CPU") from None
        if not 0 <= ordinal < count:
            raise DeviceError(f"there is no GPU {ordinal}: the driver lists {count}")
        card = self.driver.Device(ordinal)
        self.compute_capability = tuple(card.compute_capability())
        if self.compute_capability < FLOOR:
            raise DeviceError(f"{card.name()} has compute capability {'.'.join(map(str, self.compute_capability))}; "
                              "2.0 is the floor")
        super().__init__(card.name(), card.total_memory(), card.multiprocessor_count)
        with self.checked(f"opening GPU {ordinal}, {self.name}"):
            self._context = card.retain_primary_context()
            self._context.push()
        atexit.register(self.close)  # pycuda aborts when a context outlives it
        self.handles: weakref.WeakSet[CudaEvent | CudaStream] = weakref.WeakSet()
        self._allocations: dict[int, Any] = {}
        self._functions: dict[str, Any] = {}
        self._modules: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        self._cublas: Cublas | None = None
        self._trace: list[tuple[str, str, str, int, CudaEvent, CudaEvent]] | None = None

    @contextmanager
    def checked(self, what: str) -> Iterator[None]:
        """Turns pycuda's errors into DeviceError that names what was being done."""
        if self._broken:
            raise DeviceError(self._broken)
        try:
            yield
        except self.driver.MemoryError as err:
            raise DeviceMemoryError(f"{what} failed: {err}") from None
        except self.driver.Error as err:
            raise DeviceError(f"{what} failed: {err}") from None

    # memory

    @property
    def free_bytes(self) -> int:
        with self.checked("asking for free memory"):
            return int(self.driver.mem_get_info()[0])

    def _alloc(self, nbytes: int, name: str) -> int:
        with self.checked(f"alloc of {nbytes} bytes for {name!r} on {self.name}"):
            allocation = self.driver.mem_alloc(nbytes)
        self._allocations[int(allocation)] = allocation
        return int(allocation)

    def _free(self, buffer: DeviceBuffer) -> None:
        with self.checked(f"free of {buffer.name!r}"):
            self._allocations.pop(buffer.address).free()

    def _pinned(self, nbytes: int) -> tuple[np.ndarray, Any]:
        with self.checked(f"page-locking {nbytes} bytes"):
            array = self.driver.pagelocked_empty(nbytes, np.uint8)
        return array, array.base.free

    def _pin(self, array: np.ndarray) -> Any:
        """By libcuda itself: pycuda's register_host_memory fails with newer NumPy."""
        with self.checked(f"page-locking {array.nbytes} bytes"):
            libcuda = ctypes.CDLL("libcuda.so.1")
            address = ctypes.c_void_p(array.ctypes.data)
            status = libcuda.cuMemHostRegister_v2(address, ctypes.c_size_t(array.nbytes), ctypes.c_uint(0))
        if status:
            kind = DeviceMemoryError if status in REFUSALS else DeviceError
            raise kind(f"page-locking {array.nbytes} bytes failed: cuMemHostRegister returned {status} "
                       f"({REFUSALS.get(status, 'see the CUDA driver API')})")
        return _Registered(libcuda, address, array)

    def _unpin(self, address: int, owner: Any) -> None:
        with self.checked("unlocking host memory"):
            owner()

    # streams and copies

    def stream(self, name: str) -> CudaStream:
        return CudaStream(self, name)

    def event(self) -> CudaEvent:
        return CudaEvent(self)

    @contextmanager
    def _operation(self, what: str, label: str, engine: str, nbytes: int, stream: CudaStream) -> Iterator[None]:
        """An asynchronous call, between two events while a trace is taken."""
        begin = self._mark(stream)
        with self.checked(what):
            yield
        self._span(label, engine, nbytes, stream, begin)

    def _span(self, label: str, engine: str, nbytes: int, stream: CudaStream, begin: Any) -> None:
        if begin is not None and self._trace is not None:
            self._trace.append((label, stream.name, engine, nbytes, begin, self._mark(stream)))

    def _mark(self, stream: CudaStream) -> Any:
        if self._trace is None:
            return None
        event = self.event()
        event.record(stream)
        return event

    def _h2d(self, address: int, src: np.ndarray, stream: CudaStream, label: str) -> None:
        with self._operation(f"h2d copy of {src.nbytes} bytes ({label})", label, "h2d", src.nbytes, stream):
            self.driver.memcpy_htod_async(address, src, stream.handle)

    def _d2h(self, dst: np.ndarray, address: int, stream: CudaStream, label: str) -> None:
        with self._operation(f"d2h copy of {dst.nbytes} bytes ({label})", label, "d2h", dst.nbytes, stream):
            self.driver.memcpy_dtoh_async(dst, address, stream.handle)
        if self.page_locked(dst) is None:
            stream.synchronize()

    def _d2d(self, dst: int, src: int, nbytes: int, stream: CudaStream, label: str) -> None:
        with self._operation(f"d2d copy of {nbytes} bytes ({label})", label, "compute", nbytes, stream):
            for first in range(0, nbytes, MAX_OPERATION):
                part = min(MAX_OPERATION, nbytes - first)
                self.driver.memcpy_dtod_async(dst + first, src + first, part, stream.handle)

    def _memset(self, address: int, value: int, nbytes: int, stream: CudaStream, label: str) -> None:
        with self._operation(f"{label}, {nbytes} bytes", label, "compute", nbytes, stream):
            for first in range(0, nbytes, MAX_OPERATION):
                part = min(MAX_OPERATION, nbytes - first)
                self.driver.memset_d8_async(address + first, value, part, stream.handle)

    # launches

    def _function(self, entry: sm20.Entry) -> tuple[Any, tuple[int, int]]:
        """The entry point, its module loaded on first use; its bytes of static shared memory and most threads a block."""
        if entry.name not in self._functions:
            if entry.op not in self._modules:
                image = ptx.image(entry.op, fermi=self.compute_capability[0] == 2)
                with self.checked(f"loading op {entry.op!r} ({image.origin}) on {self.name}"):
                    self._modules[entry.op] = self.driver.module_from_buffer(image.data, self._compiled_with())
                self._origins[entry.op] = image.origin
            with self.checked(f"looking up {entry.name} in op {entry.op!r}"):
                function = self._modules[entry.op].get_function(entry.name)
                function.prepare([f"{sm20.struct_bytes(entry.struct)}s"])
                needs = int(function.shared_size_bytes), int(function.max_threads_per_block)
            self._functions[entry.name] = function, needs
        return self._functions[entry.name]

    def _compiled_with(self) -> list[tuple[Any, int]]:
        """What the driver's compiler is told: a kernel without launch bounds gets no more registers than the old cards have, so
        that as many of its blocks fit on a multiprocessor as it was laid out for. Launch bounds leave it free."""
        return [] if self.compute_capability[0] == FLOOR[0] else [(self.driver.jit_option.MAX_REGISTERS, REGISTERS)]

    def _needs(self, entry: sm20.Entry) -> tuple[int, int]:
        return self._function(entry)[1]

    def registers(self, entry_name: str) -> int:
        """Registers a thread of an entry point on this card."""
        return int(self._function(sm20.entry(entry_name))[0].num_regs)

    def _launch(self, entry: sm20.Entry, grid: Dim, block: Dim, shared_bytes: int, packed: bytes, stream: CudaStream,
                work: Work, label: str) -> None:
        """Not through `_operation`, whose contexts and text cost as much as the rest of a launch."""
        (function, _), begin = self._function(entry), self._mark(stream)
        try:
            function.prepared_async_call(grid, block, stream.handle, packed, shared_size=shared_bytes)
        except self.driver.Error as err:
            raise DeviceError(f"{launch_text(entry.name, grid, block)} failed: {err}") from None
        self._span(label, "compute", int(work.bytes), stream, begin)

    def _replay(self, recording: Recording, stream: CudaStream) -> None:
        """Straight to pycuda's launch, which takes the arguments as they were packed; a traced launch is marked one by one."""
        if self._trace is not None:
            super()._replay(recording, stream)
            return
        handle, entry, grid, block = stream.handle, None, None, None
        try:
            for entry, grid, block, shared_bytes, packed, _, _ in recording.rows:
                self._functions[entry.name][0]._launch_kernel(grid, block, packed, shared_bytes, handle)
        except self.driver.Error as err:
            raise DeviceError(f"{launch_text(entry.name, grid, block)} failed: {err}") from None

    def _sgemm(self, m: int, n: int, k: int, areas: list[tuple[int, int]], b_transposed: bool, stream: CudaStream) -> None:
        what = f"sgemm {m} x {n} x {k}"
        with self._operation(what, what, "compute", 0, stream):
            self._opened_cublas().sgemm(m, n, k, areas, b_transposed, stream.handle.handle)

    def _opened_cublas(self) -> Cublas:
        if self._cublas is None:
            self._cublas = Cublas()
        return self._cublas

    def vendor(self) -> str:
        with self.checked("opening cuBLAS"):
            found = self._opened_cublas()
        return f"{found.name}, version {found.version}"

    # the device as a whole

    def start_trace(self) -> None:
        self.synchronize()
        self._trace = []
        self._origin = self.event()
        self._origin.record(self.stream("trace"))

    def end_trace(self) -> list[Span]:
        self.synchronize()
        rows, self._trace = self._trace or [], None
        spans = [Span(label, stream, engine, begin.seconds_since(self._origin), end.seconds_since(self._origin), nbytes)
                 for label, stream, engine, nbytes, begin, end in rows]
        return sorted(spans, key=lambda span: span.begin_s)

    def facts(self) -> dict[str, str]:
        version = self.driver.get_driver_version()
        found = {"device": f"{self.name}, compute capability {'.'.join(map(str, self.compute_capability))}",
                 "driver": f"CUDA {version // 1000}.{version % 1000 // 10}"}
        for origin in sorted(set(self._origins.values())):
            found["kernels"] = "; ".join(filter(None, (found.get("kernels"), origin)))
        if self._cublas:
            found["vendor sgemm"] = self.vendor()
        return found

    def synchronize(self) -> None:
        with self.checked("waiting for the device"):
            self._context.synchronize()

    def close(self) -> None:
        if self._broken:
            return
        atexit.unregister(self.close)
        held = (self._functions, self._modules, self._allocations, self._page_locked)
        try:
            self.synchronize()
            if self._cublas:
                self._cublas.close()
        except DeviceError:
            self._abandon([item for table in held for item in table.values()])
            raise
        finally:
            self._broken = "the device is closed"
            for table in (*held, self._buffers, self._addresses):
                table.clear()
            self._context.pop()

    def _abandon(self, held: list[Any]) -> None:
        """After a fault nothing can be freed any more: keep pycuda from trying, which prints a warning for each thing."""
        for item in [*held, *(user.handle for user in self.handles)]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))
