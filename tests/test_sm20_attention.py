"""Attention, the KV cache and expert routing on sm_20 beyond the stage table: to the bit at any cut and in any order; edges.

Tests run in the emulator as it is and with threads and blocks shuffled, some in its checked mode; on a card where there is one,
and where `-m gpu` demands it. Outputs start as NaN, and so does what of the cache is not filled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest

from fermi_engine import kernels
from fermi_engine.compare import Arrays, Case, Exact
from fermi_engine.formats import Matrix
from fermi_engine.kernels import sm20_attention
from fermi_engine.kernels.device_arrays import DeviceMatrix
from fermi_engine.kernels.gpu import open_device
from fermi_engine.kernels.sm20_attention import HEAD_DIM_STEP, PAIRS, DeviceCache
from fermi_engine.stages import gpu
from fermi_engine.stages.device_run import DeviceRun
from fermi_engine.stages.table import find_stage
from fermi_engine.state import KVPages
from tests.devices import on_devices
from tests.stages import ORACLES

EMULATORS = {"emulated": {}, "shuffled": {"seed": 7}, "checked": {"mode": "checked"}}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_devices(metafunc, "run", ("emulated", "shuffled"))


@contextmanager
def opened(kind: str) -> Iterator[DeviceRun]:
    device = open_device("cuda") if kind == "cuda" else open_device("emulated", **EMULATORS[kind])
    yield DeviceRun(device)
    device.close()


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[DeviceRun]:
    with opened(request.param) as found:
        yield found


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool((a.view(np.uint32) == b.view(np.uint32)).all())


def holds(stage: str, run: DeviceRun, inputs: Arrays) -> None:
    """The row's rule on these inputs."""
    form = find_stage(stage).gpu
    verdict = form.judge(form.compute(run, inputs), ORACLES[stage].case(inputs))
    assert verdict.passed, verdict


# attention


def empty_cache(run: DeviceRun, kv_heads: int, capacity: int, head_dim: int) -> DeviceCache:
    """A cache full of NaN."""
    return DeviceCache(*(run.empty(kv_heads, capacity, head_dim) for _ in "kv"))


def filled(run: DeviceRun, k: np.ndarray, v: np.ndarray, spare: int = 5) -> DeviceCache:
    """A cache with keys and values [S, HK, D], and `spare` positions behind them."""
    cache = empty_cache(run, k.shape[1], len(k) + spare, k.shape[2])
    run.tokens.kv_append(cache, 0, run.put(k), run.put(v))
    return cache


def attend(run: DeviceRun, q: np.ndarray, cache: DeviceCache, start: int) -> np.ndarray:
    """attention of q [T, HQ, D] from position `start` on."""
    out = run.empty(*q.shape)
    run.tokens.attention(run.put(q), cache, start, 1 / math.sqrt(q.shape[2]), out, run.empty(*q.shape))
    return run.get(out)


def attention_inputs(tokens: int, start: int, heads: int, kv_heads: int, head_dim: int) -> tuple[np.ndarray, ...]:
    """q [T, HQ, D], k and v [start + T, HK, D]."""
    rng = np.random.default_rng(tokens + 1000 * start + heads)
    return floats(rng, tokens, heads, head_dim), *(floats(rng, start + tokens, kv_heads, head_dim) for _ in "kv")


