"""What a model's logits are worth: perplexity, and divergence from another model's, with error bars and by position.

All in float64 from float32 logits. Kullback-Leibler divergence in nats: `kl` = sum p log(p / q), p the base and q the model
(what the model loses of the base); `kl_back` the same with both exchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fermi_engine.errors import RequestError

HEAD_ROWS = 32  # logits of this many positions at a time: 32 MB of float32 at 248,320 entries, three times that in float64
P99 = 0.99


@dataclass
class Records:
    """One entry a predicted token: `position` int32 (tokens read before it), `window` int32, nll float64 in nats; against a
    base also `base_nll`, `kl`, `kl_back` float64 and `same` bool (the likeliest token is the base's); else those are empty."""

    position: np.ndarray
    window: np.ndarray
    nll: np.ndarray
    base_nll: np.ndarray
    kl: np.ndarray
    kl_back: np.ndarray
    same: np.ndarray

    @classmethod
    def join(cls, parts: list[Records]) -> Records:
        """All entries of `parts`, which must be one at least, in order."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def arrays(self) -> dict[str, np.ndarray]:
        """By field name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float32 [T, vocab] -> float64 log-probabilities [T, vocab]. RequestError for logits that are NaN or infinite."""
    if not np.isfinite(logits).all():
        raise RequestError("logits are NaN or infinite; the weights are damaged: fermi-engine info --check says where")
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


def score(logits: np.ndarray, targets: np.ndarray, base: np.ndarray | None, window: int, first: int) -> Records:
    """Entries of positions first.. : logits [T, vocab] of the model and log-probabilities `base` [T, vocab] (float64, of
    `log_softmax`) for the tokens `targets` [T] that follow."""
    q, rows = log_softmax(logits), np.arange(len(targets))
    none = np.empty(0)
    compared = (none, none, none, none.astype(bool))
    if base is not None:
        p_kl, q_kl = ((np.exp(a) * (a - b)).sum(axis=-1) for a, b in ((base, q), (q, base)))
        compared = (-base[rows, targets], p_kl, q_kl, base.argmax(axis=-1) == q.argmax(axis=-1))
    return Records((first + 1 + rows).astype(np.int32), np.full(len(targets), window, np.int32), -q[rows, targets], *compared)


def mean_error(values: np.ndarray, window: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error: the larger of that of independent tokens and that of independent windows.

    Tokens of one window share a subject, so that the first alone is too small; it is kept for texts of few windows, over
    which the second is chance itself. The second is that of a ratio of sums over clusters (Cochran, Sampling Techniques,
    section 9A). NaN for no values, an error of 0 for one.
    """
    count = len(values)
    if not count:
        return math.nan, math.nan
    mean = float(values.mean())
    if count == 1:
        return mean, 0.0
    error = float(values.std(ddof=1)) / math.sqrt(count)
    deviations = np.bincount(np.unique(window, return_inverse=True)[1], weights=values - mean)
    clusters = len(deviations)
    if clusters > 1:
        error = max(error, math.sqrt(clusters / (clusters - 1) * float(np.square(deviations).sum())) / count)
    return mean, error


def summary(records: Records) -> dict[str, Any]:
    """Figures of one model: tokens, ppl with its error; against a base also the base's ppl, the difference of mean nll (of
    the same tokens, so with a smaller error than either), both divergences (mean, error, median, p99, max) and top-1."""
    nll, nll_error = mean_error(records.nll, records.window)
    said: dict[str, Any] = {"tokens": len(records.nll), "windows": len(np.unique(records.window)), "nll": nll,
                            "nll_error": nll_error, "ppl": math.exp(nll), "ppl_error": math.exp(nll) * nll_error}
    if not len(records.kl):
        return said
    base, _ = mean_error(records.base_nll, records.window)
    loss, loss_error = mean_error(records.nll - records.base_nll, records.window)
    same, same_error = mean_error(records.same.astype(np.float64), records.window)
    return {**said, "base_ppl": math.exp(base), "nll_loss": loss, "nll_loss_error": loss_error,
            "kl": _spread(records.kl, records.window), "kl_back": _spread(records.kl_back, records.window),
            "top1": same, "top1_error": same_error}


def _spread(values: np.ndarray, window: np.ndarray) -> dict[str, float]:
    mean, error = mean_error(values, window)
    return {"mean": mean, "error": error, "median": float(np.median(values)), "p99": float(np.quantile(values, P99)),
            "max": float(values.max())}


def by_position(records: Records) -> list[dict[str, Any]]:
    """The same figures of positions 1, 2..3, 4..7 and so on: how much context a prediction had."""
    rows = []
    power = np.floor(np.log2(records.position)).astype(int)
    for exponent in np.unique(power):
        mask = power == exponent
        compared = len(records.kl) > 0
        part = Records(*(array[mask] if len(array) or not compared else array for array in
                         (records.position, records.window, records.nll)),
                       *(array[mask] if compared else array for array in
                         (records.base_nll, records.kl, records.kl_back, records.same)))
        rows.append({"from": 2**int(exponent), "to": int(records.position[mask].max()), **summary(part)})
    return rows
