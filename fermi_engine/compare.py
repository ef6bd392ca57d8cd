"""Compare rules: how far a stage's output may lie from the reference, and the verdict. NumPy only.

A `Case` holds one set of inputs, the reference's outputs in float64 (integers and exact floats in their own type), and
bounds: `bounds[name]` belongs to output `name`, and what it means depends on the rule. u is 2^-24, half a unit in the
last place of 1.0 in float32. Limits are never chosen: each rule counts roundings, or measures torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]
Count = float | Callable[[Arrays], float]  # a number, or one that depends on the inputs' shapes

U = 2.0**-24
UNDERFLOW = 2.0**-150  # half the distance of subnormal numbers: the most that one rounding below 2^-126 costs
_OVERFLOW = 2.0**128  # what a float32 that rounds to infinity stands for


class Case(NamedTuple):
    """Inputs, reference outputs and bounds, each by name."""

    inputs: Arrays
    outputs: Arrays
    bounds: Arrays


class Verdict(NamedTuple):
    """`value` of `metric` against its `limit`; ratio = value / limit (0 for 0 / 0); `detail` names output and place."""

    metric: str
    value: float
    limit: float
    ratio: float
    passed: bool
    detail: str


def verdict(metric: str, value: float, limit: float, detail: str) -> Verdict:
    """Passed when value <= limit; NaN fails."""
    ratio = 0.0 if value == 0 else value / limit if limit > 0 else np.inf
    return Verdict(metric, float(value), float(limit), float(ratio), bool(value <= limit), detail)


class Rule:
    """Judges every output of a case; the worst verdict counts. Subclasses define `one`."""

    def judge(self, got: Mapping[str, np.ndarray], case: Case) -> Verdict:
        """Verdict on `got`, which must have the outputs of `case` and their shapes."""
        missing = [name for name in case.outputs if name not in got]
        if missing:
            return verdict("missing outputs", len(missing), 0, ", ".join(missing))
        verdicts = [self._shaped(name, np.asarray(got[name]), case) for name in case.outputs]
        failed = [v for v in verdicts if not v.passed]
        return max(failed or verdicts, key=lambda v: v.ratio if v.ratio == v.ratio else np.inf)

    def _shaped(self, name: str, got: np.ndarray, case: Case) -> Verdict:
        truth = case.outputs[name]
        if got.shape != truth.shape:
            return verdict("shape", 1, 0, f"{name}: shape {got.shape}, expected {truth.shape}")
        return self.one(name, got, case)

    def one(self, name: str, got: np.ndarray, case: Case) -> Verdict:
        """Verdict on one output of the right shape."""
        raise NotImplementedError

    def __repr__(self) -> str:
        parts = [f"{key}={_named(value)}" for key, value in vars(self).items() if value is not None]
        return f"{type(self).__name__}({', '.join(parts)})"


def _count(count: Count, case: Case) -> float:
    return float(count(case.inputs) if callable(count) else count)


def _named(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else getattr(value, "__name__", repr(value))


class Exact(Rule):
    """Same type, same bytes; NaN may have any payload."""

    def one(self, name: str, got: np.ndarray, case: Case) -> Verdict:
        truth = case.outputs[name]
        if got.dtype != truth.dtype:
            return verdict("type", 1, 0, f"{name}: type {got.dtype}, expected {truth.dtype}")
        differs = _bits(got) != _bits(truth)
        if got.dtype.kind == "f":
            differs &= ~(np.isnan(got) & np.isnan(truth))
        count = int(differs.sum())
        where = f", first at {_place(np.argmax(differs), got)}" if count else ""
        return verdict("differing", count, 0, f"{name}: {count} of {got.size} differ{where}")


class Rounding(Rule):
    """Element by element: |error| <= steps * (u * bound + 2^-150 * gain).

    bounds[name], of the output's shape: the sum of the magnitudes of the terms that make the element. steps: roundings
    on the longest chain from inputs to element; each costs at most u times the magnitude, or 2^-150 where the result is
    subnormal. gain: the largest factor by which later products can enlarge such an underflow.
    """

    def __init__(self, steps: Count, gain: Count = 1) -> None:
        self.steps, self.gain = steps, gain

    def one(self, name: str, got: np.ndarray, case: Case) -> Verdict:
        step = U * np.broadcast_to(saturated(case.bounds[name]), got.shape) + UNDERFLOW * _count(self.gain, case)
        return _worst("roundings", name, distance(got, case.outputs[name]) / step, _count(self.steps, case))


class TwiceReference(Rule):
    """max |error| <= max(2 * torch's own, steps * u * size).

    bounds[name], a scalar: the largest error torch makes in float32 on the same inputs. steps: roundings an element
    goes through by itself, sums left out, since theirs cancel on average; with few elements torch may be lucky, and
    nobody can be held to luck. size: max |reference|, or where terms may cancel `size(inputs)`, if that is larger.
    """

    def __init__(self, steps: Count, size: Count | None = None) -> None:
        self.steps, self.size = steps, size

    def one(self, name: str, got: np.ndarray, case: Case) -> Verdict:
        truth = case.outputs[name]
        size = np.nanmax(np.abs(saturated(truth)), initial=0.0 if self.size is None else _count(self.size, case))
        limit = max(2 * float(case.bounds[name]), _count(self.steps, case) * max(U * size, UNDERFLOW))
        return _worst("error", name, distance(got, truth), limit)


class Ulp(Rule):
    """|error| <= limit units in the last place that the exact result has in float32."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def one(self, name: str, got: np.ndarray, case: Case) -> Verdict:
        truth = case.outputs[name]
        return _worst("ulp", name, distance(got, truth) / ulp(truth), self.limit)


class Divergence(Rule):
    """Mean Kullback-Leibler divergence of logits [T, vocab] from the reference's <= 2 * bounds[name].

    bounds[name], a scalar: the largest that the reference shows against itself when its layer inputs move by one unit
    in the last place, or an activation code flips. With 8-bit activations a rounding may flip a code, which moves it by
    a whole quantum, so no bound in units of u exists.
    """

    def one(self, name: str, got: np.ndarray, case: Case) -> Verdict:
        value = float(divergence(case.outputs[name], got).mean())
        return verdict("mean KL", value, 2 * float(case.bounds[name]), f"{name}: over {len(got)} positions")


class Tokens(Rule):
    """Greedy ids [n] equal up to the first position where the reference is unsure.

    bounds[name] [n]: the reference's own float32 noise in units of the margin of its best logit over the second; from 1
    on a correct engine may choose otherwise, and all that follows differs. At least one position must be sure.
    """

    def one(self, name: str, got: np.ndarray, case: Case) -> Verdict:
        truth, unsure = case.outputs[name], case.bounds[name] >= 1
        compared = int(np.argmax(unsure)) if unsure.any() else len(truth)
        detail = f"{name}: {compared} of {len(truth)} compared"
        if unsure.any():
            detail += f", then noise is {case.bounds[name][compared]:.2g} of the margin"
        if compared == 0:
            return verdict("tokens compared", np.inf, 0, detail)
        differs = got[:compared] != truth[:compared]
        if differs.any():
            at = int(np.argmax(differs))
            detail += f"; first difference at position {at}: {got[at]}, expected {truth[at]}"
        return verdict("differing tokens", int(differs.sum()), 0, detail)


class All(Rule):
    """A rule of its own for each output; `others` for outputs without one."""

    def __init__(self, others: Rule | None = None, **rules: Rule) -> None:
        self.rules, self.others = rules, others

    def one(self, name: str, got: np.ndarray, case: Case) -> Verdict:
        rule = self.rules.get(name, self.others)
        if rule is None:
            return verdict("rule", 1, 0, f"{name}: the stage has no rule for this output")
        return rule.one(name, got, case)

    def __repr__(self) -> str:
        parts = [f"{name}={rule!r}" for name, rule in self.rules.items()]
        return f"All({', '.join(parts + ([f'others={self.others!r}'] if self.others else []))})"


def saturated(x: np.ndarray) -> np.ndarray:
    """float64, beyond float32 +-2^128: so infinity has a distance from the largest numbers."""
    return np.clip(np.asarray(x, np.float64), -_OVERFLOW, _OVERFLOW)


def distance(got: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """|got - truth| in float64; 0 where both are NaN, infinite where one is."""
    with np.errstate(invalid="ignore"):
        error = np.abs(saturated(got) - saturated(truth))
    nan = np.isnan(got), np.isnan(truth)
    return np.where(nan[0] & nan[1], 0.0, np.where(nan[0] | nan[1], np.inf, error))


def ulp(truth: np.ndarray) -> np.ndarray:
    """Distance of neighbouring float32 numbers at `truth` (float64): 2^-23 of its power of two, never under 2^-149."""
    magnitude = np.abs(np.asarray(truth, np.float64))
    _, exponent = np.frexp(np.clip(np.nan_to_num(magnitude), 2.0**-149, 2.0**127))
    return np.ldexp(1.0, np.maximum(exponent - 24, -149))


def divergence(truth: np.ndarray, got: np.ndarray) -> np.ndarray:
    """KL(softmax(truth) || softmax(got)) of each row, in nats: [T, vocab] twice -> [T]."""
    log_p, log_q = (_log_softmax(np.asarray(x, np.float64)) for x in (truth, got))
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _worst(metric: str, name: str, values: np.ndarray, limit: float) -> Verdict:
    if values.size == 0:
        return verdict(metric, 0.0, limit, f"{name}: empty")
    worst = int(np.argmax(values))
    return verdict(metric, float(values.ravel()[worst]), float(limit), f"{name}: worst at {_place(worst, values)}")


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)


def _place(flat: np.intp, array: np.ndarray) -> list[int]:
    return [int(i) for i in np.unravel_index(flat, array.shape)]
