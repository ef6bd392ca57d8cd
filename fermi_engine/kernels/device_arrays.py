"""Arrays, weight matrices and experts in device memory: where they are and what they look like. They own nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fermi_engine.formats import FORMATS
from fermi_engine.kernels.gpu import Device, DeviceBuffer, Stream


@dataclass(frozen=True, eq=False)
class DeviceArray:
    """A C-contiguous array that starts at byte `offset` of a buffer."""

    buffer: DeviceBuffer
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int = 0

    @classmethod
    def within(cls, buffer: DeviceBuffer, shape: tuple[int, ...], dtype: Any = np.float32,
               offset: int = 0) -> DeviceArray:
        """Raises ValueError when the buffer is too small for it."""
        array = cls(buffer, shape, np.dtype(dtype), offset)
        if offset < 0 or offset + array.nbytes > buffer.nbytes:
            raise ValueError(f"{array.dtype} {shape} from byte {offset} of buffer {buffer.name!r}, which has "
                             f"{buffer.nbytes}")
        return array

    @property
    def address(self) -> int:
        """Device address of the first element."""
        return self.buffer.at(self.offset)

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.dtype.itemsize

    def reshape(self, *shape: int) -> DeviceArray:
        """The same elements in another shape. Raises ValueError when their number differs."""
        if math.prod(shape) != self.size:
            raise ValueError(f"reshape of {self.shape} to {shape}")
        return replace(self, shape=shape)

    def rows(self, first: int, count: int) -> DeviceArray:
        """`count` rows of the leading axis from `first` on. Raises IndexError outside."""
        if first < 0 or count < 0 or first + count > self.shape[0]:
            raise IndexError(f"rows {first}..{first + count} of {self.shape}")
        step = math.prod(self.shape[1:]) * self.dtype.itemsize
        return replace(self, shape=(count, *self.shape[1:]), offset=self.offset + first * step)

    def upload(self, device: Device, source: np.ndarray, stream: Stream, label: str = "") -> None:
        """Fill it from C-contiguous host memory of the same shape and type (gpu.Device.h2d). ValueError otherwise."""
        self._like(source)
        device.h2d(self.buffer, source, stream, self.offset, label)

    def download(self, device: Device, target: np.ndarray, stream: Stream, label: str = "") -> None:
        """Copy it to C-contiguous host memory of the same shape and type (gpu.Device.d2h). ValueError otherwise."""
        self._like(target)
        device.d2h(target, self.buffer, stream, self.offset, label)

    def _like(self, host: np.ndarray) -> None:
        if host.shape != self.shape or host.dtype != self.dtype:
            raise ValueError(f"a copy between {host.dtype} {host.shape} and {self.dtype} {self.shape} on the device")


@dataclass(frozen=True, eq=False)
class DeviceMatrix:
    """A weight matrix [rows, cols] of q4_0, q8_0, f16 or f32, in stored bytes: formats.Matrix on the device."""

    format: str
    rows: int
    cols: int
    data: DeviceArray

    def __post_init__(self) -> None:
        groups, width = FORMATS[self.format].stored_shape(self.rows, self.cols)
        if self.data.nbytes < groups * width:
            raise ValueError(f"{self.format} [{self.rows}, {self.cols}] takes {groups * width} bytes, found "
                             f"{self.data.nbytes}")

    @property
    def address(self) -> int:
        """Device address of the first stored byte."""
        return self.data.address


@dataclass(frozen=True, eq=False)
class DeviceExperts:
    """`count` matrices [rows, cols] of q4_0 or q8_0 that start `stride` bytes apart: formats.Experts on the device."""

    format: str
    count: int
    rows: int
    cols: int
    stride: int
    data: DeviceArray

    def __post_init__(self) -> None:
        groups, width = FORMATS[self.format].stored_shape(self.rows, self.cols)
        needed = (self.count - 1) * self.stride + groups * width
        if self.format not in ("q4_0", "q8_0") or self.stride % 4 or self.stride < groups * width:
            raise ValueError(f"experts of {self.format} and {groups * width} bytes, {self.stride} apart")
        if self.data.nbytes < needed:
            raise ValueError(f"{self.count} experts {self.stride} bytes apart take {needed} bytes, found "
                             f"{self.data.nbytes}")

    @property
    def address(self) -> int:
        """Device address of the first expert."""
        return self.data.address
