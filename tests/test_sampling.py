"""Sampling: settings and their ranges, every filter against a slow exact definition, penalties worked out by hand."""

from __future__ import annotations

import itertools
import math
import sys
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fermi_engine
from fermi_engine.errors import FermiError, RequestError
from fermi_engine.sampling import Sampler, SamplingParams, heaviest

NAN, INF = math.nan, math.inf


def sampler(vocab_size: int, prompt=(), exp=np.exp, **fields) -> Sampler:
    return Sampler(SamplingParams(**fields), vocab_size, list(prompt), exp=exp)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


BAD = {
    "max_tokens": [-1, 1.5, NAN, "5", True, None], "temperature": [-0.1, NAN, INF, -INF, "1", None, True],
    "top_k": [-1, 2.5, NAN, None], "top_p": [-0.01, 1.01, NAN, "0.5", None], "min_p": [-0.01, 1.01, NAN],
    "presence_penalty": [NAN, INF, "x"], "frequency_penalty": [NAN, -INF],
    "repetition_penalty": [0, -1, NAN, INF, 0.0], "seed": [-1, 0.5, "7", True], "ignore_eos": [1, None],
    "stop": [("",), "", ("a", 3), 3, None], "logit_bias": [{1: NAN}, {-1: 0.0}, {"1": 0.0}, {1: "x"}, [1], None,
                                                            {1: True}],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_settings_out_of_range_name_the_field_and_the_range(field, value):
    with pytest.raises(RequestError, match=f"^{field} = .*, expected .+") as info:
        SamplingParams(**{field: value})
    assert "\n" not in str(info.value)


def test_settings_at_the_ends_of_their_ranges():
    params = SamplingParams(max_tokens=0, temperature=0, top_k=0, top_p=0, min_p=1, repetition_penalty=1e-6, seed=0,
                            logit_bias={np.int64(3): -INF, 4: INF}, stop="x")
    assert (params.stop, params.logit_bias) == (("x",), {3: -INF, 4: INF})
    assert SamplingParams(max_tokens=10**9, top_p=1, min_p=0, presence_penalty=-2, frequency_penalty=np.float32(2))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert hash(SamplingParams(logit_bias={1: 2.0})) is not None


def test_defaults_and_copies():
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (512, 1.0, 0, 1.0, 0.0)
    assert params.replace(top_k=3).top_k == 3
    with pytest.raises(RequestError, match="top_k"):
        params.replace(top_k=-3)
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = NAN
    assert params.logit_bias == {1: 1.0}


def test_generation_config():
    config = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": None, "max_new_tokens": 7,
              "repetition_penalty": 1.05, "eos_token_id": [1, 2], "transformers_version": "5"}
    params = SamplingParams.from_generation_config(config, top_p=0.5, temperature=None, min_p=0.1)
    assert params == SamplingParams(temperature=0.7, top_k=20, top_p=0.5, min_p=0.1, max_tokens=7,
                                    repetition_penalty=1.05)
    assert SamplingParams.from_generation_config({}) == SamplingParams()
    assert SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.7}).temperature == 0
    assert SamplingParams.from_generation_config({"do_sample": False}, temperature=1.5).temperature == 1.5
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams.from_generation_config({"temperature": "hot"})


@given(st.lists(st.sampled_from([-INF, -1.0, -0.0, 0.0, 1.0, 1.5, 3e38, -3e38]), min_size=1, max_size=40))
@settings(deadline=None)
def test_greedy_takes_the_highest_and_of_ties_the_lowest_id(values):
    if max(values) == -INF:
        values[0] = 0.0
    expected = min(range(len(values)), key=lambda i: (-values[i], i))
    assert sampler(len(values), temperature=0).sample(f32(*values)) == expected
    assert sampler(len(values), temperature=1e-300, top_k=1).sample(f32(*values)) == expected
    assert sampler(len(values), top_p=0).sample(f32(*values)) == expected


def test_greedy_needs_no_exp():
    def forbidden(x):
        raise AssertionError("exp was called")

    assert sampler(3, exp=forbidden, temperature=0).sample(f32(1, 3, 2)) == 1