@pytest.mark.parametrize("format", ["f32", "f16", "q8_0"])
def test_the_cache_holds_what_the_hosts_stands_for(run: DeviceRun, format: str) -> None:
    """Blocks of every size of number, of zeros, ties, beyond halves, infinite and NaN; a second time nothing changes."""
    rng = np.random.default_rng(3)
    rows = (floats(rng, 40, 2, 64) * np.exp2(rng.integers(-130, 120, (40, 2, 1)))).astype(np.float32)
    rows[30], rows[31] = 0, np.arange(128).reshape(2, 64) - 63.5
    rows[32, 0, 5], rows[33, 1, 40], rows[34] = np.nan, np.inf, 65519
    pages = KVPages(2, 16, 64, format)
    pages.reserve(40)
    kernels.get().kv_append(pages, np.array([0], np.int64), rows, -rows)
    host = [part.transpose(1, 0, 2) for part in pages.filled(40)]
    cache = empty_cache(run, 2, 40, 64)
    run.tokens.kv_append(cache, 0, run.put(rows), run.put(-rows), format)
    for mine, theirs in zip((cache.k, cache.v), host, strict=True):
        assert np.array_equal(run.get(mine), theirs, equal_nan=True)
    again = empty_cache(run, 2, 40, 64)
    run.tokens.kv_append(again, 0, *(run.put(np.ascontiguousarray(part.transpose(1, 0, 2))) for part in host), format)
    for mine, theirs in zip((again.k, again.v), host, strict=True):
        assert np.array_equal(run.get(mine), theirs, equal_nan=True)


CUTS = ((0, 150), (0, 1, 150), (0, 64, 65, 128, 150), (0, 127, 129, 149, 150), (0, 21, 22, 86, 150))


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (16, 2)])
def test_a_cut_changes_no_bit(run: DeviceRun, heads: int, kv_heads: int) -> None:
    """Cache filled and queries run piece by piece. Groups of 3 heads straddle the tiles of 64 rows."""
    q, k, v = attention_inputs(150, 0, heads, kv_heads, 64)
    results = []
    for spare, cut in enumerate(CUTS):
        cache = empty_cache(run, kv_heads, 150 + spare, 64)
        pieces = []
        for begin, end in pairwise(cut):
            run.tokens.kv_append(cache, begin, run.put(k[begin:end]), run.put(v[begin:end]))
            pieces.append(attend(run, q[begin:end], cache, begin))
        results.append(np.concatenate(pieces))
    for cut, result in zip(CUTS, results, strict=True):
        assert same_bits(result, results[0]), cut
    for t in (0, 1, 63, 64, 127, 128, 149):
        assert same_bits(attend(run, q[t : t + 1], cache, t), results[0][t : t + 1]), t


def test_a_cut_at_the_end_of_a_span_changes_no_bit(run: DeviceRun) -> None:
    """Rows that see one span of 1024 positions share a tile with rows that see two."""
    start, (q, k, v) = 1010, attention_inputs(40, 1010, 6, 2, 32)
    cache = filled(run, k, v)
    right = attend(run, q, cache, start)
    assert same_bits(np.concatenate([attend(run, q[a:b], cache, start + a) for a, b in ((0, 13), (13, 15), (15, 40))]), right)
    for t in (0, 12, 13, 14, 15, 39):
        assert same_bits(attend(run, q[t : t + 1], cache, start + t), right[t : t + 1]), t


@pytest.mark.parametrize("start", [122, 1010])
def test_tiles_of_rows_have_no_races(start: int) -> None:
    q, k, v = attention_inputs(30, start, 6, 2, 64)
    with opened("emulated") as plain, opened("checked") as checked:
        assert same_bits(*(attend(run, q, filled(run, k, v), start) for run in (plain, checked)))


