"""Every entry point of csrc/sm20 launched at least once, in small cases at sizes that no tile likes: what a slow checker can run.

Inputs lie in buffers of exactly their size, and outputs in ones that nobody has written to, so that compute-sanitizer sees
reads and writes beside them and reads of what was never written. Several launches of an op only where it has several forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fermi_engine.compare import Arrays
from fermi_engine.formats import Matrix
from fermi_engine.kernels import selftest
from fermi_engine.kernels.device_arrays import DeviceArray, DeviceExperts, DeviceMatrix
from fermi_engine.kernels.gpu import Device
from fermi_engine.kernels.gpu_kernels import LARGE_TILE, SMALL_TILE, GpuKernels, OpenChunk, gdn_chunk_scratch
from fermi_engine.kernels.sm20_attention import AttentionKernels, DeviceCache, DeviceExpertRows
from fermi_engine.kernels.sm20_token import WIDE_ROWS, TokenKernels, argmax_work, attention_work
from fermi_engine.kernels.sm20_vision import GELUS, VisionKernels, view_tiles
from tests import strategies as draw
from tests.strategies import Draws

TILES = {"": LARGE_TILE, "_small": SMALL_TILE}  # by suffix of the entry point


class Bench:
    """A device, its ops on one stream, arrays there and back."""

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.stream("case")
        self.rows, self.tokens = GpuKernels(device, self.stream), AttentionKernels(device, self.stream)
        self._buffers: list[Any] = []

    def room(self, *shape: int, dtype: Any = np.float32) -> DeviceArray:
        """Memory that holds anything."""
        buffer = self.device.alloc(math.prod(shape) * np.dtype(dtype).itemsize, "case")
        self._buffers.append(buffer)
        return DeviceArray.within(buffer, shape, dtype)

    def put(self, array: np.ndarray) -> DeviceArray:
        placed = self.room(*array.shape, dtype=array.dtype)
        placed.upload(self.device, np.ascontiguousarray(array), self.stream)
        return placed

    def get(self, array: DeviceArray) -> np.ndarray:
        out = np.empty(array.shape, array.dtype)
        array.download(self.device, out, self.stream)
        return out

    def run(self, case: Callable[[Bench, Draws], Arrays]) -> Arrays:
        """A case's results; its memory is freed."""
        found = case(self, Draws(7))
        self.device.synchronize()
        while self._buffers:
            self.device.free(self._buffers.pop())
        return found


def _selftest(bench: Bench, d: Draws) -> Arrays:
    selftest.check(bench.device)
    return {}


class Tiled(GpuKernels):
    """Products in large or small tiles whatever their shape, but for row lengths that want neither."""

    def __init__(self, bench: Bench, tile: str) -> None:
        super().__init__(bench.device, bench.stream)
        self.suffix = tile

    def _gemm_tile(self, m: int, x: DeviceArray, w: DeviceMatrix) -> tuple[str, tuple[int, int, int]]:
        if w.cols % 16:
            return super()._gemm_tile(m, x, w)
        return f"gemm_{w.format}{self.suffix}", TILES[self.suffix]


def _gemm(bench: Bench, d: Draws) -> Arrays:
    """All formats and tiles, rows in order and picked; the tile for any length of row. Two parts of a row, the first short."""
    m, n, found = 67, 131, {}
    source = bench.put(d.integers(0, m, m).astype(np.int32))
    for format, k in (("f32", 528), ("q4_0", 544), ("q8_0", 544), ("f32", 523)):
        x, w = bench.put(d.normal(m, k)), bench.put(Matrix.from_f32(d.normal(n, k), format).data)
        for tile in TILES:
            ops = Tiled(bench, tile)
            for picked in (None, source):
                out = bench.room(m, n)
                ops.gemm(x, DeviceMatrix(format, n, k, w), out, source=picked)
                found[f"{format} {k} {tile} {picked is not None}"] = bench.get(out)
    return found


