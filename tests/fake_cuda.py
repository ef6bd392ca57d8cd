"""A pycuda.driver without a card, for tests of what the CUDA device says and does."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import numpy as np
import pytest


def install(monkeypatch: pytest.MonkeyPatch, driver: types.ModuleType) -> None:
    package = types.ModuleType("pycuda")
    package.driver = driver
    monkeypatch.setitem(sys.modules, "pycuda", package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", driver)


def fake_driver(**replaced: Any) -> types.ModuleType:
    """A pycuda.driver with one old card; `replaced` overrides its names."""
    module = types.ModuleType("pycuda.driver")
    module.Error = type("Error", (Exception,), {})
    module.MemoryError = type("MemoryError", (module.Error,), {})

    class Card:
        def __init__(self, ordinal: int) -> None: ...

        def name(self) -> str:
            return "Old Card"

        def compute_capability(self) -> tuple[int, int]:
            return 1, 3

    Card.count = staticmethod(lambda: 1)
    module.Device, module.init = Card, lambda: None
    for name, value in replaced.items():
        setattr(module, name, value)
    return module


class FakeAllocation:
    """Device memory that is host memory. pycuda frees what nobody holds any more; `freed` counts that too."""

    freed = 0

    def __init__(self, nbytes: int) -> None:
        self.memory = np.zeros(nbytes, np.uint8)

    def __int__(self) -> int:
        return self.memory.ctypes.data

    def free(self) -> None:
        FakeAllocation.freed += 1

    def __del__(self) -> None:
        self.free()


class FakeHandle:
    """A stream, an event, a context, or a card, all idle."""

    fault: Exception | None = None
    destroyed = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None

    def synchronize(self) -> None:
        if FakeHandle.fault:
            raise FakeHandle.fault

    def __del__(self) -> None:
        FakeHandle.destroyed += 1


def working_driver() -> types.ModuleType:
    """A pycuda.driver whose card is host memory; it runs no kernels."""

    class Card(FakeHandle):
        count = staticmethod(lambda: 1)
        multiprocessor_count = 14

        def __init__(self, ordinal: int) -> None: ...

        def name(self) -> str:
            return "Fake Card"

        def compute_capability(self) -> tuple[int, int]:
            return 2, 0

        def total_memory(self) -> int:
            return 1 << 20

        def retain_primary_context(self) -> FakeHandle:
            return FakeHandle()

    def mem_alloc(nbytes: int) -> FakeAllocation:
        if nbytes > 1 << 20:
            raise driver.MemoryError("cuMemAlloc failed: out of memory")
        return FakeAllocation(nbytes)

    driver = fake_driver(
        Device=Card, Stream=FakeHandle, Event=FakeHandle, mem_alloc=mem_alloc, mem_get_info=lambda: (1 << 19, 1 << 20),
        memcpy_htod_async=lambda to, array, stream: ctypes.memmove(to, array.ctypes.data, array.nbytes),
        memcpy_dtoh_async=lambda array, come, stream: ctypes.memmove(array.ctypes.data, come, array.nbytes),
        memset_d8_async=lambda to, value, nbytes, stream: ctypes.memset(to, value, nbytes))
    return driver


class FakeLibcuda:
    """cuMemHostRegister that answers `status`."""

    status = 0
    locked = 0

    def cuMemHostRegister_v2(self, address: Any, nbytes: Any, flags: Any) -> int:
        FakeLibcuda.locked += not FakeLibcuda.status
        return FakeLibcuda.status

    def cuMemHostUnregister(self, address: Any) -> int:
        FakeLibcuda.locked -= 1
        return 0
