"""What goes into a GPU's layers beside token ids: positions, and the embeddings of images in place of the table's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fermi_engine.kernels.device_arrays import DeviceArray
from fermi_engine.kernels.gpu import Device, Stream

Spliced = tuple[int, np.ndarray]  # which token of a run the first row stands for, and rows float32 [n, H]; the others follow it


class Inputs(Protocol):
    """Tokens begin..end of a sequence, counted from its first."""

    def encode(self, begin: int) -> None:
        """Have the embeddings of all images that tokens from `begin` on belong to."""

    def positions(self, begin: int, end: int) -> np.ndarray:
        """Positions int32 [3, end - begin], C-contiguous: time, height, width."""

    def embeddings(self, begin: int, end: int) -> Sequence[Spliced]:
        """Those of images, in runs without gaps, counted from `begin`."""


class TextInputs:
    """Text, whose positions are `shift` ahead of counts of tokens."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def encode(self, begin: int) -> None:
        """There is nothing to encode."""

    def positions(self, begin: int, end: int) -> np.ndarray:
        """int32 [3, end - begin], alike on all axes."""
        return np.tile(np.arange(begin + self.shift, end + self.shift, dtype=np.int32), (3, 1))

    def embeddings(self, begin: int, end: int) -> Sequence[Spliced]:
        """None."""
        return ()


TEXT = TextInputs()


def splice(device: Device, stream: Stream, x: DeviceArray, runs: Sequence[Spliced]) -> None:
    """Put embeddings in their places of x [T, H]; `stream` has to have written the rest of x."""
    for first, rows in runs:
        x.rows(first, rows.shape[0]).upload(device, np.ascontiguousarray(rows), stream, "image rows")
