"""The vision tower of Qwen3.5/3.6 and the positions of text with images, as in transformers' modeling_qwen3_5(_moe)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reference import rope
from reference.quant import QuantMatrix
from reference.vision import attend_each, biased, block_order, gelu_erf, gelu_tanh, layer_norm

Trace = Callable[[str, Tensor], None]
Grid = tuple[int, int]
EPS = 1e-6
THETA = 10000.0


def _silent(name: str, value: Tensor) -> None:
    """The trace of a caller that wants none."""


def table_taps(size: int, side: int, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Where `index` of an axis of `size` patches falls in a table of `side`: lower tap, upper tap, weight of the upper.

    The ends of both axes meet: place = index (side - 1) / (size - 1).
    """
    place = index.to(dtype) * (side - 1) / max(size - 1, 1)
    lower = place.floor()
    return lower.long(), (lower.long() + 1).clamp(max=side - 1), place - lower


def position_embedding(table: Tensor, grid: Grid) -> Tensor:
    """Bilinear reading of a square table [side * side, H] at each patch of a grid -> [height * width, H] in block order."""
    side, (height, width) = math.isqrt(len(table)), grid
    rows, columns = block_order(height, width)
    top, bottom, down = table_taps(height, side, rows, table.dtype)
    left, right, across = table_taps(width, side, columns, table.dtype)
    taps = ((top, left, (1 - down) * (1 - across)), (top, right, (1 - down) * across),
            (bottom, left, down * (1 - across)), (bottom, right, down * across))
    return sum(table[row * side + column] * weight[:, None] for row, column, weight in taps)


def rotary_tables(grid: Grid, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [height * width, head_dim / 2] in block order: the first half of the angles turns with the row, the
    second with the column, at frequencies 10000 ** (-2k / (head_dim / 2))."""
    frequencies = rope.inv_freq(head_dim // 2, THETA).to(dtype)
    angles = torch.cat([place.to(dtype)[:, None] * frequencies for place in block_order(*grid)], dim=-1)
    return angles.cos(), angles.sin()


class QwenVision:
    """The tower over named weights.

    config: any object with num_hidden_layers and num_attention_heads.
    params: tensor name without `model.visual.` -> Tensor (patch_embed.proj.weight as [H, C * 2 * p * p]) or, for matrices,
        QuantMatrix. The dtype of `pos_embed.weight` decides float32 or float64; every plain tensor must have it.
    """

    def __init__(self, config: Any, params: Mapping[str, Any]) -> None:
        self.config, self.params = config, params
        self.dtype: torch.dtype = params["pos_embed.weight"].dtype

    def to(self, dtype: torch.dtype) -> QwenVision:
        """The tower in another dtype. Quantised weights stay; sums over them take the new dtype."""
        moved = {name: w if isinstance(w, QuantMatrix) else w.to(dtype) for name, w in self.params.items()}
        return QwenVision(self.config, moved)

    def forward(self, patches: Tensor, grids: Sequence[Grid], trace: Trace | None = None) -> Tensor:
        """patches [N, C * 2 * p * p] of images end to end, each in block order, grids (height, width) in patches
        -> [N / 4, out_hidden].

        trace sees `embed` [N, H] after the position embedding, `blocks.i` [N, H] after each block, `merger`.
        """
        trace = trace or _silent
        x = self._linear("patch_embed.proj", patches.to(self.dtype))
        x = x + torch.cat([position_embedding(self.params["pos_embed.weight"], grid) for grid in grids])
        trace("embed", x)
        head_dim = x.shape[-1] // self.config.num_attention_heads
        tables = [rotary_tables(grid, head_dim, self.dtype) for grid in grids]
        cos, sin = (torch.cat(parts) for parts in zip(*tables, strict=True))
        lengths = [height * width for height, width in grids]
        for i in range(self.config.num_hidden_layers):
            x = self.block(i, x, cos, sin, lengths)
            trace(f"blocks.{i}", x)
        merged = self.merger(x)
        trace("merger", merged)
        return merged

    def block(self, i: int, x: Tensor, cos: Tensor, sin: Tensor, lengths: list[int]) -> Tensor:
        """Block i: x [N, H], cos, sin [N, head_dim / 2], patches of each image -> x [N, H]."""
        name = f"blocks.{i}"
        u = self._norm(f"{name}.norm1", x)
        heads = self._linear(f"{name}.attn.qkv", u).unflatten(-1, (3, self.config.num_attention_heads, -1))
        q, k, v = heads.unbind(1)
        q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
        x = x + self._linear(f"{name}.attn.proj", attend_each(q, k, v, lengths).flatten(1))
        h = gelu_tanh(self._linear(f"{name}.mlp.linear_fc1", self._norm(f"{name}.norm2", x)))
        return x + self._linear(f"{name}.mlp.linear_fc2", h)

    def merger(self, x: Tensor) -> Tensor:
        """x [N, H] in block order -> [N / 4, out_hidden]: each patch normed, four neighbours side by side."""
        joined = self._norm("merger.norm", x).reshape(len(x) // 4, -1)
        return self._linear("merger.linear_fc2", gelu_erf(self._linear("merger.linear_fc1", joined)))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return layer_norm(x, self.params[f"{name}.weight"], self.params[f"{name}.bias"], EPS)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return biased(x, self.params[f"{name}.weight"], self.params[f"{name}.bias"])


def text_positions(ids: Sequence[int], image_token_id: int, grids: Sequence[Grid]) -> tuple[Tensor, int]:
    """ids of a prompt, each image as height * width / 4 image tokens in a row -> int64 [3, T] (time, height, width) and
    the position of the token that follows.

    A text token stands at (p, p, p) and moves p by one. An image of merged size (h, w) stands at (p, p + row, p + column)
    in raster order and moves p by max(h, w): Qwen2-VL (arXiv 2409.12191), section 2.1.
    """
    rows, p, t, images = [], 0, 0, iter(grids)
    while t < len(ids):
        if ids[t] != image_token_id:
            rows.append((p, p, p))
            p, t = p + 1, t + 1
            continue
        height, width = (side // 2 for side in next(images))
        rows += [(p, p + row, p + column) for row in range(height) for column in range(width)]
        p, t = p + max(height, width), t + height * width
    return torch.tensor(rows).T, p
