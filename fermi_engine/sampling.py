"""Which token comes next: settings, and the choice from a row of logits.

Order of the steps: repetition penalty, presence and frequency penalties, logit bias, temperature, top-k, top-p,
min-p, one draw. Temperature 0 stops after the bias and takes the highest logit.

The same seed and logits give the same tokens on every CPU: the only transcendental function is the engine's own
`exp`, sums run in one fixed order, and everything else is IEEE add, multiply, divide and compare.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import numpy as np

from fermi_engine.errors import FermiError, RequestError
from fermi_engine.tokenizer import check_ids

Exp = Callable[[np.ndarray], np.ndarray]

# exp(-87) is about the smallest normal float32: below it a weight is 0, so no subnormal number (whose value
# depends on the CPU's flush-to-zero mode) takes part.
_NEGLIGIBLE = -87.0
_LARGEST = float(np.finfo(np.float32).max)
_FIRST_REACH = 256


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Raises RequestError naming the field and its range.

    max_tokens: most tokens to produce. temperature: divides the logits; 0 takes the highest, ties to the lowest id.
    top_k: keeps the k likeliest; 0 keeps all. top_p: keeps the smallest set of the likeliest tokens whose
    probability reaches top_p; 0 keeps one. min_p: keeps tokens of at least min_p times the highest probability.
    presence_penalty, frequency_penalty: subtracted from the logit of a token generated before, once and per time.
    repetition_penalty: divides positive and multiplies other logits of tokens in the prompt or generated.
    logit_bias: id -> added to the logit; an infinite one bans the token (-inf) or shuts out all others (+inf).
    seed: None draws one from the system. stop: strings that end the text. ignore_eos: run past end-of-turn ids.
    """

    max_tokens: int = 512
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k"):
            _require(name, getattr(self, name), _is_count(getattr(self, name)), "a whole number of at least 0")
        for name in ("top_p", "min_p"):
            _require(name, getattr(self, name), _is_finite(getattr(self, name), 0, 1), "a number in 0..1")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(name, getattr(self, name), _is_finite(getattr(self, name)), "a finite number")
        _require("temperature", self.temperature, _is_finite(self.temperature, 0), "a finite number of at least 0")
        _require("repetition_penalty", self.repetition_penalty,
                 _is_finite(self.repetition_penalty, 0) and self.repetition_penalty > 0, "a finite number above 0")
        _require("seed", self.seed, self.seed is None or _is_count(self.seed), "None or a whole number of at least 0")
        _require("ignore_eos", self.ignore_eos, isinstance(self.ignore_eos, bool), "True or False")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "stop", checked_stops(self.stop))

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """Settings of a checkpoint's generation_config.json; `overrides` that are not None win.

        `do_sample: false` means temperature 0 and `max_new_tokens` is max_tokens. Fields absent or null keep the
        defaults of this class. Raises RequestError for values out of range.
        """
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        settings = {name: config[name] for name in names if config.get(name) is not None}
        if config.get("max_new_tokens") is not None:
            settings["max_tokens"] = config["max_new_tokens"]
        if config.get("do_sample") is False:
            settings["temperature"] = 0.0
        return cls(**{**settings, **{k: v for k, v in overrides.items() if v is not None}})

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with `changes`, checked again."""
        return dataclasses.replace(self, **changes)


class Sampler:
    """Chooses tokens for one sequence. Not to be shared: it counts tokens and owns a random generator.

    `exp` maps a float32 array to a float32 array; None takes the engine's kernel. Raises RequestError for prompt
    or logit_bias ids outside the vocabulary.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, prompt_ids: Sequence[int],
                 exp: Exp | None = None) -> None:
        check_ids(prompt_ids, vocab_size)
        for token_id in params.logit_bias:
            if token_id >= vocab_size:
                raise RequestError(f"logit_bias names token id {token_id}, outside the vocabulary 0..{vocab_size - 1}")
        self._params, self._vocab_size, self._exp = params, vocab_size, exp
        self._random = np.random.Generator(np.random.PCG64(params.seed))
        self._counts = np.zeros(vocab_size, np.int32)  # of generated tokens
        self._seen = np.zeros(vocab_size, bool)  # in the prompt or generated
        self._seen[np.asarray(prompt_ids, np.int64)] = True
        self._bias_ids = np.array(list(params.logit_bias), np.int64)
        with np.errstate(over="ignore"):  # beyond float32 counts as infinite
            self._bias = np.array(list(params.logit_bias.values()), np.float64).astype(np.float32)

    def sample(self, logits: np.ndarray) -> int:
        """The next id for `logits` (float32 [vocab], left unchanged). Call `accept` with the id that is kept.

        Raises FermiError when the logits hold NaN or +inf or nothing finite, RequestError when all are banned.
        """
        if logits.shape != (self._vocab_size,):
            raise ValueError(f"logits have shape {logits.shape}, expected ({self._vocab_size},)")
        _check_logits(logits)
        adjusted = self._biased(self._penalised(logits))
        top = adjusted.max()
        if top == -np.inf:
            raise RequestError("logit_bias and penalties ban every token the model allows; leave at least one")
        if self._params.temperature == 0:
            return int(np.argmax(adjusted))
        return self._draw(adjusted, top)

    def accept(self, token_id: int) -> None:
        """Count `token_id` as generated: the penalties of later tokens see it."""
        self._counts[token_id] += 1
        self._seen[token_id] = True

    def _penalised(self, logits: np.ndarray) -> np.ndarray:
        p = self._params
        if p.repetition_penalty == 1 and p.presence_penalty == 0 and p.frequency_penalty == 0:
            return logits
        out = logits.astype(np.float64)
        seen, made = np.flatnonzero(self._seen), np.flatnonzero(self._counts)
        if p.repetition_penalty != 1:
            old = out[seen]
            out[seen] = np.where(old > 0, old / p.repetition_penalty, old * p.repetition_penalty)
        out[made] -= p.presence_penalty + p.frequency_penalty * self._counts[made]
        with np.errstate(over="ignore"):  # -inf is a ban; +inf would shut out every other token
            return np.minimum(out, _LARGEST).astype(np.float32)

    def _biased(self, logits: np.ndarray) -> np.ndarray:
        if not self._bias_ids.size:
            return logits
        out = logits.copy()
        with np.errstate(over="ignore", invalid="ignore"):  # -inf + inf: an infinite bias replaces the logit
            sums = out[self._bias_ids] + self._bias
        out[self._bias_ids] = np.where(np.isinf(self._bias), self._bias, sums)
        forced = out == np.inf
        return np.where(forced, np.float32(0), np.float32(-np.inf)) if forced.any() else out

    def _draw(self, logits: np.ndarray, top: np.float32) -> int:
        """One id by `logits` (float32 [vocab], highest `top`): temperature, top-k, top-p, min-p, one draw."""
        p = self._params
        ids = None
        if 0 < p.top_k < logits.size:
            # chosen before the division, which keeps the order but can round two logits into a tie
            ids = np.sort(heaviest(logits, p.top_k))
            logits = logits[ids]
        chosen = self._pick(self._weights(_scaled(logits, top, p.temperature)), self._random.random())
        return int(chosen if ids is None else ids[chosen])

    def _weights(self, scaled: np.ndarray) -> np.ndarray:
        """exp of `scaled` (float32, at most 0), exactly 0 where that is negligible."""
        weights = np.zeros(scaled.size, np.float32)
        large = np.flatnonzero(scaled >= _NEGLIGIBLE)
        weights[large] = self._exp_f32()(scaled[large])
        return weights

    def _pick(self, weights: np.ndarray, uniform: float) -> int:
        """Index into `weights` after top-p and min-p; `uniform` in [0, 1) decides."""
        p = self._params
        total = np.cumsum(weights, dtype=np.float64)[-1]
        limit = int(np.count_nonzero((weights >= weights.max() * np.float32(p.min_p)) & (weights > 0)))
        if p.top_p == 1 and p.min_p == 0:
            order, cumulative = _ranked(weights, limit, uniform * total)
            kept, mass = order.size, total
        else:
            reach = p.top_p * total if p.top_p < 1 else math.inf
            order, cumulative = _ranked(weights, limit, reach)
            kept = min(int(np.searchsorted(cumulative, reach, side="left")) + 1, order.size)
            mass = cumulative[kept - 1]
        place = int(np.searchsorted(cumulative[:kept], uniform * mass, side="right"))
        return int(order[min(place, kept - 1)])

    def _exp_f32(self) -> Exp:
        if self._exp is None:
            from fermi_engine import kernels
            self._exp = kernels.get().exp_f32
        return self._exp


