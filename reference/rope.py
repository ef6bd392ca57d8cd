"""Rotary positions on the leading part of each head, time, height and width interleaved (mRoPE).

Source: transformers' modeling_qwen3_5.
"""

from __future__ import annotations

import torch
from torch import Tensor


def inv_freq(head_rotary_dim: int, theta: float) -> Tensor:
    """theta ** (-2j / head_rotary_dim), j < head_rotary_dim / 2, float32 [head_rotary_dim / 2].

    Rounded where transformers rounds: exponent, power and reciprocal each to float32. The power itself is
    taken in float64 first, so that it does not depend on a library's float32 pow.
    """
    exponent = torch.arange(0, head_rotary_dim, 2, dtype=torch.float32) / head_rotary_dim
    power = torch.pow(torch.tensor(theta, dtype=torch.float64), exponent.to(torch.float64)).to(torch.float32)
    return torch.ones_like(power) / power


def axis_of_frequency(half: int, section: tuple[int, int, int]) -> list[int]:
    """Which position row turns each of the `half` frequencies: 0 time, 1 height, 2 width.

    Frequency j belongs to height if j % 3 == 1 and j < 3 * section[1], to width if j % 3 == 2 and j < 3 *
    section[2], else to time.
    """
    return [j % 3 if j % 3 and j < 3 * section[j % 3] else 0 for j in range(half)]


def tables(
    positions: Tensor, frequencies: Tensor, axes: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """positions int [3, T], frequencies float32 [half], axes [half] -> cos, sin [T, half] of dtype.

    The angle position * frequency rounds once in float32, not at all in float64 (positions below 2**24).
    """
    angle = positions[axes].T.to(dtype) * frequencies.to(dtype)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (j, j + half) of each head, pass the rest: x [T, heads, D], cos and sin [T, half] -> as
    x."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
