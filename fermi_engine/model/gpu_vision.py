"""What both vision towers are made of over GPU kernels: their weights in one block, activations in one arena, attention and MLPs.

The maths of vision.py with float32 activations. Launches only; nothing here waits or allocates. N rows, H their width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from fermi_engine.kernels.device_arrays import DeviceArray, DeviceMatrix
from fermi_engine.kernels.gpu import DeviceBuffer
from fermi_engine.kernels.gpu_kernels import GpuKernels
from fermi_engine.kernels.sm20_vision import HEAD_DIM_STEP, VisionKernels, view_tiles
from fermi_engine.model.gpu_weights import Layout, WeightBlock
from fermi_engine.model.weights import Tensors
from fermi_engine.vision.config import BLOCK, QWEN, VisionConfig, stored_shapes

MLP_ROWS = 4096  # that pass an MLP together at most: bounds memory, results do not depend on it with our own products
TAPS = 4  # rows of Qwen's position table that a patch reads
Mark = Callable[[str, DeviceArray], None]
Attend = Callable[[DeviceArray, DeviceArray], None]  # of queries, keys and values [N, 3 H], into [N, H]


def unmarked(name: str, array: DeviceArray) -> None:
    """The mark of a run that nobody watches."""


class VisionWeights(WeightBlock):
    """A tower's tensors by canonical name, in stored bytes. MiniCPM's queries, keys and values become one matrix and one bias,
    `<layer>.self_attn.qkv_proj`; what mode "4x" has no use for is left out."""

    def __init__(self, weights: Tensors, config: VisionConfig, only: str = "") -> None:
        """only: those whose names begin so."""
        super().__init__()
        for name, shape in stored_shapes(config).items():
            if not name.startswith(only) or ("vit_merger" in name and config.images.patches_per_token != 16):
                continue
            if ".q_proj." in name:
                self._three(weights, name)
            elif len(shape) == 1 or "pos" in name:
                self._vector(weights, name, name)
            elif ".k_proj." not in name and ".v_proj." not in name:
                self._matrix(weights, name, name)

    def _three(self, weights: Tensors, name: str) -> None:
        names = [name.replace(".q_proj.", f".{part}_proj.") for part in "qkv"]
        joined = name.replace(".q_proj.", ".qkv_proj.")
        if name.endswith(".bias"):
            parts = [weights.vector(part) for part in names]
            self._join(joined, parts, (sum(len(part) for part in parts),), None)
            return
        matrices = [weights.matrix(part) for part in names]
        if len({matrix.format for matrix in matrices}) > 1:
            raise ValueError(f"{name}: queries, keys and values of formats {[matrix.format for matrix in matrices]}")
        shape = sum(matrix.rows for matrix in matrices), matrices[0].cols
        self._join(joined, [matrix.data for matrix in matrices], shape, matrices[0].format)


def unfit_tower(config: VisionConfig, formats: set[str]) -> str | None:
    """Why the GPU's kernels cannot run a tower with matrices of these formats; None when they can."""
    rules = [
        ("f16" not in formats, "its matrices are stored as f16; convert the checkpoint to f32, q8_0 or q4_0"),
        (config.head_dim % HEAD_DIM_STEP == 0, f"heads of {config.head_dim}, expected a multiple of {HEAD_DIM_STEP}"),
    ]
    return next((text for holds, text in rules if not holds), None)


