"""Attention, expert routing and the product of few rows on sm_20 as methods over device arrays.

csrc/sm20/ops.h defines every op; this file checks shapes, lays out grids and launches, all on one stream. Nothing is
allocated: results go into arrays that the caller planned for. Arrays are float32 unless a docstring says otherwise.
T tokens, HQ/HK query and key heads, D head size, E experts, k of them chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fermi_engine.kernels.cpu import KV_FORMATS
from fermi_engine.kernels.device_arrays import DeviceArray, DeviceMatrix
from fermi_engine.kernels.gpu import Device, Stream, Work

BLOCK = 256  # threads of every kernel here but expert_rows
MAX_GRID = 65535
TILE_ROWS = 64  # (token, query head) pairs of a thread block of attention
POSITION_BLOCK, SPAN = 128, 1024  # absolute positions that attention takes together, and whose sums it adds to the others
HEAD_DIM_STEP = 32
PAIRS = 512  # (token, slot) pairs of a thread block of expert_rows, its threads, and the most experts
MAX_EXPERTS, MAX_CHOSEN = 1024, 32  # of router_topk
MATRIX_ROWS = 128  # of a thread block of gemv_rows, and its threads


@dataclass(frozen=True)
class DeviceCache:
    """Keys and values of one layer [HK, capacity, D]. Positions from the sequence's length on hold anything."""

    k: DeviceArray
    v: DeviceArray

    def __post_init__(self) -> None:
        if self.k.shape != self.v.shape or len(self.k.shape) != 3 or 4 * self.k.size >= 2**32:
            raise ValueError(f"cache of keys {self.k.shape} and values {self.v.shape}; alike and below 4 GiB is needed")

    @property
    def capacity(self) -> int:
        """Positions there is room for."""
        return self.k.shape[1]


