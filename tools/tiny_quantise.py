"""Training against the errors of release formats: bfloat16 storage, and q4_0 for the matrices that a pack quantises."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fermi_engine.compression.rules import assign

BLOCK = 32
Shapes = Mapping[str, tuple[int, ...]]


def quantised_names(shapes: Shapes) -> frozenset[str]:
    """Names that the engine's own rules put into q4_0."""
    return frozenset(name for name, row in assign(shapes, "q4_0").items() if row.format == "q4_0")


def as_q4_0(w: Tensor) -> Tensor:
    """float32 [..., n] -> what remains of it after q4_0: reference quantize_q4_0 and dequantize_q4_0, any device."""
    blocks = w.unflatten(-1, (-1, BLOCK))
    d = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    inverse = torch.where(d == 0, 0, torch.ones_like(d) / d)
    codes = torch.trunc(blocks * inverse + 8.5).clamp(0, 15)
    return ((codes - 8) * d.to(torch.float16).to(w.dtype)).flatten(-2)


class Master:
    """All weights in one float32 vector, matrices for q4_0 first, so that a step needs few operations.

    `flat` [n] holds the values; `views` names them in their shapes. Rows of the quantised matrices are whole blocks, so
    the vector's beginning can be quantised at once.
    """

    def __init__(self, shapes: Shapes, flat: Tensor) -> None:
        names = quantised_names(shapes)
        self.shapes = {name: shapes[name] for name in sorted(shapes, key=lambda name: name not in names)}
        self.sizes = [math.prod(shape) for shape in self.shapes.values()]
        self.matrices = sum(math.prod(shapes[name]) for name in names)
        self.flat = flat

    @classmethod
    def of(cls, params: Mapping[str, Tensor], device: str = "cpu") -> Master:
        """Copies named weights."""
        empty = cls({name: tuple(w.shape) for name, w in params.items()}, torch.empty(0))
        empty.flat = torch.cat([params[name].flatten() for name in empty.shapes]).to(device)
        return empty

    def views(self, flat: Tensor | None = None) -> dict[str, Tensor]:
        """The named tensors inside `flat` (by default the weights): they share its memory."""
        parts = (self.flat if flat is None else flat).split(self.sizes)
        return {name: part.view(shape) for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)}

    def seen(self, dtype: torch.dtype, storage: bool = False, q4_0: bool = False) -> dict[str, Tensor]:
        """Weights as a forward pass sees them, leaves that collect gradients: matrices in `dtype`, the rest as they are.

        storage: all values rounded to bfloat16; q4_0: matrices quantised after that. A gradient with respect to what is
        seen counts for the master weight (straight-through).
        """
        with torch.no_grad():
            flat = self.flat.to(torch.bfloat16).to(self.flat.dtype) if storage else self.flat
            low = as_q4_0(flat[: self.matrices]) if q4_0 else flat[: self.matrices]
            parts = [*low.to(dtype).split(self.sizes[: self._quantised]),
                     *flat[self.matrices :].split(self.sizes[self._quantised :])]
            return {name: part.view(shape).detach().requires_grad_()
                    for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)}

    @property
    def _quantised(self) -> int:
        """How many tensors lie before the first that stays float32."""
        total = 0
        for count, size in enumerate(self.sizes):
            if total == self.matrices:
                return count
            total += size
        return len(self.sizes)

    def gradient(self, seen: Mapping[str, Tensor]) -> Tensor:
        """Gradients of `seen` as one float32 vector in the order of `flat`; zero where a step did not go."""
        return torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).flatten().to(self.flat.dtype)
                          for w in (seen[name] for name in self.shapes)])
