"""Attention, the KV cache and expert routing on sm_20: against the reference; to the bit at any cut and in any order.

Every test runs in the emulator as it is, with threads and blocks shuffled, and in its checked mode; on a card where there
is one, and where `-m gpu` demands it. Outputs start as NaN, and so does what of the cache is not filled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
from test_device import no_cuda

from fermi_engine.compare import Arrays, Case, Exact, Rounding, Rule, TwiceReference
from fermi_engine.formats import Matrix
from fermi_engine.kernels import sm20_attention
from fermi_engine.kernels.device_arrays import DeviceArray, DeviceMatrix
from fermi_engine.kernels.gpu import open_device
from fermi_engine.kernels.gpu_kernels import GpuKernels
from fermi_engine.kernels.sm20_attention import (
    HEAD_DIM_STEP,
    MAX_CHOSEN,
    MAX_EXPERTS,
    PAIRS,
    AttentionKernels,
    DeviceCache,
    DeviceExpertRows,
)
from reference import attention as ref_attention
from reference import moe as ref_moe

# Errors that csrc/sm20/math.cuh states, in units of the last place; each counts as two roundings.
EXP_ULP, SIGMOID_ULP = 0.97, 2.3
EMULATORS = {"emulated": {}, "shuffled": {"seed": 7}, "checked": {"mode": "checked"}}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """On `cuda` where there is a card, and where `-m gpu` demands one."""
    if "kernels" in metafunc.fixturenames:
        wanted = "gpu" in metafunc.config.getoption("-m") or no_cuda() is None
        card = [pytest.param("cuda", marks=pytest.mark.gpu)] if wanted else []
        metafunc.parametrize("kernels", [*EMULATORS, *card], indirect=True)


class Kernels(AttentionKernels):
    """The ops on a device of their own, from host arrays to host arrays."""

    def up(self, array: np.ndarray) -> DeviceArray:
        """A copy on the device."""
        found = DeviceArray.within(self.device.alloc(max(array.nbytes, 4), "test"), array.shape, array.dtype)
        found.upload(self.device, np.ascontiguousarray(array), self.stream)
        return found

    def down(self, array: DeviceArray) -> np.ndarray:
        """A copy on the host."""
        out = np.empty(array.shape, array.dtype)
        array.download(self.device, out, self.stream)
        return out

    def cache(self, kv_heads: int, capacity: int, head_dim: int) -> DeviceCache:
        """A cache full of NaN."""
        return DeviceCache(*(self.up(nans(kv_heads, capacity, head_dim)) for _ in "kv"))

    def filled(self, k: np.ndarray, v: np.ndarray, spare: int = 5) -> DeviceCache:
        """A cache with keys and values [S, HK, D], and `spare` positions behind them."""
        cache = self.cache(k.shape[1], len(k) + spare, k.shape[2])
        self.kv_append(cache, 0, self.up(k), self.up(v))
        return cache

    def attend(self, q: np.ndarray, cache: DeviceCache, start: int) -> np.ndarray:
        """attention of q [T, HQ, D] from position `start` on."""
        out = self.up(nans(*q.shape))
        self.attention(self.up(q), cache, start, 1 / math.sqrt(q.shape[2]), out)
        return self.down(out)


@contextmanager
def opened(kind: str) -> Iterator[Kernels]:
    device = open_device("cuda") if kind == "cuda" else open_device("emulated", **EMULATORS[kind])
    yield Kernels(device, device.stream("test"))
    device.close()


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    with opened(request.param) as found:
        yield found


def nans(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool((a.view(np.uint32) == b.view(np.uint32)).all())


def judge(rule: Rule, got: Arrays, case: Case) -> None:
    verdict = rule.judge(got, case)
    assert verdict.passed, verdict


# the cache


def check_append(kernels: Kernels, tokens: int, start: int, heads: int, head_dim: int) -> None:
    """Its rows are written and no others."""
    rng = np.random.default_rng(tokens)
    k, v = floats(rng, tokens, heads, head_dim), floats(rng, tokens, heads, head_dim)
    cache = kernels.cache(heads, start + tokens + 2, head_dim)
    kernels.kv_append(cache, start, kernels.up(k), kernels.up(v))
    for got, rows in ((cache.k, k), (cache.v, v)):
        expected = nans(heads, cache.capacity, head_dim)
        expected[:, start : start + tokens] = rows.transpose(1, 0, 2)
        assert same_bits(kernels.down(got), expected)


@pytest.mark.parametrize("shape", [(1, 0, 1, 32), (5, 3, 2, 256), (9, 130, 3, 37)])
def test_kv_append(kernels: Kernels, shape: tuple[int, ...]) -> None:
    check_append(kernels, *shape)


# attention


def attention_case(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[Case, Rule]:
    """The reference in float64, its error in float32, and the rule.

    Roundings of an element by itself (TwiceReference leaves sums out): the scale's product and the difference from the
    maximum round a score s by u |s| each, which exp makes relative; then exp, the product with the value, 1 / l and its
    product.
    """
    truth, single = (ref_attention.attend(*(torch.from_numpy(x).to(dtype) for x in (q, k, v))).numpy()
                     for dtype in (torch.float64, torch.float32))
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("thd,shd->hts", q.astype(np.float64), np.repeat(k, group, axis=1)) / math.sqrt(q.shape[2])
    bound = np.array(np.abs(single - truth).max())
    steps = 2 * float(np.abs(scores).max()) + 2 * EXP_ULP + 3
    return Case({}, {"o": truth}, {"o": bound}), TwiceReference(steps, float(np.abs(v).max()))


def attention_inputs(tokens: int, start: int, heads: int, kv_heads: int, head_dim: int,
                     edge: str = "plain") -> tuple[np.ndarray, ...]:
    """q [T, HQ, D], k and v [start + T, HK, D]. 'sharp': one position takes all and running maxima jump; 'rising' and
    'falling': a block's maximum is more than 88 above or below those before it; 'small': values near the smallest
    normal number."""
    rng = np.random.default_rng(tokens + 1000 * start + heads)
    q, k, v = floats(rng, tokens, heads, head_dim), *(floats(rng, start + tokens, kv_heads, head_dim) for _ in "kv")
    if edge == "sharp":
        k *= np.float32(12)
    if edge in ("rising", "falling"):
        slope = np.linspace(0, 100, len(k), dtype=np.float32)[:, None, None]
        q, k = np.abs(q), np.abs(k) * (slope if edge == "rising" else slope[::-1])
    if edge == "small":
        v *= np.float32(2.0**-124)
    return q, k, v


SHAPES = ((1, 0, 2, 1, 32), (3, 0, 16, 2, 256), (1, 127, 8, 1, 64), (1, 128, 8, 1, 64), (9, 122, 16, 2, 256),
          (17, 250, 9, 1, 96), (33, 0, 4, 4, 160), (130, 0, 8, 2, 32), (64, 64, 6, 2, 64), (65, 255, 3, 1, 128),
          (12, 120, 6, 1, 32), (20, 391, 16, 2, 256))


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_the_references(kernels: Kernels, shape: tuple[int, ...]) -> None:
    q, k, v = attention_inputs(*shape)
    case, rule = attention_case(q, k, v)
    judge(rule, {"o": kernels.attend(q, kernels.filled(k, v), shape[1])}, case)


@pytest.mark.parametrize("edge", ["sharp", "rising", "falling", "small"])
def test_attention_at_the_edges(kernels: Kernels, edge: str) -> None:
    q, k, v = attention_inputs(40, 260, 8, 2, 64, edge)
    case, rule = attention_case(q, k, v)
    judge(rule, {"o": kernels.attend(q, kernels.filled(k, v), 260)}, case)


CUTS = ((0, 150), (0, 1, 150), (0, 64, 65, 128, 150), (0, 127, 129, 149, 150), (0, 21, 22, 86, 150))


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (16, 2)])
def test_a_cut_changes_no_bit(kernels: Kernels, heads: int, kv_heads: int) -> None:
    """Cache filled and queries run piece by piece. Groups of 3 heads straddle the tiles of 64 rows."""
    q, k, v = attention_inputs(150, 0, heads, kv_heads, 64)
    results = []
    for spare, cut in enumerate(CUTS):
        cache = kernels.cache(kv_heads, 150 + spare, 64)
        pieces = []
        for begin, end in pairwise(cut):
            kernels.kv_append(cache, begin, kernels.up(k[begin:end]), kernels.up(v[begin:end]))
            pieces.append(kernels.attend(q[begin:end], cache, begin))
        results.append(np.concatenate(pieces))
    for cut, result in zip(CUTS, results, strict=True):
        assert same_bits(result, results[0]), cut
    for t in (0, 1, 63, 64, 127, 128, 149):
        assert same_bits(kernels.attend(q[t : t + 1], cache, t), results[0][t : t + 1]), t


@pytest.mark.parametrize("what", [np.inf, -np.inf, np.nan])
def test_what_comes_later_changes_nothing_before(kernels: Kernels, what: float) -> None:
    q, k, v = attention_inputs(30, 115, 4, 1, 32)
    right = kernels.attend(q, kernels.filled(k, v), 115)
    k[130:], v[130:] = what, what
    got = kernels.attend(q, kernels.filled(k, v), 115)
    assert same_bits(got[:15], right[:15])
    assert np.isnan(got[15:]).all()


@pytest.mark.parametrize("position", [2, 40, 131])
def test_nan_shows_in_every_row_that_sees_it(kernels: Kernels, position: int) -> None:
    q, k, v = attention_inputs(140, 0, 2, 2, 32)
    k[position, 1, 3] = np.nan
    got = np.isnan(kernels.attend(q, kernels.filled(k, v), 0))
    assert got[position:, 1].all()
    assert not got[:position].any()
    assert not got[:, 0].any()


# the router


def route_case(logits: np.ndarray, k: int) -> Case:
    """Of weight * (1 + |l - l_first|): see chosen_softmax in fermi_engine/stage_limits.py."""
    ids, weights = (x.numpy() for x in ref_moe.route(torch.from_numpy(logits).double(), k))
    best = np.take_along_axis(logits.astype(np.float64), ids, 1)
    return Case({}, {"ids": ids.astype(np.int32), "weights": weights}, {"weights": weights * (1 + best[:, :1] - best)})


def run_route(kernels: Kernels, logits: np.ndarray, k: int) -> Arrays:
    ids, weights = kernels.up(np.full((len(logits), k), -7, np.int32)), kernels.up(nans(len(logits), k))
    kernels.router_topk(kernels.up(logits), ids, weights)
    return {"ids": kernels.down(ids), "weights": kernels.down(weights)}


def check_route(kernels: Kernels, logits: np.ndarray, k: int) -> None:
    """ids exactly; weights up to the roundings of difference and exp, of the element and in the sum, k - 1 sums, the
    quotient."""
    case, got = route_case(logits, k), run_route(kernels, logits, k)
    judge(Exact(), {"ids": got["ids"]}, case._replace(outputs={"ids": case.outputs["ids"]}))
    steps = 2 * (1 + 2 * EXP_ULP) + 1.4 * k + 1
    judge(Rounding(steps), {"weights": got["weights"]}, case._replace(outputs={"weights": case.outputs["weights"]}))


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 1, 1), (9, 3, 3), (20, 128, 8), (7, 256, 8), (5, 512, 16),
                                                      (3, MAX_EXPERTS, MAX_CHOSEN), (2, 33, 32)])
def test_router_topk(kernels: Kernels, tokens: int, experts: int, k: int) -> None:
    logits = floats(np.random.default_rng(experts), tokens, experts) * np.float32(4)
    check_route(kernels, logits, k)
    check_route(kernels, logits * np.float32(10), k)


def test_router_ties_go_to_the_lower_id(kernels: Kernels) -> None:
    rng = np.random.default_rng(0)
    logits = rng.integers(-2, 2, (12, 100)).astype(np.float32)
    logits[0] = 0
    logits[1] = np.where(np.arange(100) % 3, np.float32(0), np.float32(-0.0))
    logits[2] = -np.arange(100)
    logits[3] = np.arange(100)
    logits[4] = np.nextafter(np.float32(1), np.float32(2))
    logits[4, 50] = np.nextafter(logits[4, 0], np.float32(2))
    check_route(kernels, logits, 8)


def test_router_ids_are_sound_whatever_the_logits(kernels: Kernels) -> None:
    logits = floats(np.random.default_rng(1), 5, 40)
    logits[0, 7:9], logits[1], logits[2, 3], logits[3] = [np.nan, -np.nan], np.nan, np.inf, -np.inf
    got = run_route(kernels, logits, 8)
    assert np.signbit(logits[0, 8])
    assert got["ids"][0, :2].tolist() == [7, 8]
    assert all(len(set(row)) == 8 and min(row) >= 0 and max(row) < 40 for row in got["ids"].tolist())
    assert got["ids"][1].tolist() == list(range(8))
    assert np.isnan(got["weights"][:2]).all()
    assert np.isfinite(got["weights"][4]).all()


# the work list


def run_expert_rows(kernels: Kernels, ids: np.ndarray, experts: int) -> Arrays:
    work = DeviceExpertRows(**{name: kernels.up(np.full(shape, -7, np.int32))
                               for name, shape in DeviceExpertRows.shapes(*ids.shape, experts).items()})
    kernels.expert_rows(kernels.up(ids), experts, work)
    return {name: kernels.down(array) for name, array in vars(work).items()}


def check_expert_rows(kernels: Kernels, ids: np.ndarray, experts: int) -> None:
    got, rows = run_expert_rows(kernels, ids, experts), ids.size
    hit, first, source, row_of = (x.numpy().astype(np.int32) for x in ref_moe.expert_rows(torch.from_numpy(ids)))
    behind = np.full(experts - len(hit), -1, np.int32)
    expected = {"hit": np.append(hit, behind), "first": np.append(first, np.full(len(behind), rows, np.int32)),
                "hits": np.array([len(hit)], np.int32), "source": source, "row_of": row_of}
    judge(Exact(), got, Case({}, expected, {}))


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 1, 1), (3, 5, 2), (64, 256, 8), (200, 512, 16), (65, 7, 7),
                                                      (700, 128, 8)])
@pytest.mark.parametrize("choice", ["any", "same", "last"])
def test_expert_rows(kernels: Kernels, tokens: int, experts: int, k: int, choice: str) -> None:
    rng = np.random.default_rng(tokens)
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
    if choice == "same":
        ids[:] = ids[0]
    if choice == "last":
        ids[:] = experts - 1 - np.arange(k)
    check_expert_rows(kernels, ids, experts)


def test_expert_rows_across_chunks(kernels: Kernels) -> None:
    """The last chunk has one pair."""
    ids = np.random.default_rng(0).integers(0, 19, (2 * PAIRS + 1, 1)).astype(np.int32)
    check_expert_rows(kernels, ids, 20)


def test_expert_rows_of_a_long_prompt(kernels: Kernels) -> None:
    ids = np.argsort(np.random.default_rng(0).random((8192, 40)), axis=1)[:, :16].astype(np.int32) * np.int32(12)
    check_expert_rows(kernels, ids, PAIRS)


# experts back to tokens


def combine_inputs(tokens: int, k: int, n: int) -> Arrays:
    rng = np.random.default_rng(n)
    rows = rng.permutation(tokens * k).astype(np.int32).reshape(tokens, k)
    return {"expert_out": floats(rng, tokens * k + 3, n), "row_of": rows,
            "weights": rng.random((tokens, k)).astype(np.float32), "shared": floats(rng, tokens, n),
            "shared_gate": floats(rng, tokens, 3) * np.float32(20)}


def run_combine(kernels: Kernels, a: Arrays, shared: bool) -> np.ndarray:
    out = kernels.up(nans(*a["shared"].shape))
    more = {name: kernels.up(a[name]) for name in ("shared", "shared_gate") if shared}
    kernels.moe_combine(*(kernels.up(a[name]) for name in ("expert_out", "row_of", "weights")), out, **more)
    return kernels.down(out)


def check_combine(kernels: Kernels, a: Arrays, shared: bool) -> None:
    """k products and sums, and the logistic, of magnitudes that add up to the bound."""
    w = {name: torch.from_numpy(value).double() for name, value in a.items() if name != "row_of"}
    rows, gate = torch.from_numpy(a["row_of"]).long(), torch.sigmoid(w["shared_gate"][:, :1]) * shared
    truth = (w["weights"][..., None] * w["expert_out"][rows]).sum(1) + gate * w["shared"]
    bound = (w["weights"][..., None] * w["expert_out"][rows].abs()).sum(1) + gate * w["shared"].abs()
    rule = Rounding(a["row_of"].shape[1] + 1 + 2 * SIGMOID_ULP)
    judge(rule, {"y": run_combine(kernels, a, shared)}, Case({}, {"y": truth.numpy()}, {"y": bound.numpy()}))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("tokens", "k", "n"), [(1, 1, 1), (7, 8, 2048), (33, 9, 37), (130, 4, 64)])
def test_moe_combine(kernels: Kernels, tokens: int, k: int, n: int, shared: bool) -> None:
    check_combine(kernels, combine_inputs(tokens, k, n), shared)


def test_a_token_alone_is_combined_to_the_same_bits(kernels: Kernels) -> None:
    a = combine_inputs(9, 3, 70)
    alone = a | {name: a[name][4:5] for name in ("row_of", "weights", "shared", "shared_gate")}
    assert same_bits(run_combine(kernels, alone, True), run_combine(kernels, a, True)[4:5])


# the product of few rows


@pytest.mark.parametrize("format", ["q4_0", "q8_0"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 32), (2, 130, 64), (3, 300, 1056), (1, 129, 2048)])
def test_gemv_rows_gives_the_bits_of_gemm(kernels: Kernels, format: str, m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    stored = Matrix.from_f32(floats(rng, n, k), format)
    matrix = DeviceMatrix(format, n, k, kernels.up(stored.data))
    x, source = kernels.up(floats(rng, m + 2, k)), kernels.up(rng.permutation(m + 2)[:m].astype(np.int32))
    for rows in (None, source):
        got, expected = kernels.up(nans(m, n)), kernels.up(nans(m, n))
        kernels.gemv_rows(x, matrix, got, rows)
        GpuKernels(kernels.device, kernels.stream).gemm(x, matrix, expected, source=rows)
        assert same_bits(kernels.down(got), kernels.down(expected))


# all devices alike


def everything(kernels: Kernels) -> Arrays:
    """Results of the ops that round."""
    q, k, v = attention_inputs(40, 100, 6, 2, 64)
    logits, rows = floats(np.random.default_rng(2), 9, 60), combine_inputs(9, 4, 50)
    return {"o": kernels.attend(q, kernels.filled(k, v), 100), **run_route(kernels, logits, 8),
            "y": run_combine(kernels, rows, True)}


def test_every_device_gives_the_same_bits(kernels: Kernels) -> None:
    with opened("emulated") as plain:
        expected = everything(plain)
    judge(Exact(), everything(kernels), Case({}, expected, {}))


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_small_grid_walks_on(kernels: Kernels, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm20_attention, "MAX_GRID", blocks)
    check_route(kernels, floats(np.random.default_rng(3), 10, 300), 8)
    check_combine(kernels, combine_inputs(11, 3, 70), True)
    check_append(kernels, 9, 4, 3, 37)


# wrong arguments


def test_arguments_that_do_not_fit_are_refused() -> None:
    with opened("emulated") as kernels:
        refusals(kernels)


def refusals(kernels: Kernels) -> None:
    cache, q = kernels.cache(2, 8, 32), kernels.up(nans(3, 4, 32))
    with pytest.raises(ValueError, match=r"attention: 3 tokens of 2 heads of 32 at position 6 in a cache \(2, 8, 32\)"):
        kernels.attention(q, cache, 6, 1.0, q)
    with pytest.raises(ValueError, match="head sizes are multiples of 32"):
        kernels.attention(kernels.up(nans(1, 4, HEAD_DIM_STEP + 1)), kernels.cache(2, 8, HEAD_DIM_STEP + 1), 0, 1.0,
                          kernels.up(nans(1, 4, HEAD_DIM_STEP + 1)))
    with pytest.raises(ValueError, match=r"kv_append: 3 tokens of 4 heads"):
        kernels.kv_append(cache, 0, q, q)
    with pytest.raises(ValueError, match=r"router_topk: \(2, 33\) of logits \(2, 40\); at most 32 of 1024"):
        kernels.router_topk(kernels.up(nans(2, 40)), kernels.up(np.zeros((2, 33), np.int32)), kernels.up(nans(2, 33)))
    with pytest.raises(TypeError, match="must be int32, got float32"):
        kernels.router_topk(kernels.up(nans(2, 40)), kernels.up(nans(2, 3)), kernels.up(nans(2, 3)))
    with pytest.raises(ValueError, match="come together"):
        kernels.moe_combine(q.reshape(12, 32), kernels.up(np.zeros((3, 1), np.int32)), kernels.up(nans(3, 1)),
                            kernels.up(nans(3, 32)), kernels.up(nans(3, 32)))