@pytest.mark.parametrize("what", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("start", [115, 1009])
def test_what_comes_later_changes_nothing_before(run: DeviceRun, what: float, start: int) -> None:
    q, k, v = attention_inputs(30, start, 4, 1, 32)
    right = attend(run, q, filled(run, k, v), start)
    k[start + 15 :], v[start + 15 :] = what, what
    got = attend(run, q, filled(run, k, v), start)
    assert same_bits(got[:15], right[:15])
    assert np.isnan(got[15:]).all()


@pytest.mark.parametrize("position", [2, 40, 131])
def test_nan_shows_in_every_row_that_sees_it(run: DeviceRun, position: int) -> None:
    q, k, v = attention_inputs(140, 0, 2, 2, 32)
    k[position, 1, 3] = np.nan
    got = np.isnan(attend(run, q, filled(run, k, v), 0))
    assert got[position:, 1].all()
    assert not got[:position].any()
    assert not got[:, 0].any()


# the router


@pytest.mark.parametrize(("experts", "k"), [(1024, 32), (33, 32), (512, 16)])
def test_the_router_takes_many_experts(run: DeviceRun, experts: int, k: int) -> None:
    logits = floats(np.random.default_rng(experts), 3, experts)
    for scale in (4, 40):
        holds("router_topk", run, {"logits": logits * np.float32(scale), "k": np.array(k)})


def test_router_ties_go_to_the_lower_id(run: DeviceRun) -> None:
    rng = np.random.default_rng(0)
    logits = rng.integers(-2, 2, (12, 100)).astype(np.float32)
    logits[0] = 0
    logits[1] = np.where(np.arange(100) % 3, np.float32(0), np.float32(-0.0))
    logits[2] = -np.arange(100)
    logits[3] = np.arange(100)
    logits[4] = np.nextafter(np.float32(1), np.float32(2))
    logits[4, 50] = np.nextafter(logits[4, 0], np.float32(2))
    holds("router_topk", run, {"logits": logits, "k": np.array(8)})


def test_router_ids_are_sound_whatever_the_logits(run: DeviceRun) -> None:
    logits = floats(np.random.default_rng(1), 5, 40)
    logits[0, 7:9], logits[1], logits[2, 3], logits[3] = [np.nan, -np.nan], np.nan, np.inf, -np.inf
    got = gpu.router_topk.compute(run, {"logits": logits, "k": np.array(8)})
    assert np.signbit(logits[0, 8])
    assert got["ids"][0, :2].tolist() == [7, 8]
    assert all(len(set(row)) == 8 and min(row) >= 0 and max(row) < 40 for row in got["ids"].tolist())
    assert got["ids"][1].tolist() == list(range(8))
    assert np.isnan(got["weights"][:2]).all()
    assert np.isfinite(got["weights"][4]).all()


# the work list and back


def test_expert_rows_of_a_long_prompt(run: DeviceRun) -> None:
    ids = np.argsort(np.random.default_rng(0).random((8192, 40)), axis=1)[:, :16].astype(np.int32) * np.int32(12)
    holds("expert_rows", run, {"ids": ids, "experts": np.array(PAIRS)})


def test_the_last_chunk_of_the_work_list_may_have_one_pair(run: DeviceRun) -> None:
    ids = np.random.default_rng(0).integers(0, 19, (2 * PAIRS + 1, 1)).astype(np.int32)
    holds("expert_rows", run, {"ids": ids, "experts": np.array(20)})


def combine_inputs(tokens: int, k: int, n: int) -> Arrays:
    """The gate in the first of three columns."""
    rng = np.random.default_rng(n)
    rows = rng.permutation(tokens * k).astype(np.int32).reshape(tokens, k)
    return {"expert_out": floats(rng, tokens * k + 3, n), "row_of": rows,
            "weights": rng.random((tokens, k)).astype(np.float32), "shared": floats(rng, tokens, n),
            "shared_gate": floats(rng, tokens, 3) * np.float32(20), "k": np.array(k)}


def combined(run: DeviceRun, a: Arrays, shared: bool = True) -> np.ndarray:
    out = run.empty(*a["shared"].shape)
    more = {name: run.put(a[name]) for name in ("shared", "shared_gate") if shared}
    run.tokens.moe_combine(*(run.put(a[name]) for name in ("expert_out", "row_of", "weights")), out, **more)
    return run.get(out)


@pytest.mark.parametrize(("tokens", "k", "n"), [(7, 8, 2048), (130, 4, 64)])
def test_without_a_shared_expert_it_is_as_if_that_were_zero(run: DeviceRun, tokens: int, k: int, n: int) -> None:
    a = combine_inputs(tokens, k, n)
    assert same_bits(combined(run, a, shared=False), combined(run, {**a, "shared": np.zeros_like(a["shared"])}))


def test_a_token_alone_is_combined_to_the_same_bits(run: DeviceRun) -> None:
    a = combine_inputs(9, 3, 70)
    alone = a | {name: a[name][4:5] for name in ("row_of", "weights", "shared", "shared_gate")}
    assert same_bits(combined(run, alone), combined(run, a)[4:5])


# the product of few rows


@pytest.mark.parametrize("format", ["q4_0", "q8_0"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 32), (2, 130, 64), (3, 300, 1056), (1, 129, 2048)])
def test_gemv_rows_gives_the_bits_of_gemm(run: DeviceRun, format: str, m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    stored = Matrix.from_f32(floats(rng, n, k), format)
    matrix = DeviceMatrix(format, n, k, run.put(stored.data))
    x, source = run.put(floats(rng, m + 2, k)), run.put(rng.permutation(m + 2)[:m].astype(np.int32))
    for rows in (None, source):
        got, expected = run.empty(m, n), run.empty(m, n)
        run.tokens.gemv_rows(x, matrix, got, rows)
        run.rows.gemm(x, matrix, expected, source=rows)
        assert same_bits(run.get(got), run.get(expected))


# all devices alike


def everything(run: DeviceRun) -> Arrays:
    """Results of the ops that round."""
    q, k, v = attention_inputs(40, 100, 6, 2, 64)
    logits = {"logits": floats(np.random.default_rng(2), 9, 60), "k": np.array(8)}
    return {"o": attend(run, q, filled(run, k, v), 100), **gpu.router_topk.compute(run, logits),
            "y": combined(run, combine_inputs(9, 4, 50))}


def test_every_device_gives_the_same_bits(run: DeviceRun) -> None:
    with opened("emulated") as plain:
        expected = everything(plain)
    verdict = Exact().judge(everything(run), Case({}, expected, {}))
    assert verdict.passed, verdict


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_small_grid_walks_on(run: DeviceRun, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    router = {"logits": floats(rng, 10, 300), "k": np.array(8)}
    append = {"k": floats(rng, 13, 3, 37), "v": floats(rng, 13, 3, 37), "start": np.array(4), "page_tokens": np.array(5)}
    rows = combine_inputs(11, 3, 70)
    whole = combined(run, rows)
    monkeypatch.setattr(sm20_attention, "MAX_GRID", blocks)
    holds("router_topk", run, router)
    holds("kv_append", run, append)
    assert same_bits(combined(run, rows), whole)


# wrong arguments


def test_arguments_that_do_not_fit_are_refused() -> None:
    with opened("emulated") as run:
        refusals(run)


def refusals(run: DeviceRun) -> None:
    cache, q, k = empty_cache(run, 2, 8, 32), run.empty(3, 4, 32), run.tokens
    with pytest.raises(ValueError, match=r"attention: 3 tokens of 2 heads of 32 at position 6 in a cache \(2, 8, 32\)"):
        k.attention(q, cache, 6, 1.0, q)
    with pytest.raises(ValueError, match="attention: 1025 positions, more than 1024, need an array for sums on the way"):
        k.attention(q.rows(0, 1), empty_cache(run, 2, 1025, 32), 1024, 1.0, q.rows(1, 1))
    odd = HEAD_DIM_STEP + 1
    with pytest.raises(ValueError, match="head sizes are multiples of 32"):
        k.attention(run.empty(1, 4, odd), empty_cache(run, 2, 8, odd), 0, 1.0, run.empty(1, 4, odd))
    with pytest.raises(ValueError, match=r"kv_append: 3 tokens of 4 heads"):
        k.kv_append(cache, 0, q, q)
    with pytest.raises(ValueError, match=r"router_topk: \(2, 33\) of logits \(2, 40\); at most 32 of 1024"):
        k.router_topk(run.empty(2, 40), run.empty(2, 33, dtype=np.int32), run.empty(2, 33))
    with pytest.raises(TypeError, match="must be int32, got float32"):
        k.router_topk(run.empty(2, 40), run.empty(2, 3), run.empty(2, 3))
    with pytest.raises(ValueError, match="come together"):
        k.moe_combine(q.reshape(12, 32), run.put(np.zeros((3, 1), np.int32)), run.empty(3, 1), run.empty(3, 32),
                      run.empty(3, 32))
