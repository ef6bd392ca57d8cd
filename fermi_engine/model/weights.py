"""What the layers ask of whoever holds the weights (a pack, or a stub in tests), and the trace they report to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np

from fermi_engine.config import ModelConfig
from fermi_engine.formats import Experts, Matrix

Trace = Callable[[str, np.ndarray], None]
# What layers report beside the tensors that a dump of the reference holds: `expert_rows` [T, k], the row of each of a token's
# experts in `expert_hidden` [T * k, I] (what goes into their second matrix) and `expert_out` [T * k, H]; `dense_hidden`.
INNER = ("expert_rows", "expert_hidden", "expert_out", "dense_hidden")


class Tensors(Protocol):
    """Tensors by canonical name (Hugging Face names without prefix)."""

    def vector(self, name: str) -> np.ndarray:
        """A float32 tensor in its own shape."""

    def matrix(self, name: str) -> Matrix:
        """A stored matrix [rows, cols]."""


class Weights(Tensors, Protocol):
    """Those of a text model."""

    config: ModelConfig

    def experts(self, layer: int) -> tuple[Experts, Experts]:
        """gate_up [2I, H] and down [H, I] of all experts of a layer."""


class SomeLayers:
    """Some layers of a model as a model of its own (Weights)."""

    def __init__(self, weights: Weights, layers: tuple[int, ...]) -> None:
        self._weights, self._layers = weights, layers
        kinds = tuple(weights.config.layer_types[layer] for layer in layers)
        self.config = dataclasses.replace(weights.config, num_hidden_layers=len(layers), layer_types=kinds)

    def _name(self, name: str) -> str:
        if not name.startswith("layers."):
            return name
        layer, _, rest = name.removeprefix("layers.").partition(".")
        return f"layers.{self._layers[int(layer)]}.{rest}"

    def vector(self, name: str) -> np.ndarray:
        return self._weights.vector(self._name(name))

    def matrix(self, name: str) -> Matrix:
        return self._weights.matrix(self._name(name))

    def experts(self, layer: int) -> tuple[Experts, Experts]:
        return self._weights.experts(self._layers[layer])


def silent(name: str, array: np.ndarray) -> None:
    """The trace of a run that nobody watches."""
