"""What the layers ask of whoever holds the weights (a pack, or a stub in tests), and the trace they report to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from fermi_engine.config import ModelConfig
from fermi_engine.formats import Experts, Matrix

Trace = Callable[[str, np.ndarray], None]


class Weights(Protocol):
    """Tensors by canonical name (Hugging Face names without prefix)."""

    config: ModelConfig

    def vector(self, name: str) -> np.ndarray:
        """A float32 tensor in its own shape."""

    def matrix(self, name: str) -> Matrix:
        """A stored matrix [rows, cols]."""

    def experts(self, layer: int) -> tuple[Experts, Experts]:
        """gate_up [2I, H] and down [H, I] of all experts of a layer."""


def silent(name: str, array: np.ndarray) -> None:
    """The trace of a run that nobody watches."""
