"""Attention on the CPU beyond a span of 1024 positions: the order of its sums, written down a second time, and the same bits for
every backend, format, thread count, page size and cut."""

from __future__ import annotations

import numpy as np
import pytest

from fermi_engine import Engine, EngineConfig
from fermi_engine.convert import convert
from fermi_engine.kernels import dispatch
from fermi_engine.kernels.cpu import KV_FORMATS, CpuKernels
from fermi_engine.state import KVPages
from tests.guarded import GuardedKernels
from tools.make_checkpoint import make_checkpoint

BLOCK, SPAN, LANES = 64, 1024, 16
SCALE = 0.25
KV_HEADS = 2


def lane_sum(x: np.ndarray) -> np.ndarray:
    """Sums along the last axis of float32 as csrc/kernels.h says."""
    lanes = np.zeros((*x.shape[:-1], LANES), np.float32)
    for i in range(x.shape[-1]):
        lanes[..., i % LANES] += x[..., i]
    for width in (8, 4, 2, 1):
        lanes = lanes[..., :width] + lanes[..., width:]
    return lanes[..., 0]


class Attended:
    """One query over keys and values [S, D], a position at a time."""

    def __init__(self, exp, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        self.exp, self.v, self.m = exp, v, np.float32(-np.inf)
        self.scores = lane_sum(q * k) * np.float32(SCALE)

    def span(self, begin: int, end: int) -> tuple[np.float32, np.ndarray]:
        """The sums of a span's weights and of its weighted values; moves the maximum on."""
        weights, values = np.float32(0), np.zeros(self.v.shape[1], np.float32)
        for first in range(begin, end, BLOCK):
            s, before = self.scores[first:min(first + BLOCK, end)], self.m
            self.m = max(before, s.max())
            p, acc = self.exp(s - self.m), np.zeros(self.v.shape[1], np.float32)
            for weight, value in zip(p, self.v[first:], strict=False):
                acc = acc + weight * value
            c = self.exp(before - self.m)
            weights, values = (weights * c + lane_sum(p), values * c + acc) if first > begin else (lane_sum(p), acc)
        return weights, values

    def whole(self) -> np.ndarray:
        length = len(self.scores)
        total, out = self.span(0, min(SPAN, length))
        for begin in range(SPAN, length, SPAN):
            before = self.m
            weights, values = self.span(begin, min(begin + SPAN, length))
            g = self.exp(before - self.m)
            total, out = total * g + weights, out * g + values
        return out / total


def operands(length: int, tokens: int, group: int, dim: int, rising: bool = True) -> tuple[np.ndarray, ...]:
    """q [tokens, heads, dim], k and v [length, KV_HEADS, dim]. rising: most spans, and blocks, have a new maximum."""
    rng = np.random.default_rng(length + dim)
    q = rng.standard_normal((tokens, KV_HEADS * group, dim))
    k, v = (rng.standard_normal((length, KV_HEADS, dim)) for _ in "kv")
    if rising:
        q, k = np.abs(q), np.abs(k) * np.linspace(0.2, 1, length)[:, None, None]
    return tuple(x.astype(np.float32) for x in (q, k, v))


def attended(k: CpuKernels, q: np.ndarray, key: np.ndarray, value: np.ndarray, page: int = 64, format: str = "f32") -> np.ndarray:
    """The last tokens' attention over a cache that holds all of key and value."""
    length, heads, dim = key.shape
    cache = KVPages(heads, page, dim, format)
    cache.reserve(length)
    k.kv_append(cache, np.zeros(1, np.int64), key, value)
    return k.attention(q, cache, np.array([length - len(q)], np.int64), SCALE)


@pytest.mark.parametrize("name", dispatch.supported())
@pytest.mark.parametrize(("length", "dim"), [(1024, 8), (1025, 20), (1089, 40), (2048, 33), (2049, 16), (3100, 24)])
def test_sums_are_made_in_the_order_that_the_header_says(name, length, dim):
    """Three tokens, the first of which sees two positions fewer; in a view all of them see everything."""
    q, key, value = operands(length, 3, 1, dim)
    k = GuardedKernels(name)
    got = attended(k, q, key, value)
    seen_by = [np.stack([Attended(k.exp_f32, q[t, h], key[: length - 2 + t, h], value[: length - 2 + t, h]).whole()
                         for h in range(KV_HEADS)]) for t in range(3)]
    assert np.array_equal(got, np.stack(seen_by))
    if length < 2000:
        queries = np.concatenate([q, np.zeros((length - 3, *q.shape[1:]), np.float32)])
        view = k.full_attention(queries, key, value, length, SCALE)
        whole = [[Attended(k.exp_f32, q[t, h], key[:, h], value[:, h]).whole() for h in range(KV_HEADS)] for t in range(3)]
        assert np.array_equal(view[:3], np.array(whole))
    assert k.overruns() == 0


@pytest.mark.parametrize("format", KV_FORMATS)
@pytest.mark.parametrize("length", [1040, 2064])
def test_backends_threads_pages_and_cuts_give_the_same_bits(format, length):
    """40 tokens, some of which end before a span and some behind it: together, in two parts, and one at a time."""
    q, key, value = operands(length, 40, 3, 64)
    whole = attended(CpuKernels(dispatch.table("scalar"), 1), q, key, value, format=format)
    for name in dispatch.supported():
        for threads, page in ((1, 64), (2, 100), (12, 7)):
            k = CpuKernels(dispatch.table(name), threads)
            assert np.array_equal(attended(k, q, key, value, page, format), whole), (name, threads, page)
        for begin, end in ((0, 24), (0, 25), (24, 40), (23, 24), (24, 25)):  # the 24th token sees the end of a span
            past = length - 40 + end
            part = attended(k, q[begin:end], key[:past], value[:past], format=format)
            assert np.array_equal(part, whole[begin:end]), (name, begin, end)


def test_views_have_the_same_bits_on_every_backend():
    q, key, value = operands(2200, 2200, 1, 20)  # two views
    found = [CpuKernels(dispatch.table(name), 2).full_attention(q, key, value, 1100, SCALE) for name in dispatch.supported()]
    assert all(np.array_equal(one, found[0]) for one in found)


def test_a_head_of_more_dimensions_than_have_room():
    q, key, value = operands(1100, 2, 1, 1030)
    found = [attended(CpuKernels(dispatch.table(name), 1), q, key, value) for name in dispatch.supported()]
    assert all(np.array_equal(one, found[0]) for one in found)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    directory = tmp_path_factory.mktemp("spans")
    return convert(make_checkpoint(directory / "dense", seed=3, family="dense"), directory / "dense.pack")


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_a_prompt_across_a_span_is_one_however_it_is_cut(pack, kv_format):
    """Prefill in pieces, then decode: logits and state as in one pass, on every backend."""
    length, cuts = 1060, ([1023], [1024], [1025], [700, 1000, 1056])
    engines = [Engine.load(pack, config=EngineConfig(kv_format=kv_format, backend=name, threads=threads))
               for name, threads in zip(dispatch.supported(), (2, 7, 1), strict=False)]
    ids = np.random.default_rng(5).integers(0, engines[0].config.vocab_size, length).tolist()
    plain = engines[0].session()
    last = plain.prefill(ids)
    state = {name: array.tobytes() for name, array in plain.state.arrays().items()}
    for engine, pieces in zip(engines * 2, cuts, strict=False):
        session = engine.session()
        for begin, end in zip([0, *pieces], pieces, strict=False):
            session.prefill(ids[begin:end])
        rest = ids[pieces[-1]:]
        got = [session.decode(token) for token in rest][-1]
        assert np.array_equal(got, last), pieces
        assert {name: array.tobytes() for name, array in session.state.arrays().items()} == state, pieces
