"""The sm_20 kernels of one token: to the bit what the kernels for many give, or against the reference; in any order.

Every test runs in the emulator as it is, with threads and blocks shuffled, and in its checked mode; on a card where there
is one, and where `-m gpu` demands it. Outputs start as NaN, and so does what of the cache is not filled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fermi_engine.compare import Arrays, Case, Rounding, TwiceReference
from fermi_engine.formats import Matrix
from fermi_engine.kernels.device_arrays import DeviceArray
from fermi_engine.kernels.gpu import Device, open_device
from fermi_engine.kernels.sm20_attention import DeviceCache
from fermi_engine.kernels.sm20_token import SPLIT, WIDE_ROWS, TokenKernels, argmax_work, attention_work, token_split
from fermi_engine.stages.device_run import DeviceRun
from fermi_engine.stages.limits import SM20
from reference import attention as ref_attention
from tests.devices import on_devices
from tests.strategies import Draws
from tests.test_sm20_attention import same_bits

EMULATORS = {"emulated": {}, "shuffled": {"seed": 7}, "checked": {"mode": "checked"}}
EPS, L2_EPS = 1e-6, 1e-6
EXP_ULP, SIGMOID_ULP, RSQRT_ULP = SM20.exp_ulp, SM20.logistic / 2, 1.5


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_devices(metafunc, "device", tuple(EMULATORS))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    kind = request.param
    opened = open_device("cuda") if kind == "cuda" else open_device("emulated", **EMULATORS[kind])
    yield opened
    opened.close()


class Bench:
    """Arrays to a device and back, and all families of kernels."""

    def __init__(self, device: Device) -> None:
        self.run = DeviceRun(device)
        self.matrix, self.get = self.run.matrix, self.run.get
        self.k, self.a, self.t = self.run.rows, self.run.tokens, TokenKernels(device, self.run.stream)

    def put(self, array: np.ndarray) -> DeviceArray:
        return self.run.put(array)

    def empty(self, *shape: int, dtype: Any = np.float32) -> DeviceArray:
        return self.run.empty(*shape, dtype=dtype)


# products


def product_steps(k: int, is_normed: bool) -> float:
    """Roundings on the longest chain: the blocks of a part, the products of a quad or two and the scale, the parts of a row
    and the warps that share it, or of 32 lanes where weights are floats. A norm's square sum has k / 256 of a chain, 8 and
    32 more and a division and eps, of which the root leaves half, then the root and three products."""
    product = max(-(-k // 64) + 8 + 1 + 16 + 8, -(-k // 32) + 32)
    norm = (-(-k // 256) + 8 + 32 + 2) / 2 + 2 * RSQRT_ULP + 3
    return product + (norm if is_normed else 0)


def normed(x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    x = x.astype(np.float64)
    return x if weight is None else x / np.sqrt((x * x).mean() + EPS) * (1.0 + weight.astype(np.float64))


def check_product(bench: Bench, shapes: list[tuple[str, int]], k: int, is_normed: bool, add: bool, seed: int = 1) -> bool:
    """Whether one call over matrices (format, rows) gives y within the rounding of each element."""
    d = Draws(seed)
    x, weight = d.normal(k), d.normal(k, scale=0.3) if is_normed else None
    matrices = [Matrix.from_f32(d.normal(n, k), form) for form, n in shapes]
    before = [d.normal(w.rows) if add else np.full(w.rows, np.nan, np.float32) for w in matrices]
    outs = [bench.put(y) for y in before]
    bench.t.gemv(bench.put(x), [(bench.matrix(w), y) for w, y in zip(matrices, outs, strict=True)],
                 None if weight is None else bench.put(weight), EPS, add)
    f, passed = normed(x, weight), True
    for w, y, old in zip(matrices, outs, before, strict=True):
        values = w.dequantize().astype(np.float64)
        truth, bound = values @ f + (old if add else 0), np.abs(values) @ np.abs(f) + (np.abs(old) if add else 0)
        rule, case = Rounding(product_steps(k, is_normed) + add), Case({}, {"y": truth}, {"y": bound})
        passed &= rule.judge({"y": bench.get(y)}, case).passed
    return passed


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "f32"])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (7, 64), (40, 96), (65, 1056), (33, 2048)])
def test_product(device: Device, form: str, n: int, k: int) -> None:
    for is_normed in (False, True):
        for add in (False, True):
            assert check_product(Bench(device), [(form, n)], k, is_normed, add)


@pytest.mark.parametrize("k", [1, 6, 130])
def test_rows_of_floats_of_any_length(device: Device, k: int) -> None:
    assert check_product(Bench(device), [("f32", 11)], k, True, False)


def test_four_matrices_at_once(device: Device) -> None:
    assert check_product(Bench(device), [("q8_0", 70), ("q4_0", 9), ("f32", 17), ("q8_0", 8)], 288, True, False)


@pytest.mark.parametrize("form", ["q8_0", "q4_0"])
def test_many_rows(device: Device, form: str) -> None:
    """The form for large matrices, with more groups than its grid has at once."""
    assert check_product(Bench(device), [(form, WIDE_ROWS + 13)], 64, True, False)


def test_every_split_is_reached_and_bits_do_not_depend_on_the_company(device: Device) -> None:
    shapes = [(2100, 512), (4100, 256), (16384, 256), (8, 1024)]
    assert [token_split(*shape) for shape in shapes] == [4, 2, 1, 8]
    d, bench = Draws(3), Bench(device)
    x, w, other = d.normal(512), Matrix.from_f32(d.normal(100, 512), "q8_0"), Matrix.from_f32(d.normal(24, 512), "f32")
    alone, first, last = bench.empty(100), bench.empty(100), bench.empty(100)
    there, beside = bench.matrix(w), (bench.matrix(other), bench.empty(24))
    for matrices in ([(there, alone)], [(there, first), beside], [beside, (there, last)]):
        bench.t.gemv(bench.put(x), matrices)
    assert same_bits(bench.get(alone), bench.get(first))
    assert same_bits(bench.get(alone), bench.get(last))


def check_swiglu(bench: Bench, form: str, n: int, k: int) -> bool:
    d = Draws(5)
    x, weight = bench.put(d.normal(k)), bench.put(d.normal(k))
    gate, up = (bench.matrix(Matrix.from_f32(d.normal(n, k, scale=0.2), form)) for _ in range(2))
    both, out, expected = bench.empty(1, 2 * n), bench.empty(n), bench.empty(1, n)
    halves = [DeviceArray.within(both.buffer, (n,), np.float32, 4 * n * i) for i in range(2)]
    bench.t.gemv(x, [(gate, halves[0]), (up, halves[1])], weight, EPS)
    bench.k.swiglu(both, expected)
    bench.t.gemv_swiglu(x, gate, up, out, weight, EPS)
    return same_bits(bench.get(out), bench.get(expected)[0])


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "f32"])
@pytest.mark.parametrize(("n", "k"), [(40, 96), (9, 1056), (2050, 32)])
def test_swiglu_has_the_bits_of_its_parts(device: Device, form: str, n: int, k: int) -> None:
    assert check_swiglu(Bench(device), form, n, k)


# the delta rule


def delta_arrays(d: Draws, hk: int, ratio: int, dk: int, dv: int, taps: int) -> dict[str, np.ndarray]:
    hv = hk * ratio
    channels = 2 * hk * dk + hv * dv
    return {"weight": d.normal(taps, channels), "A_log": d.uniform(0, 2.5, hv), "dt_bias": d.uniform(-7, -2, hv),
            "norm": d.uniform(0.5, 1.5, dv), "tail": d.normal(taps - 1, channels), "state": d.normal(hv, dk, dv)}


def separate_delta(bench: Bench, hk: int, inputs: dict[str, DeviceArray], w: dict[str, DeviceArray]) -> Arrays:
    """The same by the kernels for many tokens."""
    (hv, dk, dv), channels = w["state"].shape, inputs["qkv"].size
    conv, g, beta = bench.empty(1, channels), bench.empty(1, hv), bench.empty(1, hv)
    q, k = (bench.empty(1, hk, dk) for _ in "qk")
    o, y = bench.empty(1, hv, dv), bench.empty(hv, dv)
    bench.k.conv1d_silu(inputs["qkv"].reshape(1, channels), w["weight"], w["tail"], conv)
    bench.k.l2_norm(conv, 0, hk, dk, L2_EPS, 1 / math.sqrt(dk), q)
    bench.k.l2_norm(conv, hk * dk, hk, dk, L2_EPS, 1.0, k)
    bench.k.gdn_gates(*(inputs[name].reshape(1, hv) for name in "ab"), w["A_log"], w["dt_bias"], g, beta)
    bench.k.gdn_step(q, k, conv, 2 * hk * dk, g, beta, w["state"], o)
    bench.k.gated_rms_norm(o.reshape(hv, dv), inputs["z"].reshape(hv, dv), w["norm"], EPS, y)
    return {"y": bench.get(y).reshape(-1), "tail": bench.get(w["tail"]), "state": bench.get(w["state"])}


def check_delta(bench: Bench, hk: int, ratio: int, dk: int, dv: int, taps: int, tokens: int = 3) -> bool:
    d = Draws(hk + taps)
    arrays, hv = delta_arrays(d, hk, ratio, dk, dv, taps), hk * ratio
    fused, apart = ({name: bench.put(array) for name, array in arrays.items()} for _ in range(2))
    for _ in range(tokens):
        inputs = {name: bench.put(d.normal(size)) for name, size in (
            ("qkv", 2 * hk * dk + hv * dv), ("z", hv * dv), ("a", hv), ("b", hv))}
        y = bench.empty(hv * dv)
        bench.t.gdn_token(**inputs, **fused, out=y, k_heads=hk, l2_eps=L2_EPS, norm_eps=EPS, q_scale=1 / math.sqrt(dk))
        got = {"y": bench.get(y), "tail": bench.get(fused["tail"]), "state": bench.get(fused["state"])}
        expected = separate_delta(bench, hk, inputs, apart)
        if not all(same_bits(got[name], expected[name]) for name in got):
            return False
    return True


DELTAS = ((1, 1, 32, 32, 4), (2, 2, 64, 32, 4), (1, 3, 32, 96, 2), (2, 1, 128, 128, 4), (1, 2, 96, 64, 1))


@pytest.mark.parametrize("sizes", DELTAS)
def test_a_token_of_the_delta_rule_has_the_bits_of_its_parts(device: Device, sizes: tuple[int, ...]) -> None:
    assert check_delta(Bench(device), *sizes)


# attention


def attention_arrays(d: Draws, position: int, heads: int, kv_heads: int, dim: int, rotary: int) -> dict[str, np.ndarray]:
    past = position, kv_heads, dim
    return {"query_gate": d.normal(heads, 2 * dim), "key": d.normal(kv_heads, dim), "value": d.normal(kv_heads, dim),
            "q_norm": d.normal(dim, scale=0.3), "k_norm": d.normal(dim, scale=0.3), "past_k": d.normal(*past),
            "past_v": d.normal(*past), "cos": d.uniform(-1, 1, rotary // 2), "sin": d.uniform(-1, 1, rotary // 2)}


def filled(bench: Bench, a: dict[str, np.ndarray], capacity: int) -> DeviceCache:
    position, kv_heads, dim = a["past_k"].shape
    cache = DeviceCache(*(bench.empty(kv_heads, capacity, dim) for _ in "kv"))
    if position:
        bench.a.kv_append(cache, 0, bench.put(a["past_k"]), bench.put(a["past_v"]))
    return cache


def attend(bench: Bench, a: dict[str, np.ndarray], capacity: int) -> tuple[np.ndarray, DeviceCache, np.ndarray]:
    """The output [HQ, D], the cache afterwards, and the prepared queries."""
    (heads, width), position = a["query_gate"].shape, len(a["past_k"])
    cache, out = filled(bench, a, capacity), bench.empty(heads, width // 2)
    work = {name: bench.empty(*shape) for name, shape in attention_work(heads, width // 2, capacity).items()}
    there = bench.put(np.array([position], np.int32))
    up = {name: bench.put(array) for name, array in a.items() if array.size}
    bench.t.attention(up["query_gate"], up["key"], up["value"], up["q_norm"], up["k_norm"], (up["cos"], up["sin"]), there,
                      cache, work, out, EPS, 1 / math.sqrt(width // 2))
    return bench.get(out), cache, bench.get(work["query"])


def separate_rows(bench: Bench, a: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Queries [HQ, D] and keys [HA, D], normalised and turned, by the kernels for many tokens."""
    found = []
    for name, norm in (("query_gate", "q_norm"), ("key", "k_norm")):
        rows, dim = len(a[name]), a["key"].shape[1]
        y = bench.empty(1, rows, dim)
        bench.k.rms_norm(bench.put(a[name]), bench.put(a[norm]), EPS, y.reshape(rows, dim))
        bench.k.rope(y, bench.put(a["cos"][None]), bench.put(a["sin"][None]))
        found.append(bench.get(y)[0])
    return found[0], found[1]


