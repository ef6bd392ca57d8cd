"""Oracle: one row of the test half of the stage table, a reference with the inputs to hold it against.

A reference is a function of (inputs as tensors, dtype), built from reference/. In float64 it is the truth; what it
gives in float32, against that, is the error torch makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from fermi_engine.compare import Arrays, Case
from tests.strategies import Draws

Tensors = dict[str, Tensor]
Reference = Callable[[Tensors, torch.dtype], Tensors]


@dataclass(frozen=True)
class Oracle:
    """One row. `golden` is the structure of the golden's inputs; `structure` what Hypothesis draws in its place.

    bounds(inputs) gives bounds by output name; an output of dtype float64 without one gets torch's largest float32
    error. `usable` refuses inputs on which a correct engine may differ (a router that hardly prefers one expert).
    `pinned` outputs are no business of the reference: a golden keeps what the scalar engine gave.
    """

    build: Callable[..., Arrays]
    structure: Mapping[str, st.SearchStrategy[Any]]
    golden: Mapping[str, Any]
    reference: Reference
    bounds: Callable[[Tensors], Arrays] = field(default=lambda a: {})
    usable: Callable[[Tensors], bool] = field(default=lambda a: True)
    pinned: tuple[str, ...] = ()

    def inputs(self, seed: int, **structure: Any) -> Arrays:
        """Arrays by name for a structure."""
        return self.build(Draws(seed), **structure)

    def case(self, inputs: Arrays) -> Case:
        """The reference's outputs and bounds for these inputs."""
        outputs = self.run(inputs, torch.float64)
        bounds = self.bounds(tensors(inputs))
        unbounded = [name for name, value in outputs.items() if value.dtype == np.float64 and name not in bounds]
        if unbounded:
            single = self.run(inputs, torch.float32)
            bounds |= {name: np.array(largest(single[name], outputs[name])) for name in unbounded}
        return Case(inputs, outputs, bounds)

    def errors(self, case: Case) -> dict[str, float]:
        """Per output that is not exact, torch's largest float32 error."""
        single = self.run(case.inputs, torch.float32)
        return {name: largest(single[name], truth) for name, truth in case.outputs.items() if truth.dtype == np.float64}

    def run(self, inputs: Arrays, dtype: torch.dtype) -> Arrays:
        """The reference in `dtype`."""
        with torch.no_grad():
            outputs = self.reference(tensors(inputs), dtype)
        return {name: np.ascontiguousarray(value.numpy()) for name, value in outputs.items()}


def tensors(arrays: Arrays) -> Tensors:
    """Copies, because torch wants memory it may write to."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def largest(got: np.ndarray, truth: np.ndarray) -> float:
    """Largest |got - truth| where both are finite."""
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(np.float64) - truth)
    return float(error[np.isfinite(error)].max(initial=0.0))


def floats(a: Tensors, dtype: torch.dtype, *names: str) -> list[Tensor]:
    return [a[name].to(dtype) for name in names]
