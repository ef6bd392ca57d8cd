"""The compare rules: each passes at its limit and fails just beyond it."""

from __future__ import annotations

import numpy as np
import pytest

from fermi_engine import compare
from fermi_engine.compare import All, Case, Divergence, Exact, Rounding, Tokens, TwiceReference, Ulp

U = 2.0**-24


def judge(rule, got, truth, bound=None, **inputs):
    bounds = {} if bound is None else {"y": np.asarray(bound, np.float64)}
    return rule.judge({"y": np.asarray(got)}, Case(inputs, {"y": np.asarray(truth)}, bounds))


def f32(*values):
    return np.array(values, np.float32)


def test_exact():
    assert judge(Exact(), f32(1, np.nan), f32(1, np.nan)).passed
    assert judge(Exact(), np.array([0xFFC00000], np.uint32).view(np.float32), f32(np.nan)).passed
    one, two = np.array([1], np.int32), np.array([2], np.int32)
    for got, truth in ((f32(0.0), f32(-0.0)), (f32(1), np.array([1.0])), (f32(np.nan), f32(1)), (f32(1), f32(np.nan)),
                       (f32(1), f32(1 + 2 * U)), (one, two), (f32(1, 1), f32(1))):
        assert not judge(Exact(), got, truth).passed
    assert "1 of 3 differ, first at [2]" in judge(Exact(), f32(1, 2, 4), f32(1, 2, 3)).detail


def test_a_missing_output_fails():
    assert not Exact().judge({}, Case({}, {"y": f32(1)}, {})).passed


def test_rounding():
    rule = Rounding(3)
    assert judge(rule, [4 + 3 * 4 * U], [4.0], [4.0]).passed
    assert not judge(rule, [4 + 3.01 * 4 * U], [4.0], [4.0]).passed
    assert judge(rule, [4 + 3.01 * 4 * U], [4.0], [5.0]).passed
    assert not judge(rule, [0.0, 2 * U], [0.0, 0.0], [1.0, 0.5]).passed
    assert judge(rule, [2.9 * 2.0**-150], [0.0], [0.0]).passed
    assert not judge(rule, [3.1 * 2.0**-150], [0.0], [0.0]).passed
    assert judge(Rounding(3, 4), [11 * 2.0**-150], [0.0], [0.0]).passed
    assert judge(Rounding(lambda a: len(a["x"])), [1 + 2 * U], [1.0], [1.0], x=f32(1, 2)).passed
    assert not judge(Rounding(lambda a: len(a["x"])), [1 + 2 * U], [1.0], [1.0], x=f32(1)).passed


def test_twice_reference():
    rule = TwiceReference(2)
    truth = [8.0, 1.0]
    assert judge(rule, [8.0, 1 + 16 * U], truth, 0.0).passed
    assert not judge(rule, [8.0, 1 + 16.1 * U], truth, 0.0).passed
    assert judge(rule, [8.0, 1 + 1e-3], truth, 5e-4).passed
    assert not judge(rule, [8.0, 1 + 1.01e-3], truth, 5e-4).passed
    assert judge(TwiceReference(2, 100), [8.0, 1 + 199 * U], truth, 0.0).passed
    assert judge(rule, [2.0**-149], [0.0], 0.0).passed
    assert not judge(rule, [3 * 2.0**-149], [0.0], 0.0).passed


@pytest.mark.parametrize(("value", "unit"), [(1.0, 2.0**-23), (1.999, 2.0**-23), (-4.0, 2.0**-21), (0.0, 2.0**-149),
                                             (2.0**-140, 2.0**-149), (2.0**-126, 2.0**-149), (3.4e38, 2.0**104)])
def test_ulp_is_the_distance_of_neighbours(value, unit):
    assert compare.ulp(np.array(value)) == unit
    assert abs(np.spacing(np.float32(value))) == unit
    assert judge(Ulp(1.5), [value + 1.5 * unit], [value]).passed
    assert not judge(Ulp(1.5), [value + 1.6 * unit], [value]).passed


