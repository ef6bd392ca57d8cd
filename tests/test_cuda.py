"""The CUDA device without a card: what it asks of pycuda, what it says when something is missing or fails."""

from __future__ import annotations

import ast
import gc
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fermi_engine.errors import DeviceError, DeviceMemoryError
from fermi_engine.kernels import cublas, cuda
from fermi_engine.kernels.gpu import open_device
from tests.fake_cuda import FakeAllocation, FakeHandle, FakeLibcuda, fake_driver, install, working_driver

ROOT = Path(__file__).resolve().parent.parent
# What cuda.py takes from pycuda.driver, and the driver calls behind it; every one is in CUDA 8.0 (most in 4.0).
DRIVER_NAMES = {
    "init": "cuInit", "Device": "cuDeviceGet, cuDeviceGetCount", "get_driver_version": "cuDriverGetVersion",
    "mem_get_info": "cuMemGetInfo", "mem_alloc": "cuMemAlloc, cuMemFree", "pagelocked_empty": "cuMemHostAlloc, cuMemFreeHost",
    "Stream": "cuStreamCreate, cuStreamSynchronize, ...",
    "Event": "cuEventCreate, cuEventRecord, cuEventSynchronize, cuEventElapsedTime", "memset_d8_async": "cuMemsetD8Async",
    "memcpy_htod_async": "cuMemcpyHtoDAsync", "memcpy_dtoh_async": "cuMemcpyDtoHAsync",
    "memcpy_dtod_async": "cuMemcpyDtoDAsync", "module_from_buffer": "cuModuleLoadDataEx, cuModuleGetFunction, cuLaunchKernel",
    "jit_option": "options of cuModuleLoadDataEx", "Error": "", "MemoryError": "",
}


def test_the_cuda_device_passes_calls_on_and_names_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, working_driver())
    device = cuda.CudaDevice()
    stream = device.stream("test")
    buffer = device.alloc(1000, "weights")
    device.memset(buffer, 7, 1000, stream)
    sent = (np.arange(300) % 251).astype(np.uint8)
    device.h2d(buffer, sent, stream, offset=411)
    got = np.zeros(1000, np.uint8)
    device.d2h(got, buffer, stream)
    np.testing.assert_array_equal(got, [7] * 411 + sent.tolist() + [7] * 289)
    with pytest.raises(DeviceMemoryError) as refused:
        device.alloc(2 << 20, "experts")
    assert str(refused.value) == "alloc of 2097152 bytes for 'experts' on Fake Card failed: cuMemAlloc failed: out of memory"
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: FakeLibcuda())
    array = np.zeros(4096, np.uint8)
    device.pin(array)
    assert FakeLibcuda.locked == 1
    device.unpin(array)
    assert FakeLibcuda.locked == 0
    for status, kind in ((2, DeviceMemoryError), (801, DeviceMemoryError), (719, DeviceError)):
        monkeypatch.setattr(FakeLibcuda, "status", status)
        with pytest.raises(DeviceError, match=rf"page-locking 4096 bytes failed: cuMemHostRegister returned {status}") as caught:
            device.pin(array)
        assert type(caught.value) is kind
    device.free(buffer)
    device.close()


def closed_device(driver: types.ModuleType, fault: bool) -> None:
    """A device with a buffer and a stream, closed and forgotten, after a fault or not."""
    device = cuda.CudaDevice()
    device.alloc(100)
    stream = device.stream("test")
    if not fault:
        device.close()
        return
    FakeHandle.fault = driver.Error("cuStreamSynchronize failed: an illegal memory access was encountered")
    with pytest.raises(DeviceError, match="waiting for stream 'test' failed: cuStreamSynchronize failed: an illegal"):
        stream.synchronize()
    with pytest.raises(DeviceError, match="illegal"):
        device.close()
    with pytest.raises(DeviceError, match="the device is closed"):
        device.synchronize()
    FakeHandle.fault = None  # its traceback holds everything


@pytest.mark.parametrize("fault", [False, True])
def test_after_a_fault_nothing_is_freed(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, driver := working_driver())
    monkeypatch.setattr(FakeHandle, "fault", None)
    gc.collect()
    freed, destroyed = FakeAllocation.freed, FakeHandle.destroyed
    closed_device(driver, fault)
    gc.collect()
    assert FakeAllocation.freed - freed == (0 if fault else 1)
    assert FakeHandle.destroyed - destroyed == (2 if fault else 3)  # card, context and, without a fault, the stream


def refusal(**options: Any) -> str:
    with pytest.raises(DeviceError) as caught:
        open_device("cuda", **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_pycuda_the_line_has_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    assert "needs pycuda" in refusal()
    assert "driver 390: CUDA 8.0, gcc 5, and pycuda built from source" in refusal()


def test_an_old_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fake_driver())
    assert refusal() == "Old Card has compute capability 1.3; 2.0 is the floor"
    assert refusal(ordinal=3) == "there is no GPU 3: the driver lists 1"


def test_a_missing_driver_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = fake_driver()

    def fail() -> None:
        raise driver.Error("cuInit failed: no CUDA-capable device is detected")

    driver.init = fail
    install(monkeypatch, driver)
    assert refusal().startswith("no usable NVIDIA driver (cuInit failed: no CUDA-capable device is detected)")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="unknown device 'opencl'; there are cuda and emulated"):
        open_device("opencl")


def test_a_wrong_cublas_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, message in (("libm.so.6", "libm.so.6 is no cuBLAS: it lacks cublasCreate_v2"),
                          ("libno.such.so", "libno.such.so cannot be loaded")):
        monkeypatch.setenv("FERMI_CUBLAS", name)
        with pytest.raises(DeviceError, match="the vendor's sgemm is not available: ") as caught:
            cublas.Cublas()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(DeviceError, match="NVIDIA_TF32_OVERRIDE=1 makes cuBLAS round to TF32"):
        cublas.Cublas()


def test_a_device_without_a_vendors_library_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, working_driver())
    monkeypatch.setenv("FERMI_CUBLAS", "libm.so.6")
    device = cuda.CudaDevice()
    buffer = device.alloc(64)
    for _ in range(2):
        with pytest.raises(DeviceError, match="the vendor's sgemm is not available: ") as caught:
            device.vendor()
        assert "libm.so.6 is no cuBLAS: it lacks cublasCreate_v2" in str(caught.value)
        assert "FERMI_CUBLAS names a library" in str(caught.value)
        assert "\n" not in str(caught.value)
    device.memset(buffer, 0, 64, device.stream("test"))
    device.close()


def test_a_cublas_status_names_shape_and_code() -> None:
    with pytest.raises(DeviceError, match=r"sgemm 2 x 3 x 4 failed: cuBLAS status 13 \(execution failed\)"):
        cublas.check("sgemm 2 x 3 x 4", 13)


def test_only_driver_calls_of_cuda_8_are_used() -> None:
    tree = ast.parse((ROOT / "fermi_engine" / "kernels" / "cuda.py").read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and (
        getattr(node.value, "id", None) == "driver" or getattr(node.value, "attr", None) == "driver")}
    assert used == set(DRIVER_NAMES)
    direct = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("cu")
              and node.attr[2:3].isupper()}
    assert direct == {"cuMemHostRegister_v2", "cuMemHostUnregister"}  # CUDA 6.5, 4.0
