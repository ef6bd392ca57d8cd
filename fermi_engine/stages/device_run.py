"""Named host arrays on a device: up, through kernels, and down again. What the sm_20 half of the stage table runs on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from fermi_engine.errors import DeviceError
from fermi_engine.formats import Matrix
from fermi_engine.kernels.device_arrays import DeviceArray, DeviceMatrix
from fermi_engine.kernels.gpu import Device, DeviceBuffer, open_device
from fermi_engine.kernels.gpu_kernels import GpuKernels
from fermi_engine.kernels.sm20_attention import AttentionKernels
from fermi_engine.kernels.sm20_vision import VisionKernels

DEVICES = ("emulated", "cuda")
ALIGNMENT = 16  # of addresses that 128-bit loads want; buffers start at multiples of it


class DeviceRun:
    """All families of kernels on one stream of a device, and memory for one run.

    What kernels fill starts as NaN, the lowest integer, or bytes 0xff. `shift`: bytes that arrays start off alignment where an
    op takes that, for tests.
    """

    def __init__(self, device: Device, shift: int = 0) -> None:
        self.device, self.shift = device, shift
        self.stream = device.stream("stage")
        self.rows = GpuKernels(device, self.stream)
        self.tokens = AttentionKernels(device, self.stream)
        self.vision = VisionKernels(device, self.stream)
        self._buffers: list[DeviceBuffer] = []

    def put(self, array: np.ndarray, aligned: bool = False) -> DeviceArray:
        """A copy on the device. aligned: whatever `shift` is, at a multiple of 16 bytes."""
        shift = 0 if aligned else self.shift
        buffer = self.device.alloc(max(1, array.nbytes + shift), "stage")
        self._buffers.append(buffer)
        placed = DeviceArray.within(buffer, array.shape, array.dtype, shift)
        if array.size:
            placed.upload(self.device, np.ascontiguousarray(array), self.stream)
        return placed

    def empty(self, *shape: int, dtype: Any = np.float32, aligned: bool = False) -> DeviceArray:
        """An array for results."""
        fill = np.nan if np.dtype(dtype).kind == "f" else np.iinfo(dtype).min or np.iinfo(dtype).max
        return self.put(np.full(shape, fill, dtype), aligned)

    def matrix(self, w: Matrix) -> DeviceMatrix:
        """A weight matrix in its stored bytes."""
        return DeviceMatrix(w.format, w.rows, w.cols, self.put(w.data, aligned=True))

    def get(self, array: DeviceArray) -> np.ndarray:
        """A copy on the host."""
        out = np.empty(array.shape, array.dtype)
        if out.size:
            array.download(self.device, out, self.stream)
        return out

    def close(self) -> None:
        """Free what was put or made; the device stays open."""
        self.device.synchronize()
        while self._buffers:
            self.device.free(self._buffers.pop())


class Reopened:
    """A device for one run after another; one on which a run failed is opened again for the next."""

    def __init__(self, kind: str) -> None:
        """kind: one of DEVICES. Raises DeviceError where that cannot run."""
        self._kind = kind
        self._device: Device | None = open_device(kind)

    @contextmanager
    def run(self) -> Iterator[DeviceRun]:
        """A run whose memory is freed after it."""
        if self._device is None:
            self._device = open_device(self._kind)
        try:
            run = DeviceRun(self._device)
            yield run
            run.close()
        except DeviceError:
            broken, self._device = self._device, None
            with suppress(DeviceError):  # what it says is what has been said
                broken.close()
            raise

    def close(self) -> None:
        """Close the device."""
        if self._device is not None:
            self._device.close()


@contextmanager
def opened(kind: str) -> Iterator[DeviceRun]:
    """A run on a device of its own, `emulated` or `cuda`. Raises DeviceError where that cannot run."""
    device = Reopened(kind)
    with device.run() as run:
        yield run
    device.close()
