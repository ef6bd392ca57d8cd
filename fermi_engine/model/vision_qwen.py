"""The vision tower of Qwen3.5/3.6: patches, bilinear position table, blocks with 2-D rotary attention, 2x2 merger."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fermi_engine.kernels.cpu import CpuKernels
from fermi_engine.model.attention import inv_freq
from fermi_engine.model.vision import MLP, Grid, LayerNorm, Projection, attend, block_order, check_patches, in_parts
from fermi_engine.model.weights import Tensors, Trace, silent
from fermi_engine.vision.config import QWEN_THETA, VisionConfig


class QwenBlock:
    """One block: attention inside each image, then an MLP, each behind a layer norm and a residual."""

    def __init__(self, weights: Tensors, config: VisionConfig, index: int) -> None:
        name, eps = f"visual.blocks.{index}", config.layer_norm_eps
        self.heads = config.num_attention_heads
        self.norm1 = LayerNorm(weights, f"{name}.norm1", eps)
        self.qkv = Projection.of(weights, f"{name}.attn.qkv").split(3)
        self.proj = Projection.of(weights, f"{name}.attn.proj")
        self.mlp = MLP(weights, LayerNorm(weights, f"{name}.norm2", eps), f"{name}.mlp.linear_fc1", f"{name}.mlp.linear_fc2",
                       "gelu_tanh")

    def forward(self, k: CpuKernels, x: np.ndarray, rope: tuple[np.ndarray, np.ndarray], lengths: Sequence[int],
                mode: str) -> np.ndarray:
        """x [N, H], rope: cos, sin [N, head_dim / 2], patches of each image -> [N, H]."""
        u = k.activations(self.norm1.forward(k, x))
        q, key, value = (part.forward(k, u, mode).reshape(len(x), self.heads, -1) for part in self.qkv)
        k.rope(q, *rope)
        k.rope(key, *rope)
        seen = attend(k, q, key, value, lengths).reshape(x.shape)
        x = k.add(x, self.proj.forward(k, k.activations(seen), mode))
        return k.add(x, self.mlp.forward(k, x, mode))


class QwenVision:
    """The tower over one set of weights; immutable once built."""

    def __init__(self, weights: Tensors, config: VisionConfig, kernels: CpuKernels, activations: str = "q8_0") -> None:
        self.config, self.kernels, self.mode = config, kernels, activations
        self.patch_embed = Projection.of(weights, "visual.patch_embed.proj")
        self.table = weights.vector("visual.pos_embed.weight")
        self.blocks = [QwenBlock(weights, config, i) for i in range(config.num_hidden_layers)]
        self.norm = LayerNorm(weights, "visual.merger.norm", config.layer_norm_eps)
        self.merger = MLP(weights, None, "visual.merger.linear_fc1", "visual.merger.linear_fc2", "gelu_erf")

    def forward(self, patches: np.ndarray, grids: Sequence[Grid], trace: Trace = silent) -> np.ndarray:
        """patches [N, patch_width] of images end to end, each in block order, grids (height, width) in patches
        -> embeddings [N / 4, out_hidden_size]. ValueError where patches and grids do not fit each other."""
        check_patches(patches, grids, self.config.patch_width, 2)
        k, mode = self.kernels, self.mode
        x = in_parts(patches, lambda rows: self.patch_embed.forward(k, k.activations(rows), mode))
        x = k.add(x, position_rows(k, self.table, grids))
        trace("embed", x)
        rope, lengths = rotary_tables(k, self.config.head_dim, grids), [height * width for height, width in grids]
        for i, block in enumerate(self.blocks):
            x = block.forward(k, x, rope, lengths, mode)
            trace(f"blocks.{i}", x)
        merged = self.merge(x)
        trace("merger", merged)
        return merged

    def merge(self, x: np.ndarray) -> np.ndarray:
        """x [N, H] in block order -> [N / 4, out_hidden_size]: each patch normed, four neighbours side by side."""
        joined = self.norm.forward(self.kernels, x).reshape(len(x) // 4, -1)
        return self.merger.forward(self.kernels, joined, self.mode)


def position_rows(k: CpuKernels, table: np.ndarray, grids: Sequence[Grid]) -> np.ndarray:
    """The square position table [side * side, H] read bilinearly at each patch -> [N, H] in block order; the ends of the table
    lie on the first and last patch."""
    return k.weighted_rows(table, *position_taps(math.isqrt(len(table)), grids))


def position_taps(side: int, grids: Sequence[Grid]) -> tuple[np.ndarray, np.ndarray]:
    """Rows int32 [N, 4] of a table [side * side, H] and their weights [N, 4], in block order."""
    rows, weights = (np.concatenate(parts) for parts in zip(*(_taps(grid, side) for grid in grids), strict=True))
    return rows, weights


def rotary_tables(k: CpuKernels, head_dim: int, grids: Sequence[Grid]) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [N, head_dim / 2] in block order: the first half of the angles turns with the row, the second with the
    column."""
    quarter = head_dim // 4
    places = np.concatenate([np.stack(block_order(*grid)) for grid in grids], axis=1)
    positions = np.concatenate([np.zeros_like(places[:1]), places])  # the kernel's axes are time, row, column
    axis = np.repeat(np.array([1, 2], np.int32), quarter)
    return k.rope_tables(positions, np.tile(inv_freq(2 * quarter, QWEN_THETA), 2), axis)


def _taps(grid: Grid, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Table rows int32 [n, 4] and weights [n, 4] of each patch: above left, above right, below left, below right."""
    (top, bottom, down), (left, right, across) = (
        _axis_taps(places, size, side) for places, size in zip(block_order(*grid), grid, strict=True))
    one = np.float32(1)
    rows = np.stack([row * side + column for row in (top, bottom) for column in (left, right)], axis=1)
    weights = np.stack([a * b for a in (one - down, down) for b in (one - across, across)], axis=1)
    return rows, weights


def _axis_taps(places: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of patches int32 [n] on an axis of `size`: table places below and above int32 [n], float32 weight of the one above."""
    exact = places.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    lower = np.floor(exact)
    below = lower.astype(np.int32)
    return below, np.minimum(below + 1, np.int32(side - 1)), exact - lower
