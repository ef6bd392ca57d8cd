"""The vision tower of MiniCPM-V-4.6: patches, nearest position table, layers, window merger in their midst, projector."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fermi_engine.kernels.cpu import CpuKernels
from fermi_engine.model.vision import (
    MLP,
    Grid,
    LayerNorm,
    Projection,
    attend,
    check_patches,
    in_parts,
    raster_to_blocks,
)
from fermi_engine.model.weights import Tensors, Trace, silent
from fermi_engine.vision.config import PROJECTOR_EPS, VisionConfig

WINDOW = 4  # tokens of a 2x2 window


class SelfAttention:
    """Attention inside views or windows behind a layer norm, with its residual."""

    def __init__(self, weights: Tensors, norm: LayerNorm, name: str, heads: int) -> None:
        self.norm, self.heads = norm, heads
        self.qkv = [Projection.of(weights, f"{name}.{part}_proj") for part in "qkv"]
        self.out = Projection.of(weights, f"{name}.out_proj")

    def forward(self, k: CpuKernels, x: np.ndarray, lengths: Sequence[int], mode: str) -> np.ndarray:
        """x [N, H], tokens of each view -> [N, H]."""
        u = k.activations(self.norm.forward(k, x))
        q, key, value = (part.forward(k, u, mode).reshape(len(x), self.heads, -1) for part in self.qkv)
        seen = attend(k, q, key, value, lengths).reshape(x.shape)
        return k.add(x, self.out.forward(k, k.activations(seen), mode))


class EncoderLayer:
    """Attention inside each view, then an MLP, each behind a layer norm and a residual."""

    def __init__(self, weights: Tensors, config: VisionConfig, index: int) -> None:
        name, eps = f"vision_tower.encoder.layers.{index}", config.layer_norm_eps
        self.attention = SelfAttention(weights, LayerNorm(weights, f"{name}.layer_norm1", eps), f"{name}.self_attn",
                                       config.num_attention_heads)
        self.mlp = MLP(weights, LayerNorm(weights, f"{name}.layer_norm2", eps), f"{name}.mlp.fc1", f"{name}.mlp.fc2", "gelu_tanh")

    def forward(self, k: CpuKernels, x: np.ndarray, lengths: Sequence[int], mode: str) -> np.ndarray:
        """x [N, H], patches of each view -> [N, H]."""
        x = self.attention.forward(k, x, lengths, mode)
        return k.add(x, self.mlp.forward(k, x, mode))


class WindowMerger:
    """The four tokens of each 2x2 window attend to each other, then become one: an MLP of all four, plus their mean."""

    def __init__(self, weights: Tensors, config: VisionConfig) -> None:
        name, eps = "vision_tower.vit_merger", config.layer_norm_eps
        self.attention = SelfAttention(weights, LayerNorm(weights, f"{name}.layer_norm1", eps), f"{name}.self_attn",
                                       config.num_attention_heads)
        self.mlp = MLP(weights, LayerNorm(weights, f"{name}.pre_norm", eps), f"{name}.linear_1", f"{name}.linear_2", "gelu_tanh")

    def forward(self, k: CpuKernels, x: np.ndarray, grids: Sequence[Grid], mode: str) -> np.ndarray:
        """x [N, H] in raster order -> [N / 4, H] in raster order of the halved grids."""
        x = x[raster_to_blocks(grids)]
        x = self.attention.forward(k, x, [WINDOW] * (len(x) // WINDOW), mode)
        merged = self.mlp.forward(k, x.reshape(len(x) // WINDOW, -1), mode)
        return k.add(merged, k.group_mean(x, WINDOW))


class MiniCpmVision:
    """Tower and projector over one set of weights; immutable once built."""

    def __init__(self, weights: Tensors, config: VisionConfig, kernels: CpuKernels, activations: str = "q8_0") -> None:
        self.config, self.kernels, self.mode = config, kernels, activations
        self.patch_embedding = Projection.of(weights, "vision_tower.embeddings.patch_embedding")
        self.table = weights.vector("vision_tower.embeddings.position_embedding.weight")
        self.layers = [EncoderLayer(weights, config, i) for i in range(config.num_hidden_layers)]
        self.vit_merger = WindowMerger(weights, config)
        self.post_layernorm = LayerNorm(weights, "vision_tower.post_layernorm", config.layer_norm_eps)
        self.projector = MLP(weights, LayerNorm(weights, "merger.mlp.0.pre_norm", PROJECTOR_EPS), "merger.mlp.0.linear_1",
                             "merger.mlp.0.linear_2", "gelu_erf")

    def forward(self, patches: np.ndarray, grids: Sequence[Grid], trace: Trace = silent) -> np.ndarray:
        """patches [N, patch_width] of views end to end, each in raster order, grids (height, width) in patches -> embeddings
        [N / 16, out_hidden_size] in downsample_mode "16x", [N / 4, ...] in "4x", which leaves the window merger out.

        ValueError where patches and grids do not fit each other.
        """
        per_token = self.config.images.patches_per_token
        check_patches(patches, grids, self.config.patch_width, 4 if per_token == 16 else 2)
        k, mode = self.kernels, self.mode
        x = in_parts(patches, lambda rows: self.patch_embedding.forward(k, k.activations(rows), mode))
        x = k.add(x, self.table[position_ids(self.config.table_side, grids)])
        trace("embed", x)
        for i, layer in enumerate(self.layers):
            x = layer.forward(k, x, [height * width for height, width in grids], mode)
            trace(f"layers.{i}", x)
            if per_token == 16 and i == self.config.insert_layer_id:
                x = self.vit_merger.forward(k, x, grids, mode)
                grids = [(height // 2, width // 2) for height, width in grids]
                trace("vit_merger", x)
        x = self.post_layernorm.forward(k, x)
        trace("post_layernorm", x)
        merged = self.project(x, grids)
        trace("merger", merged)
        return merged

    def project(self, x: np.ndarray, grids: Sequence[Grid]) -> np.ndarray:
        """x [n, H] in raster order -> [n / 4, out_hidden_size]: four neighbours side by side, normed together."""
        joined = x[raster_to_blocks(grids)].reshape(len(x) // WINDOW, -1)
        return self.projector.forward(self.kernels, joined, self.mode)


def position_ids(side: int, grids: Sequence[Grid]) -> np.ndarray:
    """Row of a position table [side * side, H] for each patch in raster order, int64 [N]: patch i of n falls in bucket
    floor(side * i / n), in integers, so that what meets a boundary belongs above it."""
    parts = []
    for grid in grids:
        rows, columns = (side * np.arange(n) // n for n in grid)
        parts.append((rows[:, None] * side + columns).ravel())
    return np.concatenate(parts)