@dataclass(frozen=True)
class DeviceExpertRows:
    """What expert_rows makes, all int32: hit [E], first [E + 1], hits [1], source [T*k], row_of [T, k]; and its scratch
    `counts`."""

    hit: DeviceArray
    first: DeviceArray
    hits: DeviceArray
    source: DeviceArray
    row_of: DeviceArray
    counts: DeviceArray

    @staticmethod
    def shapes(tokens: int, k: int, experts: int) -> dict[str, tuple[int, ...]]:
        """Shape of each array by name."""
        pairs = tokens * k
        return {"hit": (experts,), "first": (experts + 1,), "hits": (1,), "source": (pairs,), "row_of": (tokens, k),
                "counts": (-(-pairs // PAIRS), experts)}


class AttentionKernels:
    """The ops of this file, bound to a device and a stream."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self.device, self.stream = device, stream

    def _start(self, entry: str, grid: tuple[int, int], threads: int, args: dict[str, Any], work: Work) -> None:
        self.device.launch(entry, (*grid, 1), (threads, 1, 1), args, self.stream, work=work)

    def _walk(self, entry: str, elements: int, args: dict[str, Any], nbytes: float) -> None:
        """Kernels that take any grid, an element a thread; no launch for nothing."""
        if elements >= 2**31:
            raise ValueError(f"{entry}: {elements} elements are 2^31 or more")
        if elements:
            self._start(entry, (min(-(-elements // BLOCK), MAX_GRID), 1), BLOCK, args, Work(bytes=nbytes))

    def kv_append(self, cache: DeviceCache, start: int, key: DeviceArray, value: DeviceArray, format: str = "f32") -> None:
        """key, value [T, HK, D] into the cache at positions start, start + 1, ..., rounded as a host's cache in `format` rounds
        them; D is a multiple of 32 for 'q8_0'."""
        tokens, heads, head_dim = key.shape
        if format == "q8_0" and head_dim % HEAD_DIM_STEP:
            raise ValueError(f"kv_append: q8_0 keys of {head_dim}, a multiple of {HEAD_DIM_STEP} is needed")
        _same("kv_append: keys and values", key.shape, value.shape)
        _room("kv_append", cache, start, tokens, heads, head_dim)
        args = {"k": _at(key), "v": _at(value), "k_cache": _at(cache.k), "v_cache": _at(cache.v), "start": start,
                "tokens": tokens, "kv_heads": heads, "head_dim": head_dim, "capacity": cache.capacity,
                "format": KV_FORMATS.index(format)}
        self._walk("kv_append", key.size, args, 4.0 * key.nbytes)

    def attention(self, q: DeviceArray, cache: DeviceCache, start: int, scale: float, out: DeviceArray,
                  total: DeviceArray | None = None) -> None:
        """Causal attention of q [T, HQ, D] at absolute positions start, start + 1, ... over the cache -> out like q.

        The cache already holds the keys and values of these tokens. D is a multiple of 32. total: like q, for sums on the way;
        needed beyond SPAN positions.
        """
        tokens, heads, head_dim = q.shape
        kv_heads = cache.k.shape[0]
        _same("attention: queries and result", q.shape, out.shape)
        _room("attention", cache, start, tokens, kv_heads, head_dim)
        if heads % kv_heads or head_dim % HEAD_DIM_STEP or q.nbytes >= 2**32:
            raise ValueError(f"attention: queries {q.shape} over {kv_heads} key heads; head sizes are multiples of "
                             f"{HEAD_DIM_STEP}, queries below 4 GiB")
        if total is None and start + tokens > SPAN:
            raise ValueError(f"attention: {start + tokens} positions, more than {SPAN}, need an array for sums on the way")
        if total is not None:
            _same("attention: queries and sums", q.shape, total.shape)
        if not tokens:
            return
        args = {"q": _at(q), "k_cache": _at(cache.k), "v_cache": _at(cache.v), "o": _at(out),
                "total": 0 if total is None else _at(total), "start": start,
                "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
                "capacity": cache.capacity, "scale": scale}
        tiles = -(-tokens * (heads // kv_heads) // TILE_ROWS)
        work = attention_work(tokens, start, heads, kv_heads, head_dim)
        self._start("attention", (tiles, kv_heads), BLOCK, args, work)

    def router_topk(self, logits: DeviceArray, ids: DeviceArray, weights: DeviceArray) -> None:
        """logits [T, E] -> ids int32 [T, k] by higher logit, then lower id; weights [T, k], softmax over the chosen."""
        tokens, experts = logits.shape
        _same("router_topk: ids and weights", ids.shape, weights.shape)
        k = ids.shape[1]
        if ids.shape[0] != tokens or not 1 <= k <= min(experts, MAX_CHOSEN) or experts > MAX_EXPERTS:
            raise ValueError(f"router_topk: {ids.shape} of logits {logits.shape}; "
                             f"at most {MAX_CHOSEN} of {MAX_EXPERTS}")
        args = {"logits": _at(logits), "ids": _at(ids, np.int32), "weights": _at(weights), "tokens": tokens,
                "experts": experts, "k": k}
        if tokens:
            self._start("router_topk", (min(tokens, MAX_GRID), 1), BLOCK, args, Work(bytes=logits.nbytes))

    def expert_rows(self, ids: DeviceArray, experts: int, work: DeviceExpertRows) -> None:
        """The work list of a layer from the router's choice ids int32 [T, k] among `experts`, into `work`."""
        tokens, k = ids.shape
        for name, shape in DeviceExpertRows.shapes(tokens, k, experts).items():
            _same(f"expert_rows: {name}", getattr(work, name).shape, shape)
        if not 1 <= experts <= PAIRS or not tokens * k:
            raise ValueError(f"expert_rows: ids {ids.shape} among {experts} experts; there are 1..{PAIRS}")
        args = {"ids": _at(ids, np.int32), **{name: _at(array, np.int32) for name, array in vars(work).items()},
                "tokens": tokens, "k": k, "experts": experts}
        chunks = work.counts.shape[0]
        for part, blocks in (("count", chunks), ("scan", 1), ("place", chunks)):
            nbytes = work.counts.nbytes + 3.0 * ids.nbytes
            self._start(f"expert_rows_{part}", (blocks, 1), PAIRS, args, Work(bytes=nbytes))

    def moe_combine(self, expert_out: DeviceArray, row_of: DeviceArray, weights: DeviceArray, out: DeviceArray,
                    shared: DeviceArray | None = None, shared_gate: DeviceArray | None = None) -> None:
        """Weighted sum of expert rows, plus the gated shared expert if there is one: expert_out [*, n], row_of int32
        [T, k], weights [T, k], shared [T, n], shared_gate [T, stride] (logits, in its first column) -> out [T, n]."""
        tokens, n = out.shape
        _same("moe_combine: rows and weights", row_of.shape, weights.shape)
        if expert_out.shape[1] != n or row_of.shape[0] != tokens or (shared is None) != (shared_gate is None):
            raise ValueError(f"moe_combine: experts {expert_out.shape}, rows {row_of.shape}, out {out.shape}; "
                             "shared expert and gate come together")
        args = {"expert_out": _at(expert_out), "row_of": _at(row_of, np.int32), "weights": _at(weights),
                "shared": None, "shared_gate": None, "y": _at(out), "tokens": tokens, "n": n, "k": row_of.shape[1],
                "gate_stride": 0}
        if shared is not None and shared_gate is not None:
            _same("moe_combine: shared expert and result", shared.shape, out.shape)
            _same("moe_combine: tokens of the gate", shared_gate.shape[:1], (tokens,))
            args |= {"shared": _at(shared), "shared_gate": _at(shared_gate), "gate_stride": shared_gate.shape[1]}
        self._walk("moe_combine", out.size, args, (row_of.shape[1] + 2.0) * out.nbytes)

    def gemv_rows(self, x: DeviceArray, w: DeviceMatrix, out: DeviceArray, source: DeviceArray | None = None) -> None:
        """Few rows of x [*, cols] times a q4_0 or q8_0 matrix transposed -> out [m, rows], to the bit what gemm gives: the
        logits of the last rows. Row i of the result takes row i of x, or row source[i] (int32 [m])."""
        m, n = out.shape
        if n != w.rows or x.shape[1] != w.cols or (x.shape[0] < m if source is None else source.shape != (m,)):
            raise ValueError(f"gemv_rows: x {x.shape}, {w.format} matrix [{w.rows}, {w.cols}], out {out.shape}")
        if w.format not in ("q4_0", "q8_0") or m > MAX_GRID:
            raise ValueError(f"gemv_rows: {m} rows with a matrix of {w.format}; it takes q4_0 and q8_0, {MAX_GRID} rows")
        args = {"x": _at(x), "source": None if source is None else _at(source, np.int32), "w": w, "y": _at(out),
                "x_stride": w.cols, "y_stride": n, "m": m, "n": n, "k": w.cols}
        if m:
            work = Work(2.0 * m * n * w.cols, m * w.data.nbytes)
            self._start(f"gemv_rows_{w.format}", (-(-n // MATRIX_ROWS), m), MATRIX_ROWS, args, work)


def attention_work(tokens: int, start: int, heads: int, kv_heads: int, head_dim: int) -> Work:
    """Products and sums over the positions that tokens see, and what each tile of rows reads and writes."""
    seen = tokens * start + tokens * (tokens + 1) / 2
    tiles = tokens * (heads // kv_heads) / TILE_ROWS
    blocks = tiles * kv_heads * (start + tokens / 2) / POSITION_BLOCK
    floats = blocks * head_dim * (2 * POSITION_BLOCK + 3 * TILE_ROWS)
    return Work(4.0 * seen * heads * head_dim, 4.0 * floats)


def _at(array: DeviceArray, dtype: Any = np.float32) -> int:
    """Address. TypeError unless the elements are of `dtype`."""
    if array.dtype != dtype:
        raise TypeError(f"kernel argument must be {np.dtype(dtype)}, got {array.dtype}")
    return array.address


def _same(what: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ValueError(f"{what}: {found} and {expected} differ")


def _room(op: str, cache: DeviceCache, start: int, tokens: int, heads: int, head_dim: int) -> None:
    if cache.k.shape != (heads, cache.capacity, head_dim) or start < 0 or start + tokens > cache.capacity:
        raise ValueError(f"{op}: {tokens} tokens of {heads} heads of {head_dim} at position {start} in a cache "
                         f"{cache.k.shape}")
