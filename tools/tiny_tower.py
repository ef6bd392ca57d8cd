"""The vision tower in the form that trains: images of a batch laid end to end, the same maths as reference/vision_qwen.py.

Pictures travel as bytes, one frame of each patch: both frames are alike, and the 256 values that a sample can have stand in a
table. What depends on the sides of a picture alone is made by the reference once for every grid.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fermi_engine.vision.config import VisionConfig, vision_shapes
from fermi_engine.vision.patches import PreparedImage
from fermi_engine.vision.prompt import mrope_positions
from reference import rope
from reference.vision import gelu_erf, gelu_tanh
from reference.vision_qwen import EPS, position_embedding, rotary_tables

MOST_SIDE = 16  # of a grid, in pairs of patches
ALIGNED = 8  # patches: what GPUs want masks of attention to be a multiple of
HALF, LEVELS = 127.5, 256  # a sample of byte b is about b / 127.5 - 1
Params = dict[str, Tensor]


class Pictures(NamedTuple):
    """The images of a batch of B rows of T tokens, arrays or tensors.

    codes: uint8 [N, 3 p p], the patches of all images; places: int32 [N], each patch's row in the tables of `grids`;
    padded: int64 [N], where it goes among images of `longest` patches each; lengths: int32 [I], patches of each image;
    slots: int64 [N / 4], which of B T tokens takes an embedding; positions: int16 [3, B, T].
    """

    codes: np.ndarray | Tensor
    places: np.ndarray | Tensor
    padded: np.ndarray | Tensor
    lengths: np.ndarray | Tensor
    slots: np.ndarray | Tensor
    positions: np.ndarray | Tensor
    longest: int


@functools.lru_cache(maxsize=4)
def grids(tokens: int) -> dict[tuple[int, int], int]:
    """Grids (height, width in patches) of up to `tokens` embeddings -> first row in tables of 4 `tokens` rows each."""
    sides = [(h, w) for h in range(1, MOST_SIDE + 1) for w in range(1, MOST_SIDE + 1) if h * w <= tokens]
    return {(2 * h, 2 * w): 4 * tokens * i for i, (h, w) in enumerate(sides)}


def pictures(rows: Sequence[tuple[Sequence[int], Sequence[PreparedImage]]], length: int, image_token: int,
             tokens: int) -> Pictures:
    """Rows of ids with their images, to be padded to `length` tokens; no image has more than `tokens` embeddings."""
    first, images = grids(tokens), [image for _, row in rows for image in row]
    sizes = np.array([len(image.patches) for image in images], np.int32)
    longest = -(-int(sizes.max()) // ALIGNED) * ALIGNED
    slots = [i * length + np.flatnonzero(np.asarray(ids) == image_token) for i, (ids, _) in enumerate(rows)]
    positions = np.zeros((3, len(rows), length), np.int16)
    for i, (ids, row) in enumerate(rows):
        axes, after = mrope_positions(ids, image_token, [image.grids[0] for image in row])
        rest = np.arange(after, after + length - len(ids))
        positions[:, i] = np.concatenate([axes, np.broadcast_to(rest, (3, len(rest)))], axis=1)
    return Pictures(np.concatenate([_codes(image.patches) for image in images]),
                    np.concatenate([first[image.grids[0]] + np.arange(n, dtype=np.int32)
                                    for image, n in zip(images, sizes, strict=True)]).astype(np.int32),
                    np.concatenate([i * longest + np.arange(n) for i, n in enumerate(sizes)]),
                    sizes, np.concatenate(slots), positions, longest)


def _codes(patches: np.ndarray) -> np.ndarray:
    """Patches float32 [n, 3 * 2 * p * p] of a still picture -> the bytes of one frame, uint8 [n, 3 p p]."""
    frames = patches.reshape(len(patches), 3, 2, -1)
    return np.rint((frames[:, :, 0] + 1) * HALF).astype(np.uint8).reshape(len(patches), -1)


def samples(dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """What each byte becomes, [256]: rounded as image_patches rounds it, with mean and deviation 0.5."""
    scaled = (np.arange(LEVELS) * (1 / 255)).astype(np.float32)
    return torch.from_numpy((scaled - np.float32(0.5)) / np.float32(0.5)).to(device, dtype)


def shapes(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name (`visual.`...) -> shape of every tensor."""
    return vision_shapes(config)