# Integer logits and exp2 make every weight a power of two: sums are exact, so the slow definition can be too.
def slow_kept(logits: list[int], params: SamplingParams) -> list[tuple[int, int]]:
    """(id, weight as a multiple of the smallest) kept by top-k, top-p, min-p, in the order of the draw."""
    def heavy_first(ids):
        return sorted(ids, key=lambda i: (-weight[i], i))

    low = min(logits)
    weight = [2 ** (x - low) for x in logits]
    kept = heavy_first(range(len(logits)))
    if params.top_k:
        kept = kept[:params.top_k]
    total = sum(weight[i] for i in kept)
    if params.top_p < 1:
        reached, cut = 0, []
        for i in kept:
            cut.append(i)
            reached += weight[i]
            if reached >= Fraction(params.top_p) * total:
                break
        kept = cut
    return [(i, weight[i]) for i in kept if weight[i] >= Fraction(params.min_p) * weight[kept[0]]]


def slow_draw(kept: list[tuple[int, int]], uniform: float) -> int:
    reached = list(itertools.accumulate(w for _, w in kept))
    below = Fraction(uniform * float(reached[-1]))  # the product is the one thing that rounds
    return next(i for (i, _), upto in zip(kept, reached, strict=True) if below < upto)


@given(size=st.sampled_from([1, 2, 3, 20, 255, 256, 257, 2500]), spread=st.sampled_from([0, 1, 3, 12]),
       top_k=st.sampled_from([0, 1, 2, 5, 256, 257, 5000]), top_p=st.integers(0, 64), min_p=st.integers(0, 64),
       off=st.sampled_from(["", "p", "m", "pm"]), seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=2 * settings.default.max_examples)
def test_filters_and_draw_equal_the_slow_definition(size, spread, top_k, top_p, min_p, off, seed):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-spread, spread + 1, size)
    params = SamplingParams(top_k=top_k, top_p=1.0 if "p" in off else top_p / 64,
                            min_p=0.0 if "m" in off else min_p / 64)
    made = Sampler(params, size, [], exp=np.exp2)
    kept = slow_kept(logits.tolist(), params)
    edges = np.cumsum([0] + [w for _, w in kept])  # a uniform on an edge belongs to the token after it
    for uniform in [0.0, 1 - 2.0**-53, *rng.random(3), *(rng.choice(edges[:-1], 3) / edges[-1])]:
        made._random = SimpleNamespace(random=lambda u=uniform: float(u))
        assert made.sample(logits.astype(np.float32)) == slow_draw(kept, float(uniform))


def test_filters_by_hand():
    logits = f32(0, 2, 2, 1)  # weights 1/4, 1, 1, 1/2 in powers of two; sum 2.75

    def reachable(**fields):
        made = sampler(4, exp=np.exp2, **fields)
        drawn = []
        for uniform in np.linspace(0, 1, 200, endpoint=False):
            made._random = SimpleNamespace(random=lambda u=uniform: float(u))
            drawn.append(made.sample(logits))
        return list(dict.fromkeys(drawn))

    assert reachable() == [1, 2, 3, 0]
    assert reachable(top_k=1) == [1]
    assert reachable(top_k=2) == [1, 2]
    assert reachable(top_p=1 / 2.75) == [1]
    assert reachable(top_p=1.01 / 2.75) == [1, 2]
    assert reachable(top_p=2.6 / 2.75) == [1, 2, 3, 0]
    assert reachable(min_p=0.5) == [1, 2, 3]
    assert reachable(min_p=0.51) == [1, 2]
    assert reachable(min_p=1.0) == [1, 2]
    assert reachable(top_k=3, top_p=0.9) == [1, 2, 3]  # 2.25 of the 2.5 that top-k left
    assert reachable(temperature=0.5, min_p=0.25) == [1, 2, 3]
    assert reachable(temperature=2.0, min_p=0.5) == [1, 2, 3, 0]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(1, 70))
def test_heaviest_is_a_sort_by_weight_then_index(values, count):
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert heaviest(np.array(values, np.float32), count).tolist() == expected


def chi_square_limit(degrees: int, chance: float) -> float:
    """A value that chi-square passes with less than `chance` (Laurent and Massart 2000, Lemma 1)."""
    x = -math.log(chance)
    return degrees + 2 * math.sqrt(degrees * x) + 2 * x


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.7}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1},
                                    {"temperature": 1.5, "top_k": 5, "top_p": 0.95, "min_p": 0.05}])
