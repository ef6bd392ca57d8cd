"""The ops of the vision towers on sm_20 as methods over device arrays: norms, biases, GELUs, attention inside views and windows.

csrc/sm20/ops.h defines every op; this file checks shapes, lays out grids and launches, all on one stream. Nothing is
allocated: results go into arrays that the caller planned for. Arrays are float32 unless a docstring says otherwise.
T tokens of views end to end, H their width, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fermi_engine.kernels.device_arrays import DeviceArray
from fermi_engine.kernels.gpu import Device, Stream, Work

BLOCK = 256  # threads of every kernel here but window_attention
WINDOW, WINDOW_BLOCK = 4, 128  # tokens of a window, and threads
MAX_GRID = 65535
TILE_ROWS, POSITION_BLOCK = 64, 128  # queries of a thread block of full_attention, and positions it takes together
HEAD_DIM_STEP = 8
GELUS = ("gelu_tanh", "gelu_erf")


def view_tiles(lengths: Sequence[int]) -> np.ndarray:
    """The thread blocks of full_attention over views of so many tokens, end to end: int32 [tiles, 3], the first query of each,
    its view's first token and the one after its last. The longest views come first."""
    rows, begin = [], 0
    for length in lengths:
        rows += [(first, begin, begin + length) for first in range(begin, begin + length, TILE_ROWS)]
        begin += length
    rows.sort(key=lambda row: row[1] - row[2])
    return np.array(rows, np.int32).reshape(-1, 3)