class VisionArena:
    """Arrays for `rows` patches of views that pass together. `wide` is patches, then queries, keys and values, then what is
    inside an MLP, and products on their way to the residual stream: no two of them are in use at once."""

    def __init__(self, c: VisionConfig, rows: int, tiles: int) -> None:
        """tiles: of full_attention over these rows."""
        h, inside = c.hidden_size, c.intermediate_size + -c.intermediate_size % BLOCK
        wide = max(rows * max(3 * h, c.patch_width), min(rows, MLP_ROWS) * inside)
        shapes: dict[str, tuple[int, ...]] = {"x": (rows, h), "u": (rows, h), "wide": (wide,), "tiles": (tiles, 3)}
        integers = {"tiles": np.int32, "rows": np.int32}
        if c.family == QWEN:
            half = c.head_dim // 2
            shapes |= {"rows": (rows, TAPS), "weights": (rows, TAPS), "positions": (3, rows), "cos": (rows, half),
                       "sin": (rows, half), "inv_freq": (half,), "axis": (half,)}
            integers |= {"positions": np.int32, "axis": np.int32}
        else:
            shapes |= {"rows": (rows, 1), "windows": (rows,), "blocks": (rows,), "small_tiles": (tiles, 3)}
            integers |= {"windows": np.int32, "blocks": np.int32, "small_tiles": np.int32}
        self._layout = Layout(shapes, integers)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer they lie in."""
        return self._layout.end

    def within(self, buffer: DeviceBuffer) -> dict[str, DeviceArray]:
        """The arrays by name."""
        return self._layout.within(buffer)


class TowerOnDevice:
    """One batch of views on its way through a tower. Residual stream `x` and scratch `u` change places now and then."""

    def __init__(self, c: VisionConfig, products: GpuKernels, kernels: VisionKernels, weights: dict[str, Any],
                 arrays: dict[str, DeviceArray]) -> None:
        """weights: of VisionWeights; arrays: of VisionArena."""
        self.config, self.heads = c, c.num_attention_heads
        self._p, self._k, self._w, self._arrays = products, kernels, weights, arrays
        self.x, self.u, self._wide = arrays["x"], arrays["u"], arrays["wide"]

    def wide(self, rows: int, columns: int) -> DeviceArray:
        """The beginning of `wide` in this shape."""
        return DeviceArray.within(self._wide.buffer, (rows, columns), np.float32, self._wide.offset)

    def __getitem__(self, name: str) -> DeviceArray:
        return self._arrays[name]

    def swap(self, x: DeviceArray, u: DeviceArray) -> None:
        """What the residual stream and the scratch are from now on."""
        self.x, self.u = x, u

    def norm(self, name: str, eps: float, x: DeviceArray, out: DeviceArray) -> DeviceArray:
        """The layer norm `name` of x -> out."""
        self._k.layer_norm(x, self._w[f"{name}.weight"], self._w[f"{name}.bias"], eps, out)
        return out

    def product(self, name: str, x: DeviceArray, out: DeviceArray) -> DeviceArray:
        """x times the matrix `name`, without its bias -> out."""
        self._p.gemm(x, self._w[f"{name}.weight"], out)
        return out

    def bias(self, name: str) -> DeviceArray:
        """Of the projection `name`."""
        return self._w[f"{name}.bias"]

    def embed(self, name: str, table: str, patches: DeviceArray, rows: DeviceArray, weights: DeviceArray | None = None) -> None:
        """x = patches through the projection `name`, plus rows of the position table, weighed or as they are."""
        self.product(name, patches, self.x)
        self._k.add_positions(self.x, self.bias(name), self._w[table], rows, weights)

    def rope_tables(self) -> tuple[DeviceArray, DeviceArray]:
        """cos and sin from `positions`, `inv_freq` and `axis`."""
        self._p.rope_tables(*(self[name] for name in ("positions", "inv_freq", "axis", "cos", "sin")))
        return self["cos"], self["sin"]

    def attention(self, norm: str, qkv: str, out: str, attend: Attend,
                  rope: tuple[DeviceArray, DeviceArray] | None = None) -> None:
        """x + out(attention(qkv(norm(x)))). attend is one of `views` and `windows`."""
        rows, h = self.x.shape
        wide = self.product(qkv, self.norm(norm, self.config.layer_norm_eps, self.x, self.u), self.wide(rows, 3 * h))
        if rope is None:
            self._k.add_bias(wide, self.bias(qkv))
        else:
            self._k.add_bias_rope(wide, self.bias(qkv), *rope, self.heads)
        attend(wide, self.u)
        self._k.add_bias_residual(self.x, self.product(out, self.u, self.wide(rows, h)), self.bias(out))

    def views(self, tiles: DeviceArray, lengths: Sequence[int]) -> Attend:
        """Attention inside views of these lengths, whose tiles are on the device."""
        scale = 1.0 / math.sqrt(self.config.head_dim)
        flops = 4.0 * sum(length * length for length in lengths) * self.config.hidden_size
        return lambda qkv, out: self._k.full_attention(qkv, self.heads, tiles, scale, out, flops)

    def windows(self, qkv: DeviceArray, out: DeviceArray) -> None:
        """Attention inside windows of four."""
        self._k.window_attention(qkv, self.heads, 1.0 / math.sqrt(self.config.head_dim), out)

    def mlp(self, norm: str, first: str, second: str) -> None:
        """x + second(gelu_tanh(first(norm(x))))."""
        u = self.norm(norm, self.config.layer_norm_eps, self.x, self.u)
        self.inner(u, first, second, "gelu_tanh", u)
        self._k.add_bias_residual(self.x, u, self.bias(second))

    def inner(self, u: DeviceArray, first: str, second: str, gelu: str, out: DeviceArray) -> None:
        """second(gelu(first(u))) without the last bias -> out, some rows at a time. out may begin where u does if its rows are
        no longer."""
        width = self._w[f"{first}.weight"].rows
        for begin, end in pairwise(_cuts(u.shape[0], self._wide.size // width)):
            inner = self.product(first, u.rows(begin, end - begin), self.wide(end - begin, width))
            self._k.gelu(gelu, inner, inner, self.bias(first))
            self.product(second, inner, out.rows(begin, end - begin))

    def project(self, u: DeviceArray, first: str, second: str, out: DeviceArray) -> None:
        """second(gelu_erf(first(u))) -> out."""
        self.inner(u, first, second, "gelu_erf", out)
        self._k.add_bias(out, self.bias(second))

    def add_means(self, x: DeviceArray, out: DeviceArray, second: str) -> None:
        """out + bias of `second` + the means of neighbouring rows of x."""
        self._k.group_mean(x, out, self.bias(second))

    def reordered(self, ids: DeviceArray) -> None:
        """The rows of x in the order of ids int32 [N]."""
        rows, h = self.x.shape
        table = DeviceMatrix("f32", rows, h, replace(self.x, shape=(4 * rows * h,), dtype=np.dtype(np.uint8)))
        self._p.rows(table, self.u, ids)
        self.swap(self.u, self.x)


def _cuts(rows: int, most: int) -> list[int]:
    """Begins and ends of even parts of at most so many rows, at multiples of 64 but for the last."""
    parts = -(-rows // max(most, 1))
    step = max(1, min(most, -(-rows // parts // 64) * 64)) if parts > 1 else rows
    return [*range(0, rows, step), rows]


def tiles_of(grids: Sequence[tuple[int, int]]) -> np.ndarray:
    """view_tiles of views of these grids."""
    return view_tiles([height * width for height, width in grids])
