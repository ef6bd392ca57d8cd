"""Training against the errors of release formats: bfloat16 storage, and q4_0 for the matrices that a pack quantises."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fermi_engine.rules import assign

BLOCK = 32


def quantised_names(shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Names that the engine's own rules put into q4_0."""
    return frozenset(name for name, row in assign(shapes, "q4_0").items() if row.format == "q4_0")


def as_q4_0(w: Tensor) -> Tensor:
    """float32 [..., n] -> what remains of it after q4_0: reference quantize_q4_0 and dequantize_q4_0, any device."""
    blocks = w.unflatten(-1, (-1, BLOCK))
    d = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    inverse = torch.where(d == 0, 0, torch.ones_like(d) / d)
    codes = torch.trunc(blocks * inverse + 8.5).clamp(0, 15)
    return ((codes - 8) * d.to(torch.float16).to(w.dtype)).flatten(-2)


def prepared(params: Mapping[str, Tensor], dtype: torch.dtype, matrices: frozenset[str], storage: bool = False,
             q4_0: bool = False) -> dict[str, Tensor]:
    """Weights for a forward pass: `matrices` in `dtype`, the others as they are.

    storage: all values rounded to bfloat16; q4_0: `matrices` quantised after that. Gradients pass straight through.
    """
    return {name: _prepared(w, storage, q4_0 and name in matrices).to(dtype if name in matrices else w.dtype)
            for name, w in params.items()}


def _prepared(w: Tensor, storage: bool, q4_0: bool) -> Tensor:
    with torch.no_grad():
        stored = w.to(torch.bfloat16).to(w.dtype) if storage else w
        seen = as_q4_0(stored) if q4_0 else stored
    return w + (seen - w).detach() if storage or q4_0 else w
