"""Bicubic resizing as Pillow computes it: weights in double, then integers, one axis after the other."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 22  # of a weight behind the point


def keys(x: Tensor) -> Tensor:
    """The cubic kernel with a = -1/2: R. Keys, "Cubic convolution interpolation", IEEE Trans. ASSP 29 (1981), equation 15."""
    a, x = -0.5, x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def weights(size: int, target: int) -> Tensor:
    """What each of `size` samples gives to each of `target`: int64 [target, size], in units of 2^-22.

    Where samples become fewer the kernel widens by their ratio. Rounded half away from zero.
    """
    ratio = size / target
    width = max(ratio, 1.0)
    matrix = torch.zeros((target, size), dtype=torch.int64)
    for i in range(target):
        centre = (i + 0.5) * ratio
        first = max(int(centre - 2 * width + 0.5), 0)
        last = min(int(centre + 2 * width + 0.5), size)
        row = keys((torch.arange(first, last, dtype=torch.float64) - centre + 0.5) * (1 / width))
        row = row / row.sum() * 2.0**BITS
        matrix[i, first:last] = torch.where(row < 0, row - 0.5, row + 0.5).trunc().long()
    return matrix


def resize(pixels: Tensor, height: int, width: int, rows_first: bool = False) -> Tensor:
    """uint8 [H, W, C] -> uint8 [height, width, C]: one axis, to 8 bits, then the other. A side that stays is left alone.

    Columns come first, in Pillow from 13 on rows where `order_depends` says so.
    """
    out = pixels
    for axis in (0, 1) if rows_first else (1, 0):
        size = (height, width)[axis]
        if size != out.shape[axis]:
            out = _along(out, axis, size)
    return out


def order_depends(pixels: Tensor, height: int, width: int) -> bool:
    """Whether Pillow from 13 on takes rows first: where they lose more than twice as many samples as columns do (found by
    trying; both orders round to 8 bits in between, so that values may differ by tens)."""
    fewer = pixels.shape[0] - height, pixels.shape[1] - width
    return fewer[0] > 0 and fewer[0] > 2 * fewer[1]


def _along(pixels: Tensor, axis: int, target: int) -> Tensor:
    sums = torch.tensordot(weights(pixels.shape[axis], target), pixels.long(), dims=([1], [axis]))
    return ((sums.movedim(0, axis) + (1 << (BITS - 1))) >> BITS).clamp(0, 255).to(torch.uint8)