def heaviest(weights: np.ndarray, count: int) -> np.ndarray:
    """Indices (int64 [count]) of the `count` highest of `weights`, highest first, ties to the lower index."""
    size = weights.size
    if count >= size:
        chosen = np.arange(size)
    else:
        smallest = np.partition(weights, size - count)[size - count]
        above = np.flatnonzero(weights > smallest)
        chosen = np.concatenate([above, np.flatnonzero(weights == smallest)[:count - above.size]])
    return chosen[np.lexsort((chosen, -weights[chosen]))]


def checked_stops(stops: Any) -> tuple[str, ...]:
    """`stops` (one string or several) as a tuple. Raises RequestError unless all are non-empty strings."""
    stops = (stops,) if isinstance(stops, str) else stops
    good = isinstance(stops, Sequence) and all(isinstance(s, str) and s for s in stops)
    _require("stop", stops, good, "non-empty strings")
    return tuple(stops)


def _ranked(weights: np.ndarray, limit: int, reach: float) -> tuple[np.ndarray, np.ndarray]:
    """The heaviest indices, and their cumulative weights (float64), as far as `reach` is passed, at most `limit`.

    Sorting a whole vocabulary for every token would cost more than the draw; the first few hundred mostly do.
    """
    count = min(_FIRST_REACH, limit)
    while True:
        order = heaviest(weights, count)
        cumulative = np.cumsum(weights[order], dtype=np.float64)
        if count == limit or cumulative[-1] > reach:
            return order, cumulative
        count = min(8 * count, limit)


def _scaled(logits: np.ndarray, top: np.float32, temperature: float) -> np.ndarray:
    """(logits - top) / temperature in float64, rounded once: 0 at the top, so neither tiny nor huge values overflow."""
    with np.errstate(over="ignore"):
        return ((logits.astype(np.float64) - float(top)) / float(temperature)).astype(np.float32)


def _check_logits(logits: np.ndarray) -> None:
    top = logits.max()  # NaN if any is
    if np.isfinite(top):
        return
    found = "NaN" if np.isnan(top) else "+inf" if top > 0 else "only -inf"
    raise FermiError(f"the model's logits hold {found}; its weights may be damaged: run 'fermi-engine info --check' "
                     "and 'fermi-engine verify' on it")


def _checked_bias(bias: Any) -> dict[int, float]:
    good = isinstance(bias, Mapping) and all(
        _is_count(k) and isinstance(v, Real) and not isinstance(v, bool) and not math.isnan(v) for k, v in bias.items())
    _require("logit_bias", bias, good, "a mapping of token ids of at least 0 to numbers")
    return {int(k): float(v) for k, v in bias.items()}


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= 0


def _is_finite(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high


def _require(name: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise RequestError(f"{name} = {value!r}, expected {expected}")
