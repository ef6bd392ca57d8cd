"""What both vision towers are made of: layer norm, the two GELUs, biased products, full attention, 2x2 blocks of patches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference.quant import QuantMatrix, linear


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis: x [..., n], weight, bias [n] -> [..., n].

    The variance divides by n (Ba, Kiros, Hinton, "Layer Normalization", arXiv 1607.06450).
    """
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight + bias


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): the activation inside the blocks of both towers, and of MiniCPM's window
    merger. Hendrycks, Gimpel, "Gaussian Error Linear Units" (arXiv 1606.08415), section 2.

    Half of 1 + tanh(u) is the logistic of 2u, which does not cancel.
    """
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3)))


def gelu_erf(x: Tensor) -> Tensor:
    """x/2 (1 + erf(x / sqrt 2)), the same section: the activation of both models' last merger.

    1 + erf(z) is erfc(-z), which does not cancel.
    """
    return 0.5 * x * torch.erfc(-x / math.sqrt(2))


def biased(x: Tensor, weight: Tensor | QuantMatrix, bias: Tensor) -> Tensor:
    """x W^T + b: x [T, n], weight [rows, n], bias [rows] -> [T, rows]."""
    return linear(x, weight) + bias


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention in which every position sees every other: q, k, v [..., n, heads, D] -> [..., n, heads, D].

    The scale is D ** -0.5. Leading axes are separate: images, or windows of one image.
    """
    scores = torch.einsum("...thd,...shd->...hts", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("...hts,...shd->...thd", scores.softmax(-1), v)


def attend_each(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """The same for views laid end to end, each alone: q, k, v [sum of lengths, heads, D] -> [sum of lengths, heads, D]."""
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([attend(*part) for part in parts])


def block_order(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Row and column [height * width] of each patch of a grid in the order of 2x2 blocks.

    Blocks go in raster order, within one (0,0), (0,1), (1,0), (1,1), so that four neighbours stand together. Sides are even.
    """
    rows = torch.arange(height)[:, None].expand(height, width)
    columns = torch.arange(width)[None, :].expand(height, width)
    return blocks(rows), blocks(columns)


def blocks(grid: Tensor) -> Tensor:
    """[height, width, ...] -> [height * width, ...] in block order."""
    height, width = grid.shape[:2]
    split = grid.reshape(height // 2, 2, width // 2, 2, *grid.shape[2:])
    return split.transpose(1, 2).reshape(height * width, *grid.shape[2:])