def check_attention(bench: Bench, position: int, heads: int, kv_heads: int, dim: int) -> bool:
    """Prepared rows to the bit; the output within twice torch's float32 error, or what an element goes through by itself:
    as in test_sm20_attention.attention_case, and sigmoid's, the product with it and a merge's factor."""
    a = attention_arrays(Draws(position + dim), position, heads, kv_heads, dim, 8)
    got, cache, queries = attend(bench, a, position + 1 + SPLIT)
    query, key = separate_rows(bench, a)
    k, v = (np.concatenate([a[past], now[None]]) for past, now in (("past_k", key), ("past_v", a["value"])))
    exact = same_bits(queries, query) and all(
        same_bits(bench.get(array)[:, : position + 1], np.ascontiguousarray(rows.transpose(1, 0, 2)))
        for array, rows in ((cache.k, k), (cache.v, v)))
    gate = 1 / (1 + np.exp(-a["query_gate"][:, dim:].astype(np.float64)))
    truth, single = (ref_attention.attend(*(torch.from_numpy(x).to(dtype) for x in (query[None], k, v))).numpy()[0]
                     for dtype in (torch.float64, torch.float32))
    scores = np.einsum("hd,shd->hs", query.astype(np.float64), np.repeat(k, heads // kv_heads, axis=1)) / math.sqrt(dim)
    steps = 2 * float(np.abs(scores).max()) + 4 * EXP_ULP + 5 + 2 * SIGMOID_ULP + 1
    case = Case({}, {"o": truth * gate}, {"o": np.array(np.abs((single - truth) * gate).max())})
    return exact and TwiceReference(steps, float(np.abs(v).max())).judge({"o": got}, case).passed


ATTENTIONS = ((0, 2, 1, 32), (1, 8, 2, 64), (63, 6, 2, 96), (64, 4, 4, 32), (65, 9, 1, 256), (200, 8, 2, 256),
              (1023, 4, 2, 32), (1100, 4, 2, 32))


@pytest.mark.parametrize("shape", ATTENTIONS)
def test_attention(device: Device, shape: tuple[int, ...]) -> None:
    assert check_attention(Bench(device), *shape)


def test_room_in_the_cache_changes_no_bit(device: Device) -> None:
    a = attention_arrays(Draws(9), 150, 4, 2, 32, 8)
    results = [attend(Bench(device), a, capacity)[0] for capacity in (151, 192, 700)]
    assert all(same_bits(results[0], other) for other in results[1:])


# the choice of a token


@pytest.mark.parametrize("n", [1, 5, 300, 40_000])
def test_argmax(device: Device, n: int) -> None:
    bench, d = Bench(device), Draws(n)
    rows = [d.normal(n), np.zeros(n, np.float32), np.full(n, -np.inf, np.float32)]
    ties = np.round(d.normal(n)).astype(np.float32)
    holes = np.where(np.arange(n) % 3 == 0, np.nan, d.normal(n)).astype(np.float32)
    for x in (*rows, ties, holes):
        work = {name: bench.empty(*shape, dtype=np.int32 if "index" in name else np.float32)
                for name, shape in argmax_work().items()}
        index = bench.empty(1, dtype=np.int32)
        bench.t.argmax(bench.put(x), work, index)
        expected = -1 if np.isnan(x).all() else int(np.nanargmax(x))
        assert bench.get(index)[0] == expected


# checks


def test_wrong_arguments_are_refused(device: Device) -> None:
    bench = Bench(device)
    x, w = bench.empty(64), bench.matrix(Matrix.from_f32(np.ones((8, 32), np.float32), "q8_0"))
    with pytest.raises(ValueError, match=r"gemv: q8_0 matrix \[8, 32\], x \(64,\)"):
        bench.t.gemv(x, [(w, bench.empty(8))])
    with pytest.raises(ValueError, match="gemv: 5 matrices"):
        bench.t.gemv(x, [(w, x)] * 5)
    with pytest.raises(ValueError, match=r"gdn_token: .* do not fit 1 key heads"):
        bench.t.gdn_token(*[x] * 4, bench.empty(4, 64), x, x, x, bench.empty(3, 64),
                          bench.empty(1, 32, 48), x, 1, EPS, EPS, 1.0)
