"""Small vision towers on a device, which the tests of towers on the GPU share."""

from __future__ import annotations

import numpy as np

from fermi_engine.formats import Matrix
from fermi_engine.gpu.stream import HostMemory
from fermi_engine.gpu.vision import GpuVision
from fermi_engine.kernels.gpu import Device
from fermi_engine.placement import Ledger
from fermi_engine.vision.config import VisionConfig, stored_shapes
from tests.test_vision_model import Arrays, tower


class Stored(Arrays):
    """As a pack stores them: MLPs widened to whole blocks by units that are zero."""

    def __init__(self, config: VisionConfig, arrays: dict[str, np.ndarray], quantised: bool = False) -> None:
        super().__init__(arrays, quantised)
        self._shapes = stored_shapes(config)

    def vector(self, name: str) -> np.ndarray:
        array = super().vector(name)
        return self._widened(name, array) if array.ndim == 1 else array

    def matrix(self, name: str) -> Matrix:
        array = self._widened(name, self.arrays[name].reshape(len(self.arrays[name]), -1))
        return Matrix.from_f32(array, "q8_0" if self.quantised and array.shape[1] % 32 == 0 else "f32")

    def _widened(self, name: str, array: np.ndarray) -> np.ndarray:
        more = [(0, wide - size) for wide, size in zip(self._shapes[name], array.shape, strict=True)]
        return np.pad(array, more)


def on_gpu(family: str, device: Device, quantised: bool = False, limit: int | None = None, gemm: str = "own",
           **sizes: int) -> GpuVision:
    config, arrays, _ = tower(family, **sizes)
    host = HostMemory(device, lambda text: None)
    return GpuVision(device, Stored(config, arrays, quantised), config, Ledger(device, limit), host, gemm)