def test_frequencies_follow_the_distribution(fields):
    draws = 10_000
    logits = f32(0.3, -1.2, 1.9, 0.0, 0.9, -0.4, -2.5)
    params = SamplingParams(seed=7, **fields)
    weights = np.exp(logits.astype(np.float64) / params.temperature)
    order = sorted(range(7), key=lambda i: -weights[i])[:params.top_k or 7]
    reached = np.cumsum(weights[order]) / weights[order].sum()
    order = order[:int(np.searchsorted(reached, params.top_p)) + 1]
    order = [i for i in order if weights[i] >= params.min_p * weights.max()]
    expected = draws * weights[order] / weights[order].sum()
    made = Sampler(params, 7, [], exp=np.exp)
    counts = np.bincount([made.sample(logits) for _ in range(draws)], minlength=7)
    assert counts.sum() == counts[order].sum()
    statistic = float(((counts[order] - expected) ** 2 / expected).sum())
    assert statistic < chi_square_limit(len(order) - 1, 1e-6)


def test_same_seed_same_tokens_and_one_draw_per_token():
    logits = np.random.default_rng(0).normal(size=500).astype(np.float32)

    def tokens(seed):
        made = sampler(500, seed=seed)
        return [made.sample(logits) for _ in range(50)]

    assert tokens(3) == tokens(3) != tokens(4)
    assert tokens(None) != tokens(None)
    uniforms = np.random.Generator(np.random.PCG64(3)).random(50)
    order = np.argsort(-logits, kind="stable")
    cumulative = np.cumsum(np.exp(logits[order] - logits.max()), dtype=np.float64)
    assert tokens(3) == order[np.searchsorted(cumulative, uniforms * cumulative[-1], side="right")].tolist()


def top(made: Sampler, logits: np.ndarray) -> np.ndarray:
    return made._biased(made._penalised(logits))


def test_penalties_by_hand():
    logits = f32(2, -2, 4, 0, -INF, 1)
    made = sampler(6, prompt=[0, 1, 4], repetition_penalty=2, presence_penalty=0.5, frequency_penalty=0.25)
    # the repetition penalty halves positive and doubles negative logits of the prompt
    assert top(made, logits).tolist() == [1, -4, 4, 0, -INF, 1]
    made.accept(2)
    made.accept(2)
    made.accept(1)
    # 2: 4/2 - 0.5 - 2*0.25; 1: -2*2 - 0.5 - 0.25
    assert top(made, logits).tolist() == [1, -4.75, 1, 0, -INF, 1]
    assert logits.tolist() == [2, -2, 4, 0, -INF, 1]


def test_presence_and_frequency_ignore_the_prompt():
    made = sampler(2, prompt=[0, 0], presence_penalty=5, frequency_penalty=5, temperature=0)
    assert made.sample(f32(1, 0)) == 0
    made.accept(0)
    assert made.sample(f32(1, 0)) == 1


def test_negative_penalties_and_rewards():
    made = sampler(2, prompt=[1], repetition_penalty=0.5, temperature=0)
    assert top(made, f32(1, 0.75)).tolist() == [1, 1.5]
    made = sampler(2, presence_penalty=-1, temperature=0)
    made.accept(1)
    assert top(made, f32(1, 0.75)).tolist() == [1, 1.75]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("fields", "drawn"), [
    ({"repetition_penalty": 1e-300}, 0), ({"repetition_penalty": 1e300}, 1), ({"presence_penalty": -1e300}, 0)])
def test_penalties_of_any_size_leave_a_choice(fields, drawn, temperature):
    made = sampler(3, prompt=[0], temperature=temperature, seed=1, **fields)
    made.accept(0)
    assert made.sample(f32(99, 98, -INF)) == drawn


def test_bias_by_hand():
    assert top(sampler(3, logit_bias={0: 1.5, 2: -1}), f32(1, 2, 3)).tolist() == [2.5, 2, 2]
    assert sampler(3, logit_bias={2: -INF}, temperature=0).sample(f32(1, 2, 3)) == 1
    assert sampler(3, logit_bias={0: -100}, temperature=0).sample(f32(5, 2, 3)) == 2
    assert sampler(3, logit_bias={0: 1e300}, temperature=0).sample(f32(1, 2, 3)) == 0
    logits = f32(1, 2)
    assert sampler(2, logit_bias={0: 5}, temperature=0).sample(logits) == 0
    assert logits.tolist() == [1, 2]


