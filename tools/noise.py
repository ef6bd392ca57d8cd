"""Float32 noise on purpose: layer inputs moved by one unit in the last place, to measure what rounding alone can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from fermi_engine.model.decoder import Decoder
from fermi_engine.model.vision_minicpm import MiniCpmVision
from fermi_engine.model.vision_qwen import QwenVision

Model = TypeVar("Model", Decoder, QwenVision, MiniCpmVision)


def one_ulp(x: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Each element moved to the next float32 up or down, or left alone, at random."""
    step = generator.integers(-1, 2, x.shape)
    moved = np.where(step > 0, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf)))
    return np.where(step == 0, x, moved).astype(np.float32)


def nudge(model: Model, seed: int) -> Model:
    """`model` itself, a decoder or tower, from here on with the input of every layer moved so: for one that is nobody else's."""
    generator = np.random.default_rng(seed)

    def nudged(forward: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def call(k: Any, x: np.ndarray, *rest: Any) -> np.ndarray:
            return forward(k, one_ulp(x, generator), *rest)
        return call

    for layer in model.blocks if isinstance(model, QwenVision) else model.layers:
        layer.forward = nudged(layer.forward)
    return model