class VisionKernels:
    """The ops of this file, bound to a device and a stream."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self.device, self.stream = device, stream

    def _walk(self, entry: str, blocks: int, args: dict[str, Any], nbytes: float, flops: float = 0.0,
              threads: int = BLOCK) -> None:
        """Kernels that take any grid; no launch for nothing."""
        if blocks:
            self.device.launch(entry, (min(blocks, MAX_GRID), 1, 1), (threads, 1, 1), args, self.stream, work=Work(flops, nbytes))

    def _quads(self, entry: str, rows: int, n: int, args: dict[str, Any], nbytes: float) -> None:
        """Four floats of a row for a thread."""
        _few(entry, rows * n)
        self._walk(entry, -(-rows * -(-n // 4) // BLOCK), args, nbytes)

    def layer_norm(self, x: DeviceArray, weight: DeviceArray, bias: DeviceArray, eps: float, out: DeviceArray) -> None:
        """Layer norm of x [T, n] with weight and bias [n] -> out like x, which may be x."""
        (rows, n), lanes = x.shape, 32
        _shapes("layer_norm", (out, x.shape), (weight, (n,)), (bias, (n,)))
        while lanes < BLOCK and lanes * 4 < n:
            lanes *= 2
        args = {"x": _at(x), "w": _at(weight), "b": _at(bias), "y": _at(out), "rows": rows, "n": n, "eps": eps}
        self._walk("layer_norm", -(-rows * lanes // BLOCK), args, 2.0 * x.nbytes)

    def gelu(self, kind: str, x: DeviceArray, out: DeviceArray, bias: DeviceArray | None = None) -> None:
        """gelu(x + bias) of x [T, n], bias [n] or none -> out like x, which may be x. kind: one of GELUS."""
        rows, n = x.shape
        if kind not in GELUS:
            raise ValueError(f"no such GELU: {kind}")
        _shapes(kind, (out, x.shape), *([(bias, (n,))] if bias else []))
        args = {"x": _at(x), "b": None if bias is None else _at(bias), "y": _at(out), "rows": rows, "n": n}
        self._quads(kind, rows, n, args, 2.0 * x.nbytes)

    def add_bias(self, x: DeviceArray, bias: DeviceArray) -> None:
        """x [T, n] += bias [n]."""
        rows, n = x.shape
        _shapes("add_bias", (bias, (n,)))
        self._quads("add_bias", rows, n, {"x": _at(x), "b": _at(bias), "rows": rows, "n": n}, 2.0 * x.nbytes)

    def add_bias_residual(self, x: DeviceArray, y: DeviceArray, bias: DeviceArray) -> None:
        """x [T, n] += y + bias."""
        rows, n = x.shape
        _shapes("add_bias_residual", (y, x.shape), (bias, (n,)))
        args = {"x": _at(x), "y": _at(y), "b": _at(bias), "rows": rows, "n": n}
        self._quads("add_bias_residual", rows, n, args, 3.0 * x.nbytes)

    def add_bias_rope(self, qkv: DeviceArray, bias: DeviceArray, cos: DeviceArray, sin: DeviceArray, heads: int) -> None:
        """qkv [T, 3 * heads * D] += bias, then queries and keys turned by cos, sin [T, D / 2]."""
        (tokens, width), half = qkv.shape, cos.shape[1]
        _shapes("add_bias_rope", (qkv, (tokens, 3 * heads * 2 * half)), (bias, (width,)), (cos, (tokens, half)), (sin, cos.shape))
        _few("add_bias_rope", qkv.size)
        args = {"x": _at(qkv), "b": _at(bias), "cos": _at(cos), "sin": _at(sin), "tokens": tokens, "heads": heads, "half": half}
        self._walk("add_bias_rope", -(-qkv.size // 2 // BLOCK), args, 2.0 * qkv.nbytes)

    def add_positions(self, x: DeviceArray, bias: DeviceArray, table: DeviceArray, rows: DeviceArray,
                      weights: DeviceArray | None = None) -> None:
        """x [T, n] = (x + bias) + the sum of `weights` [T, taps] times rows int32 [T, taps] of table [*, n]; without weights
        taps is 1, and the row counts as it is."""
        (tokens, n), taps = x.shape, rows.shape[1]
        _shapes("add_positions", (bias, (n,)), (table, (table.shape[0], n)), (rows, (tokens, taps if weights else 1)),
                *([(weights, rows.shape)] if weights else []))
        args = {"x": _at(x), "b": _at(bias), "table": _at(table), "rows": _at(rows, np.int32),
                "weights": None if weights is None else _at(weights), "tokens": tokens, "n": n, "taps": taps}
        self._quads("add_positions", tokens, n, args, (2.0 + taps) * x.nbytes)

    def group_mean(self, x: DeviceArray, out: DeviceArray, bias: DeviceArray | None = None) -> None:
        """Means of neighbouring rows of x [T, n] -> out [T / group, n]; with a bias [n]: out = (out + bias) + mean."""
        rows, n = out.shape
        group = x.shape[0] // max(rows, 1)
        _shapes("group_mean", (x, (rows * group, n)), *([(bias, (n,))] if bias else []))
        args = {"x": _at(x), "b": None if bias is None else _at(bias), "y": _at(out), "rows": rows, "n": n, "group": group}
        self._quads("group_mean", rows, n, args, x.nbytes + 2.0 * out.nbytes)

    def full_attention(self, qkv: DeviceArray, heads: int, tiles: DeviceArray, scale: float, out: DeviceArray,
                       flops: float = 0.0) -> None:
        """Attention inside views: qkv [T, 3 * heads * D], tiles int32 [*, 3] of view_tiles -> out [T, heads * D], which is not
        qkv. D is a multiple of 8. flops: for a report."""
        args = self._heads("full_attention", qkv, heads, scale, out)
        if args["head_dim"] % HEAD_DIM_STEP or tiles.shape[1:] != (3,):
            raise ValueError(f"full_attention: heads of {args['head_dim']}, a multiple of {HEAD_DIM_STEP} is needed; "
                             f"tiles {tiles.shape}")
        if tiles.shape[0]:
            self.device.launch("full_attention", (tiles.shape[0], heads, 1), (BLOCK, 1, 1),
                               {**args, "tiles": _at(tiles, np.int32)}, self.stream, work=Work(flops, 2.0 * qkv.nbytes))

    def window_attention(self, qkv: DeviceArray, heads: int, scale: float, out: DeviceArray) -> None:
        """The same inside windows of 4 tokens; D is a multiple of 4."""
        args, tokens = self._heads("window_attention", qkv, heads, scale, out), qkv.shape[0]
        if tokens % WINDOW or args["head_dim"] % 4 or args["head_dim"] > 576:
            raise ValueError(f"window_attention: {tokens} tokens of heads of {args['head_dim']}")
        flops = 4.0 * WINDOW * out.size
        self._walk("window_attention", -(-tokens * heads // 2 // WINDOW_BLOCK), {**args, "windows": tokens // WINDOW},
                   qkv.nbytes + out.nbytes, flops, WINDOW_BLOCK)

    def _heads(self, op: str, qkv: DeviceArray, heads: int, scale: float, out: DeviceArray) -> dict[str, Any]:
        """What both attentions take. ValueError where it does not fit."""
        (tokens, width), n = qkv.shape, out.shape[1]
        _shapes(op, (out, (tokens, n)), (qkv, (tokens, 3 * n)))
        if n % heads or any(array.address % 16 for array in (qkv, out)) or width % 4 or qkv.nbytes >= 2**32:
            raise ValueError(f"{op}: {heads} heads of {qkv.shape}; aligned to 16 bytes and below 4 GiB is needed")
        q = _at(qkv)
        return {"q": q, "k": q + 4 * n, "v": q + 8 * n, "o": _at(out), "heads": heads, "head_dim": n // heads, "stride": width,
                "scale": scale}


def _at(array: DeviceArray, dtype: Any = np.float32) -> int:
    """Address. TypeError unless the elements are of `dtype`."""
    if array.dtype != dtype:
        raise TypeError(f"kernel argument must be {np.dtype(dtype)}, got {array.dtype}")
    return array.address


def _shapes(op: str, *pairs: tuple[DeviceArray, tuple[int, ...]]) -> None:
    """ValueError unless each array has its shape."""
    for array, shape in pairs:
        if array.shape != shape:
            raise ValueError(f"{op}: an array {array.shape}, expected {shape}")


def _few(op: str, elements: int) -> None:
    if elements >= 2**31:
        raise ValueError(f"{op}: {elements} elements are 2^31 or more")