def _grouped_gemm(bench: Bench, d: Draws) -> Arrays:
    experts, tokens, top_k, n, k, found = 5, 41, 2, 70, 64, {}
    work = {name: bench.put(x) for name, x in draw.work_list(draw.chosen_experts(d, tokens, experts, top_k, "any"),
                                                             experts).items()}
    x = bench.put(d.normal(tokens, k))
    for format in ("q4_0", "q8_0"):
        stored = [Matrix.from_f32(d.normal(n, k), format).data for _ in range(experts)]
        held = DeviceExperts(format, experts, n, k, stored[0].nbytes, bench.put(np.concatenate([w.reshape(-1) for w in stored])))
        for small in (False, True):
            tile_rows = (SMALL_TILE if small else LARGE_TILE)[0]
            tiles = bench.room(1 + 2 * (experts + tokens * top_k // tile_rows), dtype=np.int32)
            out = bench.room(tokens * top_k, n)
            bench.rows.grouped_tiles(work["first"], work["hits"], tiles, tile_rows)
            bench.rows.grouped_gemm(x, held, work["first"], tiles, out, work["source"], work["hit"], small)
            found[f"{format} {small}"] = bench.get(out)
    return found


def _gemv_rows(bench: Bench, d: Draws) -> Arrays:
    m, n, k, found = 3, 131, 96, {}
    x, source = bench.put(d.normal(m, k)), bench.put(np.array([2, 0, 1], np.int32))
    for format in ("q4_0", "q8_0"):
        w, out = bench.put(Matrix.from_f32(d.normal(n, k), format).data), bench.room(m, n)
        bench.tokens.gemv_rows(x, DeviceMatrix(format, n, k, w), out, source)
        found[format] = bench.get(out)
    return found


def _rows(bench: Bench, d: Draws) -> Arrays:
    rows, found = 21, {}
    ids = bench.put(np.array([20, 0, 7, 7, 13], np.int32))
    for format, n in (("f32", 37), ("f16", 37), ("q4_0", 96), ("q8_0", 96)):
        w = DeviceMatrix(format, rows, n, bench.put(Matrix.from_f32(d.normal(rows, n), format).data))
        whole, some = bench.room(rows - 2, n), bench.room(5, n)
        bench.rows.rows(w, whole, first=2)
        bench.rows.rows(w, some, ids)
        found |= {f"{format} whole": bench.get(whole), f"{format} some": bench.get(some)}
    return found


def _attention(bench: Bench, d: Draws) -> Arrays:
    """Groups of three heads straddle tiles, the cache has room behind the last position, and a span ends within the new ones."""
    past, tokens, heads, kv_heads, dim = 1000, 45, 6, 2, 32
    cache = DeviceCache(*(bench.room(kv_heads, past + tokens + 3, dim) for _ in "kv"))
    for begin, count in ((0, past), (past, tokens)):
        bench.tokens.kv_append(cache, begin, *(bench.put(d.normal(count, kv_heads, dim)) for _ in "kv"))
    out, total = bench.room(tokens, heads, dim), bench.room(tokens, heads, dim)
    bench.tokens.attention(bench.put(d.normal(tokens, heads, dim)), cache, past, dim**-0.5, out, total)
    return {"o": bench.get(out)}


def _routing(bench: Bench, d: Draws) -> Arrays:
    """Two chunks of pairs in the work list; the sum with the shared expert and without."""
    tokens, experts, k, n = 173, 37, 3, 37
    ids, weights = bench.room(tokens, k, dtype=np.int32), bench.room(tokens, k)
    bench.tokens.router_topk(bench.put(d.normal(tokens, experts)), ids, weights)
    work = DeviceExpertRows(**{name: bench.room(*shape, dtype=np.int32)
                               for name, shape in DeviceExpertRows.shapes(tokens, k, experts).items()})
    bench.tokens.expert_rows(ids, experts, work)
    out, alone, expert_out = bench.room(tokens, n), bench.room(tokens, n), bench.put(d.normal(tokens * k, n))
    shared, gate = bench.put(d.normal(tokens, n)), bench.put(d.normal(tokens, 2))
    bench.tokens.moe_combine(expert_out, work.row_of, weights, alone)
    bench.tokens.moe_combine(expert_out, work.row_of, weights, out, shared, gate)
    return {"ids": bench.get(ids), "weights": bench.get(weights), "y": bench.get(out), "alone": bench.get(alone),
            **{name: bench.get(array) for name, array in vars(work).items()}}


def _norms(bench: Bench, d: Draws) -> Arrays:
    """Rows that share a thread block, and one longer than a block's first turn."""
    found = {}
    for rows, n in ((11, 37), (2, 1027)):
        x, w, z = bench.put(d.normal(rows, n + 3)), bench.put(d.normal(n)), bench.put(d.normal(rows, n))
        out, gated = bench.room(rows, n), bench.room(rows, n)
        bench.rows.rms_norm(x, w, 1e-6, out)
        bench.rows.gated_rms_norm(out, z, w, 1e-6, gated)
        found |= {f"rms {n}": bench.get(out), f"gated {n}": bench.get(gated)}
    x, heads = bench.put(d.normal(7, 3 + 5 * 33)), bench.room(7, 5, 33)
    bench.rows.l2_norm(x, 3, 5, 33, 1e-6, 0.5, heads)
    return {**found, "l2": bench.get(heads)}


def _elementwise(bench: Bench, d: Draws) -> Arrays:
    rows, n = 29, 37
    both, x = bench.put(d.normal(rows, 2 * n)), bench.put(d.normal(rows, n))
    swiglu, gated, total = (bench.room(rows, n) for _ in range(3))
    bench.rows.swiglu(both, swiglu)
    bench.rows.sigmoid_mul(x, both, n - 1, gated)
    bench.rows.add(swiglu, gated, total)
    return {"swiglu": bench.get(swiglu), "gated": bench.get(gated), "total": bench.get(total)}


def _conv(bench: Bench, d: Draws) -> Arrays:
    """Fewer tokens than taps, then more than a thread takes."""
    channels, taps, found = 261, 4, {}
    tail, w = bench.put(d.normal(taps - 1, channels)), bench.put(d.normal(taps, channels))
    for tokens in (2, 35):
        out = bench.room(tokens, channels)
        bench.rows.conv1d_silu(bench.put(d.normal(tokens, channels)), w, tail, out)
        found |= {f"y {tokens}": bench.get(out), f"tail {tokens}": bench.get(tail)}
    return found


def _rope(bench: Bench, d: Draws) -> Arrays:
    """Positions near and far: small arguments of sine and cosine, and such as take the long reduction."""
    tokens, heads, half = 9, 3, 5
    positions = np.array([np.arange(tokens), 1000 * np.arange(tokens), 10**7 * np.arange(tokens)], np.int32)
    frequencies, axis = bench.put(d.uniform(1e-6, 1.0, half)), bench.put((np.arange(half) % 3).astype(np.int32))
    cos, sin, x = bench.room(tokens, half), bench.room(tokens, half), bench.put(d.normal(tokens, heads, 2 * half + 3))
    bench.rows.rope_tables(bench.put(positions), frequencies, axis, cos, sin)
    bench.rows.rope(x, cos, sin)
    return {"cos": bench.get(cos), "sin": bench.get(sin), "x": bench.get(x)}


def _delta_rule(bench: Bench, d: Draws) -> Arrays:
    """Gates; a call that leaves an open chunk, one that goes on from it with scratch for one chunk at a time; single steps.
    The scratch holds NaN: triangles are read as whole tiles, zeros that nobody has written included, and those never used."""
    heads, key_heads, dk, dv, found = 4, 2, 64, 32, {}
    state = d.normal(heads, dk, dv)
    carried = OpenChunk(**{name: bench.room(*shape) for name, shape in OpenChunk.shapes(key_heads, heads, dk, dv).items()})
    carried.state.upload(bench.device, state, bench.stream)
    final, stepped = bench.room(heads, dk, dv), bench.put(state)
    for tokens in (70, 133):
        g, beta = bench.room(tokens, heads), bench.room(tokens, heads)
        bench.rows.gdn_gates(*(bench.put(d.normal(*shape)) for shape in ((tokens, heads), (tokens, heads), (heads,), (heads,))),
                             g, beta)
        q, k = (bench.put(draw._unit_rows(d.normal(tokens, key_heads, dk))) for _ in "qk")
        v, out, one = bench.put(d.normal(tokens, 4 + heads * dv)), bench.room(tokens, heads, dv), bench.room(tokens, heads, dv)
        scratch = bench.put(np.full(gdn_chunk_scratch(tokens, carried.tokens, heads, at_once=1), np.nan, np.float32))
        bench.rows.gdn_chunk(q, k, v, 4, g, beta, carried, out, scratch, final)
        bench.rows.gdn_step(q, k, v, 4, g, beta, stepped, one)
        found |= {f"g {tokens}": bench.get(g), f"beta {tokens}": bench.get(beta), f"o {tokens}": bench.get(out),
                  f"stepped {tokens}": bench.get(one)}
    return {**found, "final": bench.get(final), "state": bench.get(stepped), "boundary": bench.get(carried.state),
            **{name: bench.get(getattr(carried, name).rows(0, carried.tokens)) for name in ("k", "v", "g", "beta")}}


def _token_products(bench: Bench, d: Draws) -> Arrays:
    """Every format beside others, behind a norm and added; gate and up; a matrix for the wide form, whose last block is short."""
    k, found = 288, {}
    ops, x, norm = TokenKernels(bench.device, bench.stream), bench.put(d.normal(k)), bench.put(d.normal(k))
    made = {format: DeviceMatrix(format, n, k, bench.put(Matrix.from_f32(d.normal(n, k), format).data))
            for format, n in (("f32", 13), ("q4_0", 70), ("q8_0", 41))}
    for is_added in (False, True):
        outs = {format: bench.put(d.normal(w.rows)) if is_added else bench.room(w.rows) for format, w in made.items()}
        ops.gemv(x, [(w, outs[format]) for format, w in made.items()], norm if is_added else None, 1e-6, is_added)
        found |= {f"{format} {is_added}": bench.get(y) for format, y in outs.items()}
    for format, w in made.items():
        out = bench.room(w.rows)
        ops.gemv_swiglu(x, w, w, out, norm, 1e-6)
        found[f"swiglu {format}"] = bench.get(out)
    few = DeviceArray.within(x.buffer, (32,), np.float32)
    for format in ("q4_0", "q8_0"):
        rows = WIDE_ROWS + 13
        stored, out = np.tile(Matrix.from_f32(d.normal(8, 32), format).data.reshape(-1), -(-rows // 8)), bench.room(rows)
        ops.gemv(few, [(DeviceMatrix(format, rows, 32, bench.put(stored)), out)])
        found[f"wide {format}"] = bench.get(out)
    return found


def _token(bench: Bench, d: Draws) -> Arrays:
    """The delta rule; attention over splits of two spans with room behind; the choice."""
    ops, heads, dk, dv, taps = TokenKernels(bench.device, bench.stream), 4, 64, 32, 4
    channels = 2 * 2 * dk + heads * dv
    arrays = {"qkv": (channels,), "z": (heads * dv,), "a": (heads,), "b": (heads,), "weight": (taps, channels),
              "A_log": (heads,), "dt_bias": (heads,), "norm": (dv,), "tail": (taps - 1, channels), "state": (heads, dk, dv)}
    up = {name: bench.put(d.normal(*shape)) for name, shape in arrays.items()}
    delta, past, dim = bench.room(heads * dv), 1077, 32
    ops.gdn_token(**up, out=delta, k_heads=2, l2_eps=1e-6, norm_eps=1e-6, q_scale=dk**-0.5)
    cache = DeviceCache(*(bench.room(2, past + 60, dim) for _ in "kv"))
    bench.tokens.kv_append(cache, 0, *(bench.put(d.normal(past, 2, dim)) for _ in "kv"))
    work = {name: bench.room(*shape) for name, shape in attention_work(6, dim, past + 60).items()}
    rows = [bench.put(d.normal(*shape)) for shape in ((6, 2 * dim), (2, dim), (2, dim), (dim,), (dim,))]
    out, place, tables = bench.room(6, dim), bench.put(np.array([past], np.int32)), tuple(bench.put(d.normal(4)) for _ in "cs")
    ops.attention(*rows, tables, place, cache, work, out, 1e-6, dim**-0.5)
    parts = {name: bench.room(*shape, dtype=np.int32 if "index" in name else np.float32) for name, shape in argmax_work().items()}
    index = bench.room(1, dtype=np.int32)
    ops.argmax(bench.put(d.normal(1237)), parts, index)
    return {"delta": bench.get(delta), "state": bench.get(up["state"]), "tail": bench.get(up["tail"]), "o": bench.get(out),
            "index": bench.get(index)}


def _vision_rows(bench: Bench, d: Draws) -> Arrays:
    """Row ops of the towers over rows that end inside a quad, one longer than a block."""
    ops, found = VisionKernels(bench.device, bench.stream), {}
    for rows, n in ((8, 53), (4, 1061)):
        x, b = bench.put(d.normal(rows, n)), bench.put(d.normal(n))
        out, mean, sums = bench.room(rows, n), bench.room(rows // 4, n), bench.put(d.normal(rows // 4, n))
        ops.layer_norm(x, b, b, 1e-6, out)
        ops.group_mean(x, mean)
        ops.group_mean(x, sums, b)
        found |= {f"norm {n}": bench.get(out), f"mean {n}": bench.get(mean), f"sums {n}": bench.get(sums)}
        for kind in GELUS:
            for bias in (None, b):
                ops.gelu(kind, x, out, bias)
                found[f"{kind} {n} {bias is None}"] = bench.get(out)
        ops.add_bias(x, b)
        ops.add_bias_residual(x, out, b)
        table, taps = bench.put(d.normal(7, n)), bench.put(d.integers(0, 7, rows, 4).astype(np.int32))
        ops.add_positions(x, b, table, taps, bench.put(d.normal(rows, 4)))
        ops.add_positions(x, b, table, bench.put(d.integers(0, 7, rows, 1).astype(np.int32)))
        found[f"x {n}"] = bench.get(x)
    qkv, angles = bench.put(d.normal(5, 3 * 2 * 24)), [bench.put(d.normal(5, 12)) for _ in "cs"]
    ops.add_bias_rope(qkv, bench.put(d.normal(144)), *angles, 2)
    return {**found, "rope": bench.get(qkv)}


def _vision_attention(bench: Bench, d: Draws) -> Arrays:
    """Views of one tile and of several, heads of a pass of dimensions and of two; windows of more heads than a pass."""
    ops, found = VisionKernels(bench.device, bench.stream), {}
    for heads, dim, lengths in ((2, 72, (5, 133, 4)), (1, 80, (67,)), (3, 8, (1,))):
        qkv, out = bench.put(d.normal(sum(lengths), 3 * heads * dim)), bench.room(sum(lengths), heads * dim)
        ops.full_attention(qkv, heads, bench.put(view_tiles(lengths)), dim**-0.5, out)
        found[f"views {dim}"] = bench.get(out)
    qkv, out = bench.put(d.normal(12, 3 * 9 * 72)), bench.room(12, 9 * 72)
    ops.window_attention(qkv, 9, 72**-0.5, out)
    return {**found, "windows": bench.get(out)}


CASES: dict[str, Callable[[Bench, Draws], Arrays]] = {
    "selftest": _selftest, "gemm": _gemm, "grouped_gemm": _grouped_gemm, "gemv_rows": _gemv_rows, "rows": _rows,
    "attention": _attention, "routing": _routing, "norms": _norms, "elementwise": _elementwise, "conv": _conv, "rope": _rope,
    "delta_rule": _delta_rule, "token_products": _token_products, "token": _token,
    "vision_rows": _vision_rows, "vision_attention": _vision_attention,
}


@dataclass(frozen=True)
class Fault:
    """One text of csrc/sm20/<file> replaced, and the case that shows it."""

    what: str
    file: str
    right: str
    wrong: str
    case: str


# By the tool of compute-sanitizer that must see it.
FAULTS = {
    "memcheck": Fault("writes beyond the last channel", "conv1d_silu.cu",
                      "if (channel >= a.channels)\n        return;\n    for (int64_t first", "for (int64_t first", "conv"),
    "racecheck": Fault("no barrier in a row's sum", "rows.cuh", "shared[t] += shared[t + s];\n        __syncthreads();",
                       "shared[t] += shared[t + s];", "norms"),
    "synccheck": Fault("a barrier for a quarter of the block", "router_topk.cu",
                       "power[thread] = f32_exp(best[thread] - best[0]);\n",
                       "power[thread] = f32_exp(best[thread] - best[0]);\n        if (thread < BLOCK / 4)\n"
                       "            __syncthreads();\n", "routing"),
    "initcheck": Fault("beta never written", "gdn_gates.cu", "a.beta[i] = f32_sigmoid(a.b[i]);", "", "delta_rule"),
}