@pytest.mark.parametrize("rule", [Ulp(3), Rounding(3), TwiceReference(3)], ids=repr)
def test_infinity_and_nan(rule):
    def judged(got, truth):
        bound = {"y": np.nan_to_num(np.array([abs(truth)]))} if isinstance(rule, Rounding) else {"y": np.array(0.0)}
        return rule.judge({"y": f32(got)}, Case({}, {"y": np.array([truth])}, bound))

    for got, truth in ((np.inf, 1e39), (np.inf, np.inf), (-np.inf, -1e300), (np.nan, np.nan),
                       (np.finfo(np.float32).max, 2.0**128 * (1 - 2.0**-26))):
        assert judged(got, truth).passed, (got, truth)
    for got, truth in ((np.inf, -np.inf), (np.inf, 3e38), (np.nan, 1.0), (1.0, np.nan), (1.0, np.inf)):
        assert not judged(got, truth).passed, (got, truth)


def test_one_bad_element_among_many_fails():
    truth = np.linspace(1, 2, 100)
    got = truth.astype(np.float32)
    for rule, bound in ((Ulp(0.5), None), (Rounding(1), truth), (TwiceReference(1), 0.0)):
        assert judge(rule, got, truth, bound).passed
        worse = got.copy()
        worse[63] += np.float32(1e-5)
        verdict = judge(rule, worse, truth, bound)
        assert not verdict.passed
        assert "[63]" in verdict.detail


def test_divergence():
    logits = np.array([[0.0, 1.0, 2.0], [1.0, 0.0, 0.0]])
    moved = logits + np.array([[0.0, 0.1, 0.0], [7.0, 7.0, 7.0]])
    kl = compare.divergence(logits, moved)
    p, q = (np.exp(x[0]) / np.exp(x[0]).sum() for x in (logits, moved))
    assert kl[0] == pytest.approx((p * np.log(p / q)).sum(), rel=1e-12)
    assert abs(kl[1]) < 1e-15
    assert judge(Divergence(), moved, logits, kl.mean() / 1.99).passed
    assert not judge(Divergence(), moved, logits, kl.mean() / 2.01).passed
    assert not judge(Divergence(), moved * np.nan, logits, 1.0).passed


def test_tokens():
    truth = np.array([5, 6, 7, 8], np.int32)
    sure, unsure_at_2 = [0.1, 0.2, 0.3, 0.9], [0.1, 0.2, 1.0, 0.1]
    assert judge(Tokens(), truth, truth, sure).passed
    assert not judge(Tokens(), np.array([5, 6, 7, 9]), truth, sure).passed
    later = judge(Tokens(), np.array([5, 6, 8, 9]), truth, unsure_at_2)
    assert later.passed
    assert "2 of 4 compared" in later.detail
    earlier = judge(Tokens(), np.array([5, 7, 7, 8]), truth, unsure_at_2)
    assert not earlier.passed
    assert "position 1" in earlier.detail
    assert not judge(Tokens(), truth, truth, [1.5, 0, 0, 0]).passed


def test_all_takes_the_worst():
    rule = All(Exact(), y=Ulp(2))
    case = Case({}, {"y": np.array([1.0]), "ids": np.array([3], np.int32)}, {})
    good, ids = f32(1 + 2.0**-23), np.array([3], np.int32)
    assert rule.judge({"y": good, "ids": ids}, case).passed
    assert rule.judge({"y": good, "ids": ids}, case).metric == "ulp"
    assert rule.judge({"y": good, "ids": ids + 1}, case).detail.startswith("ids")
    assert rule.judge({"y": good + f32(1), "ids": ids}, case).detail.startswith("y")
    assert not All(y=Ulp(2)).judge({"y": good, "ids": ids}, case).passed


def test_rules_show_their_limits():
    rule = All(Ulp(1.5), y=Rounding(test_tokens, 2))
    assert repr(rule) == "All(y=Rounding(steps=test_tokens, gain=2), others=Ulp(limit=1.5))"
