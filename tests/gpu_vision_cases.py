"""Small vision towers on a device and their reference, which the tests of towers on the GPU share. No transformers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import torch

from fermi_engine.formats import FORMATS
from fermi_engine.gpu.stream import HostMemory
from fermi_engine.gpu.vision import GpuVision
from fermi_engine.kernels.gpu import Device
from fermi_engine.placement import Ledger
from fermi_engine.stages.array_weights import ArrayTensors
from fermi_engine.vision.config import MINICPM, QWEN, VisionConfig
from tests import vision_inputs
from tests.oracle import tensors
from tests.strategies import Draws
from tests.vision_stages import minicpm_of, qwen_of

MINICPM_4X = "minicpmv4_6-4x"
FAMILIES = (QWEN, MINICPM, MINICPM_4X)
GRIDS = {QWEN: [(6, 10), (2, 2), (8, 4)], MINICPM: [(8, 12), (4, 16), (4, 16)], MINICPM_4X: [(2, 6), (8, 4)]}
Q8_0 = FORMATS["q8_0"]


@functools.cache
def tower(family: str, heads: int = 3, mlp: int = 52) -> tuple[VisionConfig, dict[str, np.ndarray]]:
    """Configuration and tensors as packs hold them, heads of 8."""
    if family == QWEN:
        config = vision_inputs.qwen_config(2, heads, 8, mlp, 4, 7, 20)
    else:
        config = vision_inputs.minicpm_config(3, heads, 8, mlp, 3, 10, 20, 1)
        images = dataclasses.replace(config.images, downsample_mode="4x" if family == MINICPM_4X else "16x")
        config = dataclasses.replace(config, images=images)
    arrays = vision_inputs.weights(Draws(3), config)
    return config, arrays


def is_matrix(name: str, array: np.ndarray) -> bool:
    """Whether a pack may quantise it."""
    return array.ndim == 2 and name.endswith(".weight") and "pos" not in name and array.shape[1] % 32 == 0


def quantised(arrays: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Matrices as q8_0 where their rows are whole blocks, and all arrays with the values that these stand for."""
    stored = {f"{name}.q8_0" if is_matrix(name, array) else name: Q8_0.quantize(array) if is_matrix(name, array) else array
              for name, array in arrays.items()}
    return stored, {name: Q8_0.dequantize(Q8_0.quantize(array)) if is_matrix(name, array) else array
                    for name, array in arrays.items()}


def on_gpu(family: str, device: Device, limit: int | None = None, gemm: str = "own", arrays: Any = None,
           **sizes: int) -> GpuVision:
    """A tower on a device; arrays: in place of its own."""
    config, own = tower(family, **sizes)
    host = HostMemory(device, lambda text: None)
    return GpuVision(device, ArrayTensors(arrays or own), config, Ledger(device, limit), host, gemm)


def patches_of(family: str, grids: list[tuple[int, int]]) -> np.ndarray:
    """Patches [N, patch_width] of views of these grids."""
    count, width = sum(height * width for height, width in grids), tower(family)[0].patch_width
    return np.random.default_rng(0).uniform(-1, 1, (count, width)).astype(np.float32)


def expected(family: str, patches: np.ndarray, grids: list[tuple[int, int]], dtype: torch.dtype, arrays: Any = None,
             trace: Any = None, **sizes: int) -> np.ndarray:
    """The reference's embeddings."""
    kind, more = (qwen_of, ()) if family == QWEN else (minicpm_of, ("4x" if family == MINICPM_4X else "16x",))
    with torch.no_grad():
        model = kind(tensors(arrays or tower(family, **sizes)[1]), dtype)
        return model.forward(torch.from_numpy(patches).to(dtype), grids, *more, trace).numpy()
