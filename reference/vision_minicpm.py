"""The vision tower and projector of MiniCPM-V-4.6, as in transformers' modeling_minicpmv4_6."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reference.quant import QuantMatrix
from reference.vision import attend, attend_each, biased, blocks, gelu_erf, gelu_tanh, layer_norm

Trace = Callable[[str, Tensor], None]
Grid = tuple[int, int]
PROJECTOR_EPS = 1e-6


def _silent(name: str, value: Tensor) -> None:
    """The trace of a caller that wants none."""


def position_ids(grid: Grid, side: int) -> Tensor:
    """Row of a [side * side, H] table for each patch of a grid in raster order -> int64 [height * width].

    Patch i of n falls in bucket floor(side * i / n), in integers: fractions that meet a boundary belong above it.
    """
    height, width = grid
    rows, columns = (side * torch.arange(n) // n for n in (height, width))
    return (rows[:, None] * side + columns).flatten()


class MiniCpmVision:
    """Tower and projector over named weights.

    config: any object with num_hidden_layers, num_attention_heads, layer_norm_eps and insert_layer_id.
    params: tensor name without `model.` -> Tensor (patch_embedding.weight as [H, C * p * p]) or, for matrices, QuantMatrix.
        The dtype of the position table decides float32 or float64; every plain tensor must have it.
    """

    def __init__(self, config: Any, params: Mapping[str, Any]) -> None:
        self.config, self.params = config, params
        self.table: Tensor = params["vision_tower.embeddings.position_embedding.weight"]
        self.dtype: torch.dtype = self.table.dtype

    def to(self, dtype: torch.dtype) -> MiniCpmVision:
        """The tower in another dtype. Quantised weights stay; sums over them take the new dtype."""
        moved = {name: w if isinstance(w, QuantMatrix) else w.to(dtype) for name, w in self.params.items()}
        return MiniCpmVision(self.config, moved)

    def forward(self, patches: Tensor, grids: Sequence[Grid], mode: str, trace: Trace | None = None) -> Tensor:
        """patches [N, C * p * p] of views end to end, each in raster order, grids (height, width) in patches
        -> [N / 16, out] in mode "16x", [N / 4, out] in mode "4x", which leaves the window merger out.

        trace sees `embed` [N, H] after the position embedding, `layers.i` after each layer, `vit_merger` [N / 4, H],
        `post_layernorm` and `merger`.
        """
        trace = trace or _silent
        x = self._linear("vision_tower.embeddings.patch_embedding", patches.to(self.dtype))
        side = math.isqrt(len(self.table))
        x = x + torch.cat([self.table[position_ids(grid, side)] for grid in grids])
        trace("embed", x)
        for i in range(self.config.num_hidden_layers):
            x = self.layer(i, x, [height * width for height, width in grids])
            trace(f"layers.{i}", x)
            if mode == "16x" and i == self.config.insert_layer_id:
                x = self.window_merger(x, grids)
                grids = [(height // 2, width // 2) for height, width in grids]
                trace("vit_merger", x)
        x = self._norm("vision_tower.post_layernorm", x)
        trace("post_layernorm", x)
        merged = self.projector(x, grids)
        trace("merger", merged)
        return merged

    def layer(self, i: int, x: Tensor, lengths: list[int]) -> Tensor:
        """Layer i: x [N, H], patches of each view -> x [N, H]."""
        name = f"vision_tower.encoder.layers.{i}"
        q, k, v = self._heads(f"{name}.self_attn", self._norm(f"{name}.layer_norm1", x))
        x = x + self._linear(f"{name}.self_attn.out_proj", attend_each(q, k, v, lengths).flatten(1))
        h = gelu_tanh(self._linear(f"{name}.mlp.fc1", self._norm(f"{name}.layer_norm2", x)))
        return x + self._linear(f"{name}.mlp.fc2", h)

    def window_merger(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """x [N, H] in raster order -> [N / 4, H] in raster order of the halved grids.

        The four tokens of each 2x2 window attend to each other; then they become one: an MLP of the four side by side,
        plus their mean.
        """
        name, x = "vision_tower.vit_merger", self._windows(x, grids)
        q, k, v = (part.unflatten(0, (-1, 4)) for part in self._heads(f"{name}.self_attn", self._norm(f"{name}.layer_norm1", x)))
        x = x + self._linear(f"{name}.self_attn.out_proj", attend(q, k, v).flatten(0, 1).flatten(1))
        windows = x.unflatten(0, (-1, 4))
        h = self._linear(f"{name}.linear_1", self._norm(f"{name}.pre_norm", windows.flatten(1)))
        return self._linear(f"{name}.linear_2", gelu_tanh(h)) + windows.mean(1)

    def projector(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """x [n, H] in raster order -> [n / 4, out]: four neighbours side by side, normed together."""
        name, joined = "merger.mlp.0", self._windows(x, grids).reshape(len(x) // 4, -1)
        normed = layer_norm(joined, self.params[f"{name}.pre_norm.weight"], self.params[f"{name}.pre_norm.bias"], PROJECTOR_EPS)
        return self._linear(f"{name}.linear_2", gelu_erf(self._linear(f"{name}.linear_1", normed)))

    def _heads(self, name: str, u: Tensor) -> list[Tensor]:
        shape = (self.config.num_attention_heads, -1)
        return [self._linear(f"{name}.{part}_proj", u).unflatten(-1, shape) for part in "qkv"]

    def _windows(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        views = x.split([height * width for height, width in grids])
        return torch.cat([blocks(view.unflatten(0, grid)) for view, grid in zip(views, grids, strict=True)])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return layer_norm(x, self.params[f"{name}.weight"], self.params[f"{name}.bias"], self.config.layer_norm_eps)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return biased(x, self.params[f"{name}.weight"], self.params[f"{name}.bias"])