def test_infinite_bias_shuts_out_all_others():
    for temperature in (0, 1):
        made = sampler(4, logit_bias={1: INF, 2: INF, 3: -INF}, temperature=temperature, seed=1)
        drawn = {made.sample(f32(9, -INF, 5, 7)) for _ in range(60)}
        assert drawn == ({1, 2} if temperature else {1})


def test_bias_comes_after_the_penalties():
    # 2/2 + 4 = 5 beats 4.5; (2 + 4)/2 = 3 would not
    assert sampler(2, prompt=[0], repetition_penalty=2, logit_bias={0: 4}, temperature=0).sample(f32(2, 4.5)) == 0


def test_banned_tokens_are_never_drawn():
    logits = f32(*([-INF] * 300), 0, *([-INF] * 300), 0)
    for fields in ({}, {"top_k": 5}, {"top_p": 0.9999}, {"min_p": 1e-9}, {"temperature": 1e30}):
        made = sampler(602, seed=0, **fields)
        for uniform in (0.0, 0.49, 0.51, 1 - 2.0**-53):
            made._random = SimpleNamespace(random=lambda u=uniform: u)
            assert made.sample(logits) == (300 if uniform < 0.5 else 601)


def test_rounding_of_the_sums_draws_no_banned_token():
    # in id order the small weights add up to 2**-44 before the 1; heaviest first each is lost beside it
    logits = f32(*([-54] * 1024), 0, -INF)
    made = sampler(1026, exp=np.exp2)
    made._random = SimpleNamespace(random=lambda: 1 - 2.0**-53)
    assert made.sample(logits) == 1023


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e30, 1e308])
def test_extreme_temperatures(temperature):
    made = sampler(3, temperature=temperature, seed=0)
    drawn = {made.sample(f32(3e38, -3e38, 2.9e38)) for _ in range(100)}
    assert drawn == ({0, 1, 2} if temperature == 1e308 else {0})


def test_top_k_is_decided_before_a_temperature_rounds_logits_together():
    assert sampler(2, temperature=1e300, top_k=1).sample(f32(1, 2)) == 1


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("logits", "found"), [
    (f32(0, NAN, 1), "NaN"), (f32(INF, NAN), "NaN"), (f32(0, INF), r"\+inf"), (f32(-INF, -INF), "only -inf")])
def test_logits_of_a_damaged_model_are_an_error(logits, found, temperature):
    with pytest.raises(FermiError, match=f"logits hold {found}"):
        sampler(len(logits), temperature=temperature).sample(logits)


@pytest.mark.parametrize("temperature", [0, 1])
def test_banning_everything_is_an_error(temperature):
    made = sampler(2, temperature=temperature, logit_bias={0: -INF, 1: -INF})
    with pytest.raises(RequestError, match="ban every token"):
        made.sample(f32(0, 1))


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(RequestError, match=r"logit_bias names token id 5.*0\.\.4"):
        sampler(5, logit_bias={4: 1.0, 5: 1.0})
    with pytest.raises(RequestError, match=r"token id 5 at position 1.*0\.\.4"):
        sampler(5, prompt=[0, 5])
    with pytest.raises(ValueError, match="shape"):
        sampler(5).sample(f32(1, 2))


def test_exp_defaults_to_the_engines_kernel(monkeypatch):
    asked = []

    def exp_f32(x):
        assert x.dtype == np.float32
        assert x.flags.c_contiguous
        asked.append(x.size)
        return np.exp(x)

    fake = SimpleNamespace(get=lambda: SimpleNamespace(exp_f32=exp_f32))
    monkeypatch.setitem(sys.modules, "fermi_engine.kernels", fake)
    monkeypatch.setattr(fermi_engine, "kernels", fake, raising=False)
    made = Sampler(SamplingParams(seed=1, top_k=2), 4, [])
    assert {made.sample(f32(0, 1, 2, 3)) for _ in range(30)} == {2, 3}
    assert asked == [2] * 30


def test_negligible_weights_stay_out_of_subnormal_numbers():
    def exp(x):
        out = np.exp(x)
        assert (out >= np.finfo(np.float32).tiny).all()
        return out

    assert sampler(3, exp=exp, seed=0).sample(f32(0, -87.5, -300)) == 0
