"""Weights of a small model given as arrays by name: what the stages of the model itself run on. NumPy only."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from fermi_engine.config import ModelConfig
from fermi_engine.formats import FORMATS, Experts, Matrix

CONFIG = "config"  # the array that holds the model's configuration as JSON text


def config_array(config: ModelConfig) -> np.ndarray:
    """The configuration as JSON text, uint8."""
    return np.frombuffer(json.dumps(config.to_dict(), sort_keys=True).encode(), np.uint8)


class ArrayTensors:
    """The Tensors protocol (model/weights.py) over arrays.

    A float32 tensor stands under its canonical name in the shape of the checkpoint (of a vision tower, in that of a pack), a
    quantised matrix under `<name>.q4_0` or `<name>.q8_0` as plain uint8 rows. Raises KeyError for a tensor that is not there.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def vector(self, name: str) -> np.ndarray:
        """A float32 tensor; a convolution [C, 1, K] comes as [K, C], as packs hold it."""
        array = self._arrays[name]
        if name.endswith("conv1d.weight"):
            return np.ascontiguousarray(array[:, 0].T)
        return np.ascontiguousarray(array)

    def matrix(self, name: str) -> Matrix:
        """A matrix [rows, cols] in the format it is given in."""
        return matrix_of(*self._stored(name))

    def _stored(self, name: str) -> tuple[str, np.ndarray]:
        if name in self._arrays:
            return "f32", self._arrays[name]
        format = next((f for f in ("q4_0", "q8_0") if f"{name}.{f}" in self._arrays), None)
        if format is None:
            raise KeyError(f"no array {name}, nor quantised as {name}.q4_0 or {name}.q8_0")
        return format, self._arrays[f"{name}.{format}"]


class ArrayWeights(ArrayTensors):
    """The Weights protocol over arrays. arrays[CONFIG] holds the configuration; experts of a layer are one array [E, ...]."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        super().__init__(arrays)
        self.config = ModelConfig.from_dict(json.loads(arrays[CONFIG].tobytes()))

    def experts(self, layer: int) -> tuple[Experts, Experts]:
        """gate_up [2I, H] and down [H, I] of all experts of a layer, the two of an expert side by side, as packs hold them."""
        pair = [self._stored(f"layers.{layer}.mlp.experts.{part}") for part in ("gate_up_proj", "down_proj")]
        parts = [[matrix_of(format, one) for one in array] for format, array in pair]
        data = np.concatenate([one.data.reshape(-1).view(np.uint8) for both in zip(*parts, strict=True) for one in both])
        stride, starts = len(data) // len(parts[0]), (0, parts[0][0].nbytes)
        gate_up, down = (Experts(one.format, len(parts[0]), one.rows, one.cols, stride, data[start:])
                         for (one, *_), start in zip(parts, starts, strict=True))
        return gate_up, down


def matrix_of(format: str, array: np.ndarray) -> Matrix:
    """float32 [rows, cols], or plain uint8 rows of another format, as kernels read them."""
    if format == "f32":
        return Matrix.from_f32(np.ascontiguousarray(array), format)
    row = FORMATS[format]
    cols = array.shape[1] // row.block_bytes * row.block
    return Matrix(format, array.shape[0], cols, row.interleave(np.ascontiguousarray(array)))
