"""The sm_20 kernels as methods over device arrays: products, rows, Gated DeltaNet.

csrc/sm20/ops.h defines every op; this file checks shapes, lays out grids and launches, all on one stream. Nothing is
allocated: results go into arrays that the caller planned for. Arrays are float32 unless a docstring says otherwise.
T tokens, HK/HV key and value heads, K/V their sizes, n row length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fermi_engine.kernels.device_arrays import DeviceArray, DeviceExperts, DeviceMatrix
from fermi_engine.kernels.gpu import Device, Stream, Work

BLOCK = 256  # threads of the kernels that walk rows
MAX_GRID = 65535
CHUNK = 64  # tokens of the chunked delta rule, at absolute positions
SLAB = 32  # value columns of a block of the delta rule
PASS_SLAB, PASS_BLOCK = 16, 512  # value columns and threads of a block of the chunked rule's pass
MAX_DIM = 128  # of a head of the delta rule
# GDN_CHUNK_SCRATCH of ops.h: floats per chunk and value head.
SCRATCH_FLOATS = CHUNK * CHUNK + 3 * CHUNK + 3 * CHUNK * MAX_DIM + MAX_DIM * MAX_DIM
HEADS_AT_ONCE = 512  # chunks times value heads of gdn_chunk by default, which bounds its scratch: 93 MB
# Of a product: rows and columns of a tile, threads.
LARGE_TILE, SMALL_TILE, ANY_TILE = (64, 128, 256), (32, 64, 128), (64, 64, 256)
SMALL_TILE_COST = 1.15  # of an element, where one in a large tile costs 1


@dataclass
class OpenChunk:
    """What a Gated DeltaNet layer's recurrence carries from call to call.

    `state` [HV, K, V] at the last chunk boundary, and of the `tokens` (at most 63) since then k [63, HK, K],
    v [63, HV, V], g and beta [63, HV].
    """

    state: DeviceArray
    k: DeviceArray
    v: DeviceArray
    g: DeviceArray
    beta: DeviceArray
    tokens: int = 0

    @staticmethod
    def shapes(k_heads: int, v_heads: int, key_dim: int, value_dim: int) -> dict[str, tuple[int, ...]]:
        """Shape of each array by name."""
        rows = CHUNK - 1
        return {"state": (v_heads, key_dim, value_dim), "k": (rows, k_heads, key_dim),
                "v": (rows, v_heads, value_dim), "g": (rows, v_heads), "beta": (rows, v_heads)}


def gdn_chunk_scratch(tokens: int, open_tokens: int, v_heads: int, at_once: int = 0) -> int:
    """Floats of scratch that gdn_chunk wants for so many new tokens after `open_tokens` carried ones, `at_once` chunks at a time
    (0: as many as HEADS_AT_ONCE allows)."""
    at_once = at_once or max(1, HEADS_AT_ONCE // v_heads)
    return min(-(-(open_tokens + tokens) // CHUNK), at_once) * v_heads * SCRATCH_FLOATS


class GpuKernels:
    """Every op, bound to a device and a stream: the engine's own kernels.

    `multiprocessors`, the device's own where not given, only decides which tile shape a product takes, not its bits.
    """

    def __init__(self, device: Device, stream: Stream, multiprocessors: int | None = None) -> None:
        self.device, self.stream = device, stream
        self.multiprocessors = multiprocessors or device.multiprocessors

    def _launch(self, entry: str, grid: tuple[int, ...], threads: int, args: dict[str, Any], flops: float = 0.0,
                nbytes: float = 0.0) -> None:
        grid_x, grid_y, grid_z = (*grid, 1, 1)[:3]
        self.device.launch(entry, (grid_x, grid_y, grid_z), (threads, 1, 1), args, self.stream, work=Work(flops, nbytes))

    def _walk(self, entry: str, blocks: int, args: dict[str, Any], nbytes: float = 0.0) -> None:
        """Kernels that take any grid; no launch for nothing."""
        if blocks:
            self._launch(entry, (min(blocks, MAX_GRID),), BLOCK, args, nbytes=nbytes)

    def _walk_quads(self, entry: str, rows: int, n: int, args: dict[str, Any], nbytes: float) -> None:
        """Elementwise, four floats of a row for a thread."""
        if rows * n >= 2**31:
            raise ValueError(f"{entry}: {rows} rows of {n} are 2^31 elements or more")
        self._walk(entry, -(-rows * -(-n // 4) // BLOCK), args, nbytes)

    def _walk_norm(self, entry: str, rows: int, n: int, args: dict[str, Any], nbytes: float) -> None:
        """Row sums: a row has 32 to 256 threads."""
        lanes = 32
        while lanes < BLOCK and lanes * 4 < n:
            lanes *= 2
        self._walk(entry, -(-rows * lanes // BLOCK), args, nbytes)

    def move(self, source: DeviceArray, target: DeviceArray) -> None:
        """A copy on the device, of the same shape and type."""
        if source.shape != target.shape or source.dtype != target.dtype:
            raise ValueError(f"move: {source.dtype} {source.shape} into {target.dtype} {target.shape}")
        self.device.d2d(target.buffer, source.buffer, source.nbytes, self.stream, target.offset, source.offset, "move")

    # matrices

    def gemm(self, x: DeviceArray, w: DeviceMatrix, out: DeviceArray, column: int = 0,
             source: DeviceArray | None = None) -> None:
        """Rows of x [*, cols] times a q4_0, q8_0 or f32 matrix transposed, into columns `column`.. of `out` [m, *].

        Row i of the result takes row i of x, or row source[i] (int32 [m]).
        """
        (m, stride), n = product_fits(x, w, out, column, source), x.shape[1]
        if not m:
            return
        entry, (tile_rows, tile_cols, threads) = self._gemm_tile(m, x, w)
        args = {"x": _f32(x), "source": _i32_or_none(source, m), "w": w, "y": _f32(out, column),
                "x_stride": n, "y_stride": stride, "m": m, "n": w.rows, "k": n}
        self._launch(entry, (-(-w.rows // tile_cols), -(-m // tile_rows)), threads, args, 2.0 * m * w.rows * n,
                     w.data.nbytes + x.nbytes + 4.0 * m * w.rows)

    def _gemm_tile(self, m: int, x: DeviceArray, w: DeviceMatrix) -> tuple[str, tuple[int, int, int]]:
        """Entry and tile: the one that keeps the busiest multiprocessor for less time."""
        name = f"gemm_{w.format}"
        if w.format == "f32" and (w.cols % 16 or x.address % 16 or w.address % 16):
            return f"{name}_any", ANY_TILE
        _aligned(name, x)
        large, small = (_tile_time(m, w.rows, tile, self.multiprocessors) for tile in (LARGE_TILE, SMALL_TILE))
        return (f"{name}_small", SMALL_TILE) if SMALL_TILE_COST * small < large else (name, LARGE_TILE)

    def grouped_tiles(self, first: DeviceArray, hits: DeviceArray, tiles: DeviceArray, tile_rows: int) -> None:
        """The tile list for grouped_gemm: first int32 [hits + 1], hits int32 [1] -> tiles int32 [1 + 2 * bound].

        A bound is the smaller of experts and rows, plus rows // tile_rows; tile_rows is LARGE_TILE[0] or SMALL_TILE[0].
        """
        self._launch("grouped_tiles", (1,), BLOCK,
                     {"first": _i32(first), "hits": _i32(hits), "tiles": _i32(tiles), "tile_rows": tile_rows})

    def grouped_gemm(self, x: DeviceArray, experts: DeviceExperts, first: DeviceArray, tiles: DeviceArray,
                     out: DeviceArray, source: DeviceArray | None = None, slot: DeviceArray | None = None,
                     small: bool = False) -> None:
        """Rows first[i]..first[i+1] of x [*, cols] (or of source, int32) times expert slot[i] (or i) -> out [rows, n].

        tiles: of grouped_tiles for SMALL_TILE if `small`, else LARGE_TILE; the grid is as high as that list can be.
        """
        (rows, n), tile = out.shape, SMALL_TILE if small else LARGE_TILE
        _aligned("grouped_gemm", x)
        if x.shape[1] != experts.cols or n != experts.rows or (source is None and x.shape[0] < rows):
            raise ValueError(f"grouped_gemm: x {x.shape}, experts [{experts.rows}, {experts.cols}], out {out.shape}")
        args = {"x": _f32(x), "source": _i32_or_none(source, rows), "w": experts, "slot": _i32_or_none(slot, 1),
                "first": _i32(first), "tiles": _i32(tiles), "y": _f32(out), "x_stride": experts.cols, "y_stride": n,
                "w_stride": experts.stride, "n": n, "k": experts.cols}
        self._launch(f"grouped_gemm_{experts.format}{'_small' if small else ''}",
                     (-(-n // tile[1]), tiles.size // 2), tile[2], args, 2.0 * rows * n * experts.cols,
                     experts.data.nbytes + x.nbytes + out.nbytes)

    def rows(self, w: DeviceMatrix, out: DeviceArray, ids: DeviceArray | None = None, first: int = 0) -> None:
        """Rows `ids` (int32 [items]), or from `first` on, of any stored matrix as floats -> out [items, cols]."""
        items, n = out.shape
        if n != w.cols or (ids is None and first + items > w.rows):
            raise ValueError(f"rows: {items} from {first} of a {w.format} matrix [{w.rows}, {w.cols}] into {out.shape}")
        args = {"w": w, "row_ids": _i32_or_none(ids, items), "y": _f32(out), "first_row": first, "items": items, "n": n}
        if w.format == "f32":
            self._walk_quads("embed", items, n, {**args, "w_stride": n}, 2 * out.nbytes)
            return
        if w.format != "f16":
            _aligned("rows", out)
        self._walk(f"dequantize_{w.format}", -(-items // 8), args, 1.5 * out.nbytes)

    # rows

    def add(self, a: DeviceArray, b: DeviceArray, out: DeviceArray) -> None:
        """out = a + b, same shapes; out may be one of them."""
        _same_shape("add", a, b, out)
        self._walk_quads("add", 1, a.size, {"a": _f32(a), "b": _f32(b), "y": _f32(out), "n": a.size}, 3 * a.nbytes)

    def swiglu(self, gate_up: DeviceArray, out: DeviceArray) -> None:
        """gate_up [rows, 2n] -> silu(first half) * second half, out [rows, n]."""
        rows, n = out.shape
        if gate_up.shape != (rows, 2 * n):
            raise ValueError(f"swiglu: {gate_up.shape} into {out.shape}")
        args = {"gate_up": _f32(gate_up), "y": _f32(out), "rows": rows, "n": n}
        self._walk_quads("swiglu", rows, n, args, 3 * out.nbytes)

    def sigmoid_mul(self, x: DeviceArray, gate: DeviceArray, offset: int, out: DeviceArray) -> None:
        """x [rows, n] * sigmoid(gate[:, offset:offset + n]), gate [rows, stride] -> out [rows, n]; out may be x."""
        rows, n = x.shape
        _same_shape("sigmoid_mul", x, out)
        if gate.shape[0] != rows or offset + n > gate.shape[1]:
            raise ValueError(f"sigmoid_mul: gate {gate.shape} does not cover {x.shape} at column {offset}")
        args = {"x": _f32(x), "gate": _f32(gate, offset), "y": _f32(out), "rows": rows, "n": n,
                "gate_stride": gate.shape[1]}
        self._walk_quads("sigmoid_mul", rows, n, args, 3 * out.nbytes)

    def rms_norm(self, x: DeviceArray, weight: DeviceArray, eps: float, out: DeviceArray, offset: float = 1.0) -> None:
        """RMSNorm with weight (offset + w) over the first n = len(weight) columns of x [rows, *] -> out [rows, n]."""
        (rows, stride), n = x.shape, weight.size
        if out.shape != (rows, n) or n > stride:
            raise ValueError(f"rms_norm: {x.shape} with weights {weight.shape} into {out.shape}")
        args = {"x": _f32(x), "w": _f32(weight), "y": _f32(out), "rows": rows, "n": n, "x_stride": stride,
                "y_stride": n, "eps": eps, "offset": offset}
        self._walk_norm("rms_norm", rows, n, args, 2 * out.nbytes)

    def gated_rms_norm(self, o: DeviceArray, z: DeviceArray, weight: DeviceArray, eps: float, out: DeviceArray) -> None:
        """RMSNorm with the plain weight times silu(z); o, z, out [rows, n]."""
        _same_shape("gated_rms_norm", o, z, out)
        rows, n = o.shape
        args = {"o": _f32(o), "z": _f32(z), "w": _f32(weight), "y": _f32(out), "rows": rows, "n": n, "eps": eps}
        self._walk_norm("gated_rms_norm", rows, n, args, 3 * out.nbytes)

    def l2_norm(self, x: DeviceArray, column: int, heads: int, n: int, eps: float, scale: float,
                out: DeviceArray) -> None:
        """Heads of n columns from `column` on in x [T, C], each scaled to length `scale` -> out [T, heads, n]."""
        tokens, stride = x.shape
        if column + heads * n > stride or out.shape != (tokens, heads, n):
            raise ValueError(f"l2_norm: {heads} heads of {n} from column {column} of {x.shape} into {out.shape}")
        args = {"x": _f32(x, column), "y": _f32(out), "tokens": tokens, "heads": heads, "n": n,
                "token_stride": stride, "eps": eps, "scale": scale}
        self._walk_norm("l2_norm", tokens * heads, n, args, 2 * out.nbytes)

    def rope_tables(self, positions: DeviceArray, inv_freq: DeviceArray, axis: DeviceArray, cos: DeviceArray,
                    sin: DeviceArray) -> None:
        """positions int32 [3, T], inv_freq [half], axis int32 [half] -> cos, sin [T, half]."""
        tokens, half = positions.shape[1], inv_freq.size
        if positions.shape[0] != 3 or cos.shape != (tokens, half) or sin.shape != cos.shape:
            raise ValueError(f"rope_tables: positions {positions.shape}, {half} frequencies, tables {cos.shape}, "
                             f"{sin.shape}")
        args = {"positions": _i32(positions), "inv_freq": _f32(inv_freq), "axis": _i32(axis, half), "cos": _f32(cos),
                "sin": _f32(sin), "tokens": tokens, "half": half}
        self._walk("rope_tables", -(-tokens * half // BLOCK), args, 2 * cos.nbytes)

    def rope(self, x: DeviceArray, cos: DeviceArray, sin: DeviceArray) -> None:
        """Turns the leading 2 * half dimensions of x [T, heads, D] in place by cos, sin [T, half]."""
        (tokens, heads, head_dim), half = x.shape, cos.shape[1]
        if cos.shape[0] != tokens or sin.shape != cos.shape or 2 * half > head_dim or x.size >= 2**31:
            raise ValueError(f"rope: tables {cos.shape}, {sin.shape} do not fit x {x.shape}")
        args = {"x": _f32(x), "cos": _f32(cos), "sin": _f32(sin), "tokens": tokens, "heads": heads, "half": half,
                "x_stride": head_dim}
        self._walk("rope", -(-tokens * heads * half // BLOCK), args, 16.0 * tokens * heads * half)

    # Gated DeltaNet

    def gdn_gates(self, a: DeviceArray, b: DeviceArray, A_log: DeviceArray, dt_bias: DeviceArray, g: DeviceArray,
                  beta: DeviceArray) -> None:
        """a, b [T, HV]; A_log, dt_bias [HV] -> log-decay g and beta, both [T, HV]."""
        _same_shape("gdn_gates", a, b, g, beta)
        args = {"a": _f32(a), "b": _f32(b), "A_log": _f32(A_log), "dt_bias": _f32(dt_bias), "g": _f32(g),
                "beta": _f32(beta), "tokens": a.shape[0], "heads": a.shape[1]}
        self._walk("gdn_gates", -(-a.size // BLOCK), args, 4 * a.nbytes)

    def conv1d_silu(self, x: DeviceArray, weight: DeviceArray, tail: DeviceArray, out: DeviceArray) -> None:
        """Causal depthwise convolution, silu: x [T, C], weight [taps, C], tail [taps-1, C] in and out -> out [T, C]."""
        (tokens, channels), taps = x.shape, weight.shape[0]
        _same_shape("conv1d_silu", x, out)
        if weight.shape[1] != channels or tail.shape != (taps - 1, channels):
            raise ValueError(f"conv1d_silu: x {x.shape}, weight {weight.shape}, tail {tail.shape} do not fit")
        if not tokens:
            return
        args = {"x": _f32(x), "w": _f32(weight), "tail": _f32(tail) if taps > 1 else None, "y": _f32(out),
                "tokens": tokens, "channels": channels, "taps": taps}
        blocks = -(-channels // BLOCK)
        self._launch("conv1d_silu", (blocks, min(-(-tokens // 32), MAX_GRID)), BLOCK, args, nbytes=2 * x.nbytes)
        if taps > 1:
            self._launch("conv1d_silu_tail", (blocks,), BLOCK, args)

    def gdn_step(self, q: DeviceArray, k: DeviceArray, v: DeviceArray, column: int, g: DeviceArray, beta: DeviceArray,
                 state: DeviceArray, out: DeviceArray) -> None:
        """Gated delta rule token by token; K and V are multiples of 32 up to 128.

        q, k [T, HK, K], v = columns from `column` on of [T, C], g, beta [T, HV], state [HV, K, V] in and out -> out
        [T, HV, V].
        """
        sizes = _delta_sizes("gdn_step", q, k, v, column, g, beta, state, out)
        if sizes["tokens"]:
            args = {"q": q, "k": k, "v": _f32(v, column), "g": g, "beta": beta, "state": state, "o": out, **sizes}
            self._launch("gdn_step", (sizes["dv"] // SLAB, sizes["v_heads"]), BLOCK, args,
                         7.0 * sizes["tokens"] * state.size, 2 * state.nbytes + 2 * out.nbytes)

    def gdn_chunk(self, q: DeviceArray, k: DeviceArray, v: DeviceArray, column: int, g: DeviceArray, beta: DeviceArray,
                  carried: OpenChunk, out: DeviceArray, scratch: DeviceArray,
                  final_state: DeviceArray | None = None) -> None:
        """The same in chunks of 64 tokens at absolute positions; `carried` moves on by T tokens.

        Arguments as gdn_step's, aligned to 16 bytes, column and C multiples of 4. scratch: as many floats as
        gdn_chunk_scratch says, or fewer, down to one chunk's. final_state [HV, K, V] receives the state after the last
        token, for a decoder that knows no chunks.
        """
        sizes = _delta_sizes("gdn_chunk", q, k, v, column, g, beta, carried.state, out)
        _check_carried(carried, sizes, final_state)
        if not sizes["tokens"]:
            return
        _aligned("gdn_chunk", q, k, v, out, scratch, carried.k, carried.v, carried.state)
        at_once = scratch.size // (sizes["v_heads"] * SCRATCH_FLOATS)
        if column % 4 or v.shape[1] % 4 or at_once < 1:
            raise ValueError(f"gdn_chunk: v {v.shape} from column {column}, scratch of {scratch.size} floats")
        rows = carried.tokens + sizes["tokens"]
        args = {"q": q, "k": k, "v": _f32(v, column), "g": g, "beta": beta, "open_k": carried.k, "open_v": carried.v,
                "open_g": carried.g, "open_beta": carried.beta, "state": carried.state, "final_state": None, "o": out,
                "scratch": _f32(scratch), **sizes, "open": carried.tokens, "first_chunk": 0, "chunks": 0}
        chunks = -(-rows // CHUNK)
        for first in range(0, chunks, at_once):
            count = min(at_once, chunks - first)
            last = final_state if first + count == chunks else None
            self._chunks({**args, "first_chunk": first, "chunks": count, "final_state": last})
        carried.tokens = rows % CHUNK

    def _chunks(self, args: dict[str, Any]) -> None:
        """One turn of gdn_chunk's kernels over the chunks; their work counts triangles as halves."""
        heads, dk, dv, chunks = (args[name] for name in ("v_heads", "dk", "dv", "chunks"))
        rows = chunks * CHUNK
        wide = 2.0 * rows * heads * dk * dv  # operations of a product of all rows with a state
        triangle = rows * heads * CHUNK  # of a triangle with a column
        products = 2.0 * rows * CHUNK * (dk * args["k_heads"] + CHUNK / 6 * heads)
        self._launch("gdn_chunk_intra", (chunks, args["k_heads"]), BLOCK, args, products, 4.0 * rows * heads * (dk + 2 * CHUNK))
        self._launch("gdn_chunk_solve", (chunks, heads, 2), BLOCK, args, triangle * (dk + dv),
                     4.0 * rows * heads * (2 * dk + 2 * dv + CHUNK))
        self._launch("gdn_chunk_pass", (dv // PASS_SLAB, heads), PASS_BLOCK, args, 2 * wide,
                     4.0 * rows * heads * (2 * dk + 2 * dv) + 4.0 * chunks * heads * dk * dv)
        self._launch("gdn_chunk_out", (chunks, heads), BLOCK, args, wide + triangle * dv,
                     4.0 * rows * heads * (dk + 2 * dv + CHUNK) + 4.0 * chunks * heads * dk * dv)


def _tile_time(m: int, n: int, tile: tuple[int, int, int], multiprocessors: int) -> int:
    """Elements that the busiest multiprocessor computes, empty ones included."""
    tiles = -(-m // tile[0]) * -(-n // tile[1])
    return -(-tiles // multiprocessors) * tile[0] * tile[1]


def product_fits(x: DeviceArray, w: DeviceMatrix, out: DeviceArray, column: int,
                  source: DeviceArray | None) -> tuple[int, int]:
    """Shape of `out`. ValueError when the product does not fit, TypeError unless x and out are float32."""
    if {x.dtype, out.dtype} != {np.dtype(np.float32)}:
        raise TypeError(f"gemm: x of {x.dtype}, out of {out.dtype}; both must be float32")
    (m, stride), (rows, n) = out.shape, x.shape
    if n != w.cols or (source is None and rows < m) or column + w.rows > stride or w.format == "f16":
        raise ValueError(f"gemm: x {x.shape}, {w.format} matrix [{w.rows}, {w.cols}], out {out.shape} from column {column}")
    return m, stride


def _f32(array: DeviceArray, column: int = 0) -> int:
    """Address of element `column`. TypeError unless float32."""
    if array.dtype != np.float32:
        raise TypeError(f"kernel argument must be float32, got {array.dtype}")
    return array.address + 4 * column


def _i32(array: DeviceArray, size: int = 0) -> int:
    """Address. TypeError unless int32, ValueError when it has fewer than `size` elements."""
    if array.dtype != np.int32:
        raise TypeError(f"kernel argument must be int32, got {array.dtype}")
    if array.size < size:
        raise ValueError(f"kernel argument has {array.size} elements, {size} are needed")
    return array.address


def _i32_or_none(array: DeviceArray | None, size: int) -> int | None:
    return None if array is None else _i32(array, size)


def _aligned(op: str, *arrays: DeviceArray) -> None:
    """ValueError unless all start at multiples of 16 bytes, which 128-bit loads want."""
    if any(array.address % 16 for array in arrays):
        raise ValueError(f"{op}: arrays must be aligned to 16 bytes")


def _same_shape(op: str, *arrays: DeviceArray) -> None:
    if len({array.shape for array in arrays}) > 1:
        raise ValueError(f"{op}: shapes {', '.join(str(array.shape) for array in arrays)} differ")


def _delta_sizes(op: str, q: DeviceArray, k: DeviceArray, v: DeviceArray, column: int, g: DeviceArray,
                 beta: DeviceArray, state: DeviceArray, out: DeviceArray) -> dict[str, int]:
    """The size fields that both forms of the delta rule share. ValueError when the arrays do not fit each other."""
    (tokens, k_heads, dk), (v_heads, _, dv) = q.shape, state.shape
    fits = (k.shape == q.shape and state.shape[1] == dk and g.shape == beta.shape == (tokens, v_heads) and
            v.shape[0] == tokens and column + v_heads * dv <= v.shape[1] and out.shape == (tokens, v_heads, dv) and
            v_heads % k_heads == 0 and all(dim % SLAB == 0 and 0 < dim <= MAX_DIM for dim in (dk, dv)))
    if not fits or {array.dtype for array in (q, k, v, g, beta, state, out)} != {np.dtype(np.float32)}:
        raise ValueError(f"{op}: q {q.shape}, k {k.shape}, v {v.shape} from {column}, g {g.shape}, beta {beta.shape}, "
                         f"state {state.shape}, out {out.shape} do not fit, or are not float32")
    return {"tokens": tokens, "k_heads": k_heads, "v_heads": v_heads, "dk": dk, "dv": dv, "v_stride": v.shape[1]}


def _check_carried(carried: OpenChunk, sizes: dict[str, int], final_state: DeviceArray | None) -> None:
    """ValueError unless what is carried, and the final state, belong to a layer of these sizes."""
    shapes = OpenChunk.shapes(*(sizes[name] for name in ("k_heads", "v_heads", "dk", "dv")))
    for name, array in (*vars(carried).items(), ("final_state", final_state)):
        expected = shapes.get("state" if name == "final_state" else name)
        if array is not None and expected and (array.shape != expected or array.dtype != np.float32):
            raise ValueError(f"gdn_chunk: carried {name} {array.shape}, expected float32 {expected}")
    if not 0 <= carried.tokens < CHUNK:
        raise ValueError(f"gdn_chunk: {carried.tokens} carried tokens, at most {CHUNK - 1} can be")
