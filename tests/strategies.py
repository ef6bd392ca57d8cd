"""Inputs of the stages. Hypothesis draws structure (sizes, ratios, an edge, a seed); the bulk comes from the seed.

Drawing raw numbers would shrink for minutes. A builder takes `Draws` and the structure and returns arrays by name. With
a fixed structure and seed it makes a golden's inputs, so it uses IEEE arithmetic and raw generator bits only: the same
bytes on every machine and with every NumPy.
"""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from fermi_engine.compare import Arrays
from fermi_engine.formats import FORMATS

EDGES = ("plain", "zero row", "outlier", "small", "tiny", "subnormal", "ties")


class Draws:
    """Numbers by seed; float32 unless said otherwise."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def raw(self, *shape: int) -> np.ndarray:
        """uint64, every bit random."""
        return self._bits.random_raw(int(np.prod(shape))).reshape(shape)

    def unit(self, *shape: int) -> np.ndarray:
        """float64 in [0, 1)."""
        return (self.raw(*shape) >> np.uint64(11)) * 2.0**-53

    def uniform(self, low: float, high: float, *shape: int) -> np.ndarray:
        return (low + (high - low) * self.unit(*shape)).astype(np.float32)

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        """Nearly normal, deviation `scale`: sums of four 16-bit numbers."""
        quarters = self.raw(*shape).reshape(-1).view(np.uint16).reshape(*shape, 4)
        return ((quarters.sum(-1, dtype=np.float64) / 65535 - 2) * (3.0**0.5 * scale)).astype(np.float32)

    def integers(self, low: int, high: int, *shape: int) -> np.ndarray:
        """int64 in low..high-1."""
        return low + np.floor(self.unit(*shape) * (high - low)).astype(np.int64)

    def any_floats(self, *shape: int) -> np.ndarray:
        """Any bit pattern: all exponents alike, both signs, infinities and NaN."""
        return (self.raw(*shape) >> np.uint64(32)).astype(np.uint32).view(np.float32)

    def powers(self, low: int, high: int, *shape: int) -> np.ndarray:
        """Positive, each power of two in 2^low..2^high alike."""
        exponent = self.integers(low, high, *shape)
        return np.ldexp(1 + self.unit(*shape), exponent).astype(np.float32)

    def signed_edge(self, edge: str, *shape: int, scale: float = 1.0) -> np.ndarray:
        """Normal numbers with one thing that breaks kernels: see EDGES."""
        x = self.normal(*shape, scale=scale)
        if edge == "zero row" and x.size:
            x[0] = 0.0
        elif edge == "outlier" and x.size:
            x.reshape(-1)[x.size // 3] = -3e4
        elif edge in ("tiny", "subnormal"):
            x = (x * np.float64(1e-38 if edge == "tiny" else 2.0**-142)).astype(np.float32)
        elif edge == "small":  # where the eps of a norm counts
            x *= np.float32(1e-3)
        elif edge == "ties":
            x = np.rint(x * 2).astype(np.float32) + np.float32(0)
        return x


def scalar(value: float) -> np.ndarray:
    """float32 or int64 without dimensions."""
    return np.array(value, np.int64 if isinstance(value, int) else np.float32)


# Sizes round the tiles of the kernels: 4 and 8 columns, 8 rows, 16 lanes, blocks of 32.
lengths = st.sampled_from((1, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 48)) | st.integers(1, 80)
few = st.integers(1, 6)
gaps = st.integers(0, 5)
edges = st.sampled_from(EDGES)


# Elementwise


def floats(d: Draws, count: int, kind: str, reach: float) -> Arrays:
    """kind: 'bits' any float at all; 'range' within +-reach; 'powers' all magnitudes up to reach, and zeros; or 'all'."""
    if kind == "all":
        return {"x": np.concatenate([floats(d, count // 3, part, reach)["x"] for part in ("bits", "range", "powers")])}
    if kind == "bits":
        return {"x": d.any_floats(count)}
    if kind == "range":
        return {"x": d.uniform(-reach, reach, count)}
    sign = np.where(d.unit(count) < 0.5, np.float32(-1), np.float32(1))
    x = d.powers(-149, int(np.log2(reach)) + 1, count) * sign
    x[::7] = np.where(d.unit(len(x[::7])) < 0.5, np.float32(-0.0), np.float32(0))
    return {"x": x}


def sums(d: Draws, rows: int, n: int, edge: str) -> Arrays:
    return {"a": d.signed_edge(edge, rows, n), "b": d.normal(rows, n)}


def gate_up(d: Draws, rows: int, n: int, edge: str, spread: float) -> Arrays:
    return {"gate_up": np.concatenate([d.normal(rows, n, scale=spread), d.signed_edge(edge, rows, n)], axis=1)}


def gated_rows(d: Draws, rows: int, n: int, column: int, edge: str, spread: float) -> Arrays:
    return {"x": d.signed_edge(edge, rows, n), "gate": d.normal(rows, column + n + 1, scale=spread),
            "column": scalar(column)}


# Quantisation and matrices


def weight_rows(d: Draws, rows: int, blocks: int, edge: str) -> Arrays:
    """float32 rows for a quantiser: no NaN, no scale beyond float16. 'halves' sit on the borders of q8_0 codes."""
    n = 32 * blocks
    if edge == "powers":
        sign = np.where(d.unit(rows, n) < 0.5, np.float32(-1), np.float32(1))
        return {"x": d.powers(-149, 15, rows, n) * sign}
    if edge == "halves":
        x = (d.integers(-254, 255, rows, n) / 2).astype(np.float32)
        x[:, ::32] = np.where(d.unit(rows, blocks) < 0.5, np.float32(-127), np.float32(127))
        return {"x": x + np.float32(0)}
    x = d.signed_edge(edge, rows, n)
    if edge == "zero block":
        x.reshape(rows, blocks, 32)[:, blocks // 2] = 0.0
    return {"x": x}


def weighted_rows(d: Draws, rows: int, blocks: int, edge: str) -> Arrays:
    """Rows for a quantiser, and weights of very different sizes of a row's elements: some 0, all of the first block's now and
    then."""
    weight = d.unit(32 * blocks) ** 6
    weight[d.unit(32 * blocks) < 0.3] = 0
    if d.unit(1)[0] < 0.3:
        weight[:32] = 0
    return {**weight_rows(d, rows, blocks, edge), "weight": weight.astype(np.float32)}


def stored_rows(d: Draws, rows: int, blocks: int, format: str, edge: str) -> np.ndarray:
    """Plain bytes of weights. Any byte is a code; scales are halves of either sign: zero, subnormal or large too."""
    row = FORMATS[format]
    if row.lanes == 1:
        return _finite_halves(d, rows, 32 * blocks).view(np.uint8)
    fill = {"highest": 0xFF if format == "q4_0" else 0x7F, "lowest": 0x00 if format == "q4_0" else 0x80}
    plain = (d.raw(rows, blocks, row.block_bytes) >> np.uint64(56)).astype(np.uint8)
    if edge in fill:
        plain[...] = fill[edge]
    scale = d.uniform(-1, 1, rows, blocks, 1).astype(np.float16)
    if edge == "zero scales":
        scale[::2] = 0
    elif edge == "any scales":
        scale = _finite_halves(d, rows, blocks)[..., None]
    plain[..., :2] = scale.view(np.uint8)
    return plain.reshape(rows, -1)


def _finite_halves(d: Draws, *shape: int) -> np.ndarray:
    halves = (d.raw(*shape) >> np.uint64(48)).astype(np.uint16).view(np.float16)
    return np.where(np.isfinite(halves), halves, np.float16(1))


def product(d: Draws, rows: int, blocks: int, tokens: int, picks: int, format: str, edge: str) -> Arrays:
    """Weights and activations of a quantised product, and `picks` rows of the latter. 'highest' and 'lowest': the largest
    integer dots there are."""
    n = 32 * blocks
    codes = d.integers(-127, 128, tokens, n).astype(np.int8)
    if edge in ("highest", "lowest"):
        codes = np.broadcast_to(np.where(d.unit(tokens, 1) < 0.5, -127, 127), (tokens, n)).astype(np.int8)
    scales = d.powers(-30, 8, tokens, blocks)
    if edge == "any scales":
        scales = d.powers(-117, 8, tokens, blocks)
    if edge == "zero scales":  # what a row of zeros is quantised to
        scales[0], codes[0] = 0, 0
    sums = codes.reshape(tokens, blocks, 32).sum(-1, dtype=np.int32)
    return {"w": stored_rows(d, rows, blocks, format, edge), "codes": codes, "d": scales, "sums": sums,
            "source": d.integers(0, tokens, picks).astype(np.int32)}


def grouped_product(
    d: Draws, experts: int, rows: int, blocks: int, tokens: int, k: int, gap: int, format: str, edge: str, choice: str,
) -> Arrays:
    """Weights of some experts, activation rows for every (token, slot), and the work list of a choice of experts."""
    k = min(k, experts)
    operands = product(d, experts * rows, blocks, tokens * k, 0, format, edge)
    del operands["source"]
    work = work_list(chosen_experts(d, tokens, experts, k, choice), experts)
    return {**operands, "w": operands["w"].reshape(experts, rows, -1), "gap": scalar(gap), **work}


def picked_rows(d: Draws, rows: int, blocks: int, first: int, format: str, edge: str) -> Arrays:
    return {"w": stored_rows(d, rows, blocks, format, edge), "first": scalar(first % rows),
            "ids": d.integers(0, rows, 1 + rows // 2).astype(np.int32)}


def rows_and_matrix(d: Draws, tokens: int, rows: int, n: int, column: int, edge: str) -> Arrays:
    return {"x": d.signed_edge(edge, tokens, n), "w": d.normal(rows, n), "column": scalar(column)}


# Norms


def norm_rows(d: Draws, rows: int, n: int, extra: int, offset: int, edge: str) -> Arrays:
    return {"x": d.signed_edge(edge, rows, n + extra), "w": d.normal(n, scale=0.3), "eps": scalar(1e-6),
            "offset": scalar(float(offset))}


def gated_norm_rows(d: Draws, rows: int, n: int, edge: str, spread: float) -> Arrays:
    return {"o": d.signed_edge(edge, rows, n), "z": d.normal(rows, n, scale=spread), "w": d.uniform(0.5, 1.5, n),
            "eps": scalar(1e-6)}


def l2_heads(d: Draws, tokens: int, heads: int, n: int, column: int, extra: int, edge: str) -> Arrays:
    return {"x": d.signed_edge(edge, tokens, column + heads * n + extra), "column": scalar(column),
            "heads": scalar(heads), "n": scalar(n), "eps": scalar(1e-6), "scale": scalar(1 / math.sqrt(n))}


# Gated DeltaNet


def gate_inputs(d: Draws, tokens: int, heads: int, edge: str) -> Arrays:
    """'no decay', 'total decay' and 'infinite rate': the corners, the last with a softplus of zero beside others.
    'corners': one head of each beside plain ones."""
    A_log, dt_bias = d.uniform(-3, 3, heads), d.uniform(-8, 3, heads)
    a, b = d.normal(tokens, heads, scale=8), d.normal(tokens, heads, scale=30)
    if edge == "no decay":
        A_log[...] = -20
    elif edge == "total decay":
        A_log[...] = 88
    elif edge == "infinite rate":
        A_log[...], a[0] = np.inf, -1e4
    elif edge == "corners":
        A_log[:3], a[0, 2] = (-20, 88, np.inf)[:heads], -1e4
    return {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias}


def conv_rows(d: Draws, tokens: int, channels: int, taps: int, edge: str) -> Arrays:
    return {"x": d.signed_edge(edge, tokens, channels), "w": d.normal(taps, channels),
            "tail": d.normal(taps - 1, channels)}


def delta_operands(d: Draws, tokens: int, k_heads: int, ratio: int, dk: int, dv: int, column: int, edge: str) -> Arrays:
    """q, k of unit length (q scaled), log-decay in [-20, -1e-4]; 'keep' decays by nothing, 'forget' by everything."""
    v_heads = k_heads * ratio
    q, k = (_unit_rows(d.normal(tokens, k_heads, dk)) for _ in range(2))
    g = -np.minimum(d.powers(-13, 4, tokens, v_heads), np.float32(20)) - np.float32(1e-4)
    if edge in ("keep", "forget"):
        g[...] = 0 if edge == "keep" else -200
    vector_edge = edge if edge in EDGES else "plain"
    return {"q": (q / np.sqrt(np.float64(dk))).astype(np.float32), "k": k,
            "v": d.signed_edge(vector_edge, tokens, column + v_heads * dv + 1), "column": scalar(column), "g": g,
            "beta": d.uniform(0, 1, tokens, v_heads), "state": d.normal(v_heads, dk, dv)}


def _unit_rows(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    squares = np.zeros(x.shape[:-1])
    for i in range(x.shape[-1]):  # in a fixed order: np.sum's depends on the CPU
        squares += wide[..., i] ** 2
    return (wide / np.sqrt(squares + 1e-6)[..., None]).astype(np.float32)


# Attention


def rope_positions(d: Draws, tokens: int, half: int, reach: int) -> Arrays:
    return {"positions": d.integers(0, reach, 3, tokens).astype(np.int32), "inv_freq": d.powers(-23, 0, half),
            "axis": d.integers(0, 3, half).astype(np.int32)}


def rope_heads(d: Draws, tokens: int, heads: int, half: int, extra: int, edge: str) -> Arrays:
    return {"x": d.signed_edge(edge, tokens, heads, 2 * half + extra), "cos": d.uniform(-1, 1, tokens, half),
            "sin": d.uniform(-1, 1, tokens, half)}


def attention_operands(
    d: Draws, past: int, tokens: int, kv_heads: int, group: int, head_dim: int, page_tokens: int, edge: str,
) -> Arrays:
    """Keys and values as bytes of the cache. 'sharp': scores far apart, so that one position takes all and running maxima
    jump; 'codes': any codes and scales."""
    keys = d.normal(past + tokens, kv_heads, head_dim)
    if edge == "sharp":
        keys *= np.float32(12)
    values = d.signed_edge(edge if edge in EDGES else "plain", past + tokens, kv_heads, head_dim)
    rows = {f"{format}.{name}": cache_rows(d, x, format, edge == "codes") for format in ("f32", "f16", "q8_0")
            for name, x in (("k", keys), ("v", values)) if format != "q8_0" or head_dim % 32 == 0}
    return {"q": d.normal(tokens, kv_heads * group, head_dim), **rows,
            "page_tokens": scalar(page_tokens), "scale": scalar(1 / math.sqrt(head_dim))}


def cache_rows(d: Draws, x: np.ndarray, format: str, any_codes: bool) -> np.ndarray:
    """float32 [S, HKV, D] -> bytes of the cache, uint8 [S, HKV, row]; codes of q8_0 near the values that x has, or any."""
    if format == "f32":
        return x.view(np.uint8)
    if format == "f16":
        return x.astype(np.float16).view(np.uint8)
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scale = (np.abs(blocks).max(-1) / np.float32(127)).astype(np.float16)
    if any_codes:
        scale = d.uniform(-0.03, 0.03, *scale.shape).astype(np.float16)
        codes = d.integers(-127, 128, *x.shape).astype(np.int8)
    else:
        step = np.where(scale == 0, np.float32(1), scale.astype(np.float32))[..., None]
        codes = np.clip(np.rint(blocks / step), -127, 127).astype(np.int8).reshape(x.shape)
    return np.concatenate([codes.view(np.uint8), scale.view(np.uint8)], axis=-1)


def cache_operands(d: Draws, start: int, tokens: int, kv_heads: int, head_dim: int, page_tokens: int, edge: str) -> Arrays:
    """Rows of one edge, or of 'all' in turn."""
    shape = start + tokens, kv_heads, head_dim
    rows = {"k": cached_values(d, edge, *shape), "v": cached_values(d, edge, *shape)}
    return {**rows, "start": scalar(start), "page_tokens": scalar(page_tokens)}


CACHE_EDGES = ("plain", "powers", "bits", "ties", "zero block")


def cached_values(d: Draws, edge: str, *shape: int) -> np.ndarray:
    """'powers': all magnitudes, beyond the largest half too; 'bits': any float; 'ties': halfway between halves, subnormal
    ones as well; 'zero block': a q8_0 scale of 0."""
    if edge == "all":
        x = np.empty(shape, np.float32)
        for i, one in enumerate(CACHE_EDGES):
            x[i :: len(CACHE_EDGES)] = cached_values(d, one, *x[i :: len(CACHE_EDGES)].shape)
        return x
    if edge == "bits":
        return d.any_floats(*shape)
    if edge == "powers":
        return d.powers(-149, 127, *shape) * np.where(d.unit(*shape) < 0.5, np.float32(-1), np.float32(1))
    if edge == "ties":
        return _between_halves(d, *shape)
    x = d.normal(*shape)
    if edge == "zero block":
        x[..., : 1 + shape[-1] // 2] = 0
    return x


def _between_halves(d: Draws, *shape: int) -> np.ndarray:
    """In the middle of two neighbouring halves of any size, or a float beside it."""
    low = (d.raw(*shape) >> np.uint64(48)).astype(np.uint16) & np.uint16(0xFBFF)  # neither infinite nor NaN, nor the largest
    high = (low + np.uint16(1)).view(np.float16).astype(np.float64)
    middle = ((low.view(np.float16).astype(np.float64) + high) / 2).astype(np.float32)
    bits = middle.view(np.uint32).astype(np.int64) + d.integers(-1, 2, *shape)
    return bits.astype(np.uint32).view(np.float32)


# Experts


def router_logits(d: Draws, tokens: int, experts: int, k: int, edge: str) -> Arrays:
    return {"logits": d.signed_edge(edge, tokens, experts, scale=4.0), "k": scalar(min(k, experts))}


def chosen_experts(d: Draws, tokens: int, experts: int, k: int, choice: str) -> np.ndarray:
    """int32 [T, k], different ones for each token. 'same': all tokens alike; 'last': from the highest ids only."""
    ids = np.argsort(d.raw(tokens, experts), axis=1, kind="stable")[:, :k]
    if choice == "same":
        ids[...] = ids[:1]
    elif choice == "last":
        ids[...] = experts - 1 - np.arange(k)
    return ids.astype(np.int32)


def work_list(ids: np.ndarray, experts: int) -> Arrays:
    """csrc/kernels.h, expert_rows, as arrays by name; entries beyond the hits as kernels leave them."""
    order = np.argsort(ids.reshape(-1), kind="stable")
    counts = np.bincount(ids.reshape(-1), minlength=experts)
    hit, most = np.flatnonzero(counts), min(experts, ids.size)
    row_of = np.empty(ids.size, np.int32)
    row_of[order] = np.arange(ids.size)
    padded = np.full(most, -1), np.full(most + 1, ids.size)
    padded[0][: len(hit)], padded[1][: len(hit)] = hit, np.cumsum(counts[hit]) - counts[hit]
    arrays = *padded, np.array([len(hit)]), order // ids.shape[1], row_of.reshape(ids.shape)
    return dict(zip(("hit", "first", "hits", "source", "row_of"), (x.astype(np.int32) for x in arrays), strict=True))


def expert_choice(d: Draws, tokens: int, experts: int, k: int, choice: str) -> Arrays:
    return {"ids": chosen_experts(d, tokens, experts, min(k, experts), choice), "experts": scalar(experts)}


def expert_rows(d: Draws, tokens: int, k: int, n: int, edge: str) -> Arrays:
    order = np.argsort(d.raw(tokens * k), kind="stable")
    return {"expert_out": d.signed_edge(edge, tokens * k, n), "row_of": order.astype(np.int32).reshape(tokens, k),
            "weights": d.uniform(0, 1, tokens, k), "shared": d.normal(tokens, n),
            "shared_gate": d.normal(tokens, 1, scale=20), "k": scalar(k)}
