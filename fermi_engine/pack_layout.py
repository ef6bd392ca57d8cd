"""How the bytes of a pack's tensors are divided: one matrix, or the experts of a layer side by side."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fermi_engine.formats import FORMATS, Experts, Matrix

PAGE, LINE = 4096, 64  # bytes: alignment of experts, and of everything else


class Part(NamedTuple):
    """One matrix inside the data: `offset` in bytes from the start of its tensor, or of its expert in a blob."""

    format: str
    rows: int
    cols: int
    offset: int = 0

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Shape of its stored bytes, uint8. FormatError or KeyError where metadata is nonsense."""
        return FORMATS[self.format].stored_shape(self.rows, self.cols)

    def matrix(self, data: np.ndarray) -> Matrix:
        """The matrix in flat uint8 `data`, which starts where `offset` counts from; no copy."""
        groups, width = self.stored_shape
        span = data[self.offset:self.offset + groups * width]
        return Matrix(self.format, self.rows, self.cols, span.reshape(groups, width))


class Blob(NamedTuple):
    """Experts of one layer: `stride` bytes each."""

    gate_up: Part
    down: Part
    stride: int
    experts: int

    def projections(self, data: np.ndarray) -> list[Experts]:
        """gate_up and down in the flat uint8 `data` of the blob; no copy."""
        return [Experts(part.format, self.experts, part.rows, part.cols, self.stride, data[part.offset:])
                for part in (self.gate_up, self.down)]


def blob_name(layer: int) -> str:
    """Name of the tensor that holds the experts of a layer."""
    return f"layers.{layer}.mlp.experts.blob"


def parse_part(value: dict[str, Any]) -> Part | Blob:
    """A matrix or a blob of experts from metadata, with its arithmetic checked.

    ValueError, TypeError, LookupError or FormatError where it is nonsense.
    """
    if "stride" not in value:
        part = _parse_matrix(value)
        if part.offset:
            raise ValueError(f"a matrix at byte {part.offset} of its tensor, expected 0")
        return part
    blob = Blob(_parse_matrix(value["gate_up"]), _parse_matrix(value["down"]), value["stride"], value["experts"])
    _check_naturals(blob.stride, blob.experts)
    position = 0
    for part in (blob.gate_up, blob.down):
        if part.offset < position or part.offset % LINE:
            raise ValueError(f"an expert's matrix at byte {part.offset}, expected a multiple of {LINE} from {position}")
        position = part.offset + math.prod(part.stored_shape)
    if blob.stride < position or blob.stride % PAGE:
        raise ValueError(f"experts of {blob.stride} bytes, expected a multiple of {PAGE} of at least {position}")
    return blob


def _parse_matrix(value: dict[str, Any]) -> Part:
    part = Part(**value)
    _check_naturals(part.rows, part.cols, part.offset)
    part.stored_shape  # noqa: B018 - raises for an unknown format or an odd row length
    return part


def _check_naturals(*values: Any) -> None:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"sizes {list(values)}, expected whole numbers")
