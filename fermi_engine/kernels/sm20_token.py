"""The sm_20 kernels of one token on its way through the layers, as methods over device arrays.

csrc/sm20/ops.h defines every op; this file checks shapes, lays out grids and launches, all on one stream. Nothing is
allocated: results go into arrays that the caller planned for. Arrays are float32 unless a docstring says otherwise.
HK/HV key and value heads of the delta rule, K/V their sizes; HQ/HA query and key heads of attention, D their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fermi_engine.kernels.device_arrays import DeviceArray, DeviceMatrix
from fermi_engine.kernels.gpu import Device, Stream, Work
from fermi_engine.kernels.sm20_attention import DeviceCache

BLOCK, WARPS, GROUP = 256, 8, 8  # threads, warps, rows that stored groups have
FORMATS = {"f32": 0, "q8_0": 1, "q4_0": 2}  # TOKEN_* of ops.h
MOST_MATRICES = 4
WIDE_ROWS = 16384  # from here on a warp has whole groups to itself: token_split is 1
WIDE_BLOCKS = 8  # of token_gemv_wide on a multiprocessor
PART_FLOATS = 1088  # of shared memory beside x, for each group that a warp has
MOST_COLUMNS = 8192  # x has a place in shared memory
DELTA_BLOCK, MAX_DELTA = 512, 128
SPLIT = 64  # absolute positions that a thread block of attention takes
BUNDLE = 4  # query heads that it takes
MAX_HEAD_DIM = 256
ARGMAX_PARTS = 128


def token_split(rows: int, columns: int) -> int:
    """Warps that share a group of 8 rows, as the kernel has it."""
    split = 1 if rows >= WIDE_ROWS else 2 if rows >= 4096 else 4 if rows >= 2048 else 8
    while split > 1 and columns < 128 * split:
        split //= 2
    return split


class TokenKernels:
    """The ops of this file, bound to a device and a stream."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self.device, self.stream = device, stream

    def _start(self, entry: str, grid: tuple[int, ...], threads: int, args: dict[str, Any], nbytes: float = 0.0,
               shared_bytes: int = 0) -> None:
        dim = (*grid, 1, 1)[:3]
        self.device.launch(entry, dim, (threads, 1, 1), args, self.stream, shared_bytes, Work(bytes=nbytes))

    def gemv(self, x: DeviceArray, matrices: Sequence[tuple[DeviceMatrix, DeviceArray]], norm: DeviceArray | None = None,
             eps: float = 0.0, add: bool = False) -> None:
        """For up to four matrices [n, k] and outputs [n]: y = W f(x), or y += W f(x); x [k], f its RMSNorm with weight
        1 + norm [k] where that is given. A single large quantised matrix takes the form for it."""
        args, blocks = self._products(x, matrices, norm, eps, add)
        first = matrices[0][0]
        if self.is_wide(matrices):
            grid = min(-(-first.rows // (WARPS * GROUP)), WIDE_BLOCKS * self.device.multiprocessors)
            self._start("token_gemv_wide", (grid,), BLOCK, args, first.data.nbytes, _shared(first.cols, 1))
            return
        nbytes = sum(w.data.nbytes for w, _ in matrices)
        self._start("token_gemv", (sum(blocks),), BLOCK, args, nbytes, _shared(first.cols, 1))

    def is_wide(self, matrices: Sequence[tuple[DeviceMatrix, DeviceArray]]) -> bool:
        """Whether a product takes the form for a large matrix."""
        return len(matrices) == 1 and matrices[0][0].format != "f32" and matrices[0][0].rows >= WIDE_ROWS

    def gemv_swiglu(self, x: DeviceArray, gate: DeviceMatrix, up: DeviceMatrix, out: DeviceArray,
                    norm: DeviceArray | None = None, eps: float = 0.0) -> None:
        """out [n] = silu(W_gate f(x)) * (W_up f(x)), as `gemv`; both matrices alike."""
        if (gate.format, gate.rows, gate.cols) != (up.format, up.rows, up.cols):
            raise ValueError(f"gemv_swiglu: {gate.format} [{gate.rows}, {gate.cols}] and {up.format} [{up.rows}, {up.cols}]")
        args, blocks = self._products(x, [(gate, out), (up, out)], norm, eps, False)
        args |= {"y1": None}
        self._start("token_gemv_swiglu", (blocks[0],), BLOCK, args, 2 * gate.data.nbytes, _shared(gate.cols, 2))

    def _products(self, x: DeviceArray, matrices: Sequence[tuple[DeviceMatrix, DeviceArray]], norm: DeviceArray | None,
                  eps: float, add: bool) -> tuple[dict[str, Any], list[int]]:
        """The arguments, and the thread blocks of each matrix."""
        args: dict[str, Any] = {"x": _f32(x), "norm": None if norm is None else _f32(norm), "k": x.size, "add": int(add),
                                "eps": eps}
        blocks = []
        if not 1 <= len(matrices) <= MOST_MATRICES or x.size > MOST_COLUMNS or (norm is not None and norm.size != x.size):
            raise ValueError(f"gemv: {len(matrices)} matrices, x {x.shape}; there are 1..{MOST_MATRICES}, of "
                             f"{MOST_COLUMNS} columns at most")
        for i in range(MOST_MATRICES):
            w, y = matrices[i] if i < len(matrices) else (None, None)
            args |= {f"w{i}": w, f"y{i}": None if y is None else _f32(y), f"n{i}": w.rows if w else 0,
                     f"format{i}": FORMATS[w.format] if w else 0}
            if w is not None and y is not None:
                if w.cols != x.size or y.size != w.rows or w.address % 16:
                    raise ValueError(f"gemv: {w.format} matrix [{w.rows}, {w.cols}], x {x.shape}, y {y.shape}")
                groups = -(-w.rows // GROUP)
                blocks.append(groups if w.format == "f32" else -(-groups * token_split(w.rows, w.cols) // WARPS))
        return args, blocks

    def gdn_token(self, qkv: DeviceArray, z: DeviceArray, a: DeviceArray, b: DeviceArray, weight: DeviceArray,
                  A_log: DeviceArray, dt_bias: DeviceArray, norm: DeviceArray, tail: DeviceArray, state: DeviceArray,
                  out: DeviceArray, k_heads: int, l2_eps: float, norm_eps: float, q_scale: float) -> None:
        """A token from qkv [2 HK K + HV V], z [HV V], a, b [HV] to the gated out [HV V]: conv1d_silu (weight [taps, C], tail
        [taps-1, C] in place), l2_norm, gdn_gates, gdn_step (state [HV, K, V] in place), gated_rms_norm (norm [V])."""
        (v_heads, dk, dv), (taps, channels) = state.shape, weight.shape
        fits = (qkv.size == channels == 2 * k_heads * dk + v_heads * dv and z.size == out.size == v_heads * dv
                and a.size == b.size == A_log.size == dt_bias.size == v_heads and norm.size == dv
                and tail.shape == (taps - 1, channels) and v_heads % k_heads == 0
                and all(dim % 32 == 0 and 0 < dim <= MAX_DELTA for dim in (dk, dv)))
        if not fits:
            raise ValueError(f"gdn_token: qkv {qkv.shape}, z {z.shape}, a {a.shape}, weight {weight.shape}, tail {tail.shape}, "
                             f"state {state.shape}, out {out.shape} do not fit {k_heads} key heads")
        args = {"qkv": _f32(qkv), "z": _f32(z), "a": _f32(a), "b": _f32(b), "w": _f32(weight), "A_log": _f32(A_log),
                "dt_bias": _f32(dt_bias), "norm": _f32(norm), "tail": _f32(tail) if taps > 1 else None, "state": _f32(state),
                "y": _f32(out), "k_heads": k_heads, "v_heads": v_heads, "dk": dk, "dv": dv, "taps": taps, "l2_eps": l2_eps,
                "norm_eps": norm_eps, "q_scale": q_scale}
        self._start("gdn_token", (k_heads,), DELTA_BLOCK, args, 2 * state.nbytes)

    def attention(self, query_gate: DeviceArray, key: DeviceArray, value: DeviceArray, q_norm: DeviceArray,
                  k_norm: DeviceArray, tables: tuple[DeviceArray, DeviceArray], position: DeviceArray, cache: DeviceCache,
                  work: dict[str, DeviceArray], out: DeviceArray, eps: float, scale: float) -> None:
        """A token from query_gate [HQ, 2 D], key and value [HA, D] to the gated out [HQ, D]; its key and value go into the
        cache at `position` (int32 [1], on the device), before which all others are there. tables: cos, sin [half] of the
        position. work: the arrays of `attention_work` for the cache's capacity. q_norm, k_norm [D], weights 1 + w."""
        (heads, width), (kv_heads, dim), (cos, sin) = query_gate.shape, key.shape, tables
        shapes = attention_work(heads, dim, cache.capacity)
        fits = (width == 2 * dim and value.shape == key.shape and q_norm.size == k_norm.size == dim and heads % kv_heads == 0
                and cache.k.shape == (kv_heads, cache.capacity, dim) and out.size == heads * dim and cos.size == sin.size
                and 2 * cos.size <= dim and dim % 32 == 0 and dim <= MAX_HEAD_DIM
                and all(work[name].shape == shape for name, shape in shapes.items()))
        if not fits:
            raise ValueError(f"token attention: query and gate {query_gate.shape}, key {key.shape}, value {value.shape}, cache "
                             f"{cache.k.shape}, out {out.shape} do not fit")
        args = {"query_gate": _f32(query_gate), "key": _f32(key), "value": _f32(value), "q_norm": _f32(q_norm),
                "k_norm": _f32(k_norm), "cos": _f32(cos), "sin": _f32(sin), "position": _i32(position),
                "k_cache": _f32(cache.k), "v_cache": _f32(cache.v), **{name: _f32(work[name]) for name in shapes},
                "y": _f32(out), "heads": heads, "kv_heads": kv_heads, "head_dim": dim, "half": cos.size,
                "capacity": cache.capacity, "eps": eps, "scale": scale}
        splits, bundles = shapes["part_m"][0], -(-(heads // kv_heads) // BUNDLE)
        self._start("token_attention_prepare", (heads + kv_heads,), BLOCK, args)
        self._start("token_attention_part", (splits, kv_heads, bundles), BLOCK, args, cache.k.nbytes + cache.v.nbytes)
        self._start("token_attention_merge", (heads,), BLOCK, args, work["part_o"].nbytes)

    def argmax(self, x: DeviceArray, work: dict[str, DeviceArray], index: DeviceArray) -> None:
        """Index (int32 [1]) of the largest of x, the lowest of equal ones; NaN is never it. work: arrays of `argmax_work`."""
        args = {"x": _f32(x), "part_x": _f32(work["part_x"]), "part_index": _i32(work["part_index"]), "index": _i32(index),
                "n": x.size, "parts": ARGMAX_PARTS}
        self._start("argmax_part", (ARGMAX_PARTS,), BLOCK, args, x.nbytes)
        self._start("argmax_join", (1,), BLOCK, args)


def attention_work(heads: int, head_dim: int, capacity: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays that `attention` works with."""
    splits = -(-capacity // SPLIT)
    return {"query": (heads, head_dim), "part_o": (splits, heads, head_dim), "part_m": (splits, heads), "part_l": (splits, heads)}


def argmax_work() -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays that `argmax` works with; part_index is int32."""
    return {"part_x": (ARGMAX_PARTS,), "part_index": (ARGMAX_PARTS,)}


def _shared(columns: int, groups: int) -> int:
    """Bytes of dynamic shared memory."""
    return 4 * (-(-columns // 4) * 4 + groups * PART_FLOATS)


def _f32(array: DeviceArray) -> int:
    """Address. TypeError unless float32."""
    if array.dtype != np.float32:
        raise TypeError(f"kernel argument must be float32, got {array.dtype}")
    return array.address


def _i32(array: DeviceArray) -> int:
    """Address. TypeError unless int32."""
    if array.dtype != np.int32:
        raise TypeError(f"kernel argument must be int32, got {array.dtype}")
    return array.address