def initial(config: VisionConfig, seed: int) -> Params:
    """Fresh float32 weights: residual branches start small, norms at one, biases at zero."""
    generator = torch.Generator().manual_seed(seed)
    branch = (2 * config.num_hidden_layers) ** -0.5
    return {name: _drawn(name, shape, branch, generator) for name, shape in shapes(config).items()}


def _drawn(name: str, shape: tuple[int, ...], branch: float, generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape) if "norm" in name and name.endswith("weight") else torch.zeros(shape)
    if name.endswith("pos_embed.weight"):
        return 0.2 * torch.randn(shape, generator=generator)
    small = name.endswith(("attn.proj.weight", "mlp.linear_fc2.weight"))
    return torch.randn(shape, generator=generator) * math.prod(shape[1:]) ** -0.5 * (branch if small else 1.0)


class Tower:
    """The forward pass over prepared weights: products in `dtype`, everything else in the dtype of the norms."""

    def __init__(self, config: VisionConfig, weights: Params, dtype: torch.dtype) -> None:
        self.config, self.weights, self.dtype = config, weights, dtype
        self.tokens = config.images.max_pixels // (2 * config.patch_size) ** 2

    def forward(self, images: Pictures) -> Tensor:
        """-> embeddings [N / 4, out_hidden], images end to end."""
        c, table = self.config, self.weights["visual.pos_embed.weight"]
        frame = samples(table.dtype, table.device)[images.codes.long()].unflatten(1, (3, 1, -1))
        patches = frame.expand(-1, -1, c.temporal_patch_size, -1).flatten(1)
        taps, cos, sin = (t.index_select(0, images.places) for t in _tables(
            self.tokens, c.table_side, c.head_dim, table.dtype, table.device))
        x = self._linear("patch_embed.proj", patches) + taps @ table
        place = torch.arange(images.longest, device=table.device)
        seen = (place < images.lengths[:, None])[:, None, None]
        for i in range(c.num_hidden_layers):
            x = self._block(f"blocks.{i}", x, cos, sin, images, seen)
        joined = self._norm("merger.norm", x).reshape(len(x) // 4, -1)
        return self._linear("merger.linear_fc2", gelu_erf(self._linear("merger.linear_fc1", joined)))

    def _block(self, name: str, x: Tensor, cos: Tensor, sin: Tensor, images: Pictures, seen: Tensor) -> Tensor:
        heads = self._linear(f"{name}.attn.qkv", self._norm(f"{name}.norm1", x))
        q, k, v = heads.unflatten(-1, (3, self.config.num_attention_heads, -1)).unbind(1)
        q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
        rows = len(images.lengths) * images.longest
        q, k, v = (y.new_zeros(rows, *y.shape[1:]).index_copy(0, images.padded, y).unflatten(0, (-1, images.longest))
                   .transpose(1, 2).to(self.dtype) for y in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(0, 1)
        x = x + self._linear(f"{name}.attn.proj", o.index_select(0, images.padded).flatten(1))
        h = gelu_tanh(self._linear(f"{name}.mlp.linear_fc1", self._norm(f"{name}.norm2", x)))
        return x + self._linear(f"{name}.mlp.linear_fc2", h)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"visual.{name}.weight"], self.weights[f"visual.{name}.bias"], EPS)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self.weights[f"visual.{name}.{part}"] for part in ("weight", "bias"))
        return F.linear(x.to(self.dtype), weight.flatten(1).to(self.dtype)).to(bias.dtype) + bias


@functools.lru_cache(maxsize=4)
def _tables(tokens: int, side: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of every patch of every grid: shares of the rows of the position table [G n, side^2], cos and sin [G n, head_dim / 2]."""
    found = []
    for grid in grids(tokens):
        parts = position_embedding(torch.eye(side**2, dtype=dtype), grid), *rotary_tables(grid, head_dim, dtype)
        found.append([F.pad(x, (0, 0, 0, 4 * tokens - len(x))) for x in parts])
    return tuple(torch.cat(parts).to(device) for parts in zip(*found, strict=True))
