"""What both vision towers are made of, over kernels: biased projections, layer norms, MLPs, attention inside views."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from fermi_engine.formats import Matrix
from fermi_engine.kernels.cpu import Activations, CpuKernels
from fermi_engine.model.weights import Tensors

Grid = tuple[int, int]  # height, width in patches
ROWS = 1024  # rows that pass an MLP together: bounds memory, results do not depend on it


class Projection:
    """x W^T + b."""

    def __init__(self, weight: Matrix, bias: np.ndarray) -> None:
        if bias.shape != (weight.rows,):
            raise ValueError(f"bias {bias.shape} of a matrix of {weight.rows} rows")
        self.weight, self.bias = weight, bias

    @classmethod
    def of(cls, weights: Tensors, name: str) -> Projection:
        """The tensors `name`.weight and `name`.bias."""
        return cls(weights.matrix(f"{name}.weight"), weights.vector(f"{name}.bias"))

    def split(self, count: int) -> list[Projection]:
        """Equal parts of its rows."""
        rows = self.weight.rows // count
        return [Projection(self.weight.part(i * rows, rows), self.bias[i * rows:(i + 1) * rows]) for i in range(count)]

    def forward(self, k: CpuKernels, u: Activations, mode: str) -> np.ndarray:
        """u [T, n] -> [T, rows]."""
        return k.add_bias(k.linear(u, self.weight, mode), self.bias)


class LayerNorm:
    """Layer norm with weight and bias."""

    def __init__(self, weights: Tensors, name: str, eps: float) -> None:
        self.weight, self.bias, self.eps = weights.vector(f"{name}.weight"), weights.vector(f"{name}.bias"), eps

    def forward(self, k: CpuKernels, x: np.ndarray) -> np.ndarray:
        """x [T, n] -> [T, n]."""
        return k.layer_norm(x, self.weight, self.bias, self.eps)


class MLP:
    """second(gelu(first(norm(x))))."""

    def __init__(self, weights: Tensors, norm: LayerNorm | None, first: str, second: str, gelu: str) -> None:
        """norm: None where the caller has normed; gelu: 'gelu_tanh' or 'gelu_erf'."""
        self.norm, self.first, self.second = norm, Projection.of(weights, first), Projection.of(weights, second)
        self.gelu = gelu

    def forward(self, k: CpuKernels, x: np.ndarray, mode: str) -> np.ndarray:
        """x [T, n] -> [T, rows of second], ROWS at a time."""
        def some(rows: np.ndarray) -> np.ndarray:
            u = k.activations(rows if self.norm is None else self.norm.forward(k, rows))
            inner = getattr(k, self.gelu)(self.first.forward(k, u, mode))
            return self.second.forward(k, k.activations(inner), mode)
        return in_parts(x, some)


def in_parts(x: np.ndarray, compute: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """compute over ROWS rows of x at a time."""
    parts = [compute(x[begin:begin + ROWS]) for begin in range(0, len(x), ROWS)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def attend(k: CpuKernels, q: np.ndarray, key: np.ndarray, value: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Attention inside each view: q, key, value [T, heads, D] of views end to end, `lengths` tokens each -> like q."""
    scale, begin, parts = 1.0 / math.sqrt(q.shape[2]), 0, []
    for length, views in groupby(lengths):
        end = begin + length * len(list(views))
        parts.append(k.full_attention(q[begin:end], key[begin:end], value[begin:end], length, scale))
        begin = end
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def block_order(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column int32 [height * width] of each patch in the order of 2x2 blocks: blocks in raster order, inside one
    (0,0), (0,1), (1,0), (1,1). Sides are even."""
    grid = np.indices((height, width), dtype=np.int32).reshape(2, height // 2, 2, width // 2, 2)
    rows, columns = grid.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return rows, columns


def raster_to_blocks(grids: Sequence[Grid]) -> np.ndarray:
    """For views end to end in raster order, which token comes where in block order: int64 [sum of tokens]."""
    parts, begin = [], 0
    for height, width in grids:
        rows, columns = block_order(height, width)
        parts.append(begin + rows.astype(np.int64) * width + columns)
        begin += height * width
    return np.concatenate(parts)


def check_patches(patches: np.ndarray, grids: Sequence[Grid], width: int, unit: int) -> None:
    """ValueError unless patches [N, width] are those of grids whose sides are multiples of `unit`."""
    count = sum(height * across for height, across in grids)
    if patches.shape != (count, width) or not count:
        raise ValueError(f"patches {patches.shape} for grids {list(grids)} of patches of {width}")
    if any(side % unit for grid in grids for side in grid):
        raise ValueError(f"grids {list(grids)} with sides that are no multiples of {unit}")
