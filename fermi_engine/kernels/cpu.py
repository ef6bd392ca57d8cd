"""The CPU kernels as methods over NumPy arrays. csrc/kernels.h defines every op; this file only checks and passes arrays.

Arrays are C-contiguous float32 unless a docstring says otherwise; results are new arrays. T tokens, H hidden size,
HK/HV key and value heads, K/V their sizes, D head size, n row length, nb = n / 32 blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fermi_engine.formats import Matrix
from fermi_engine.kernels.dispatch import Kernel, library
from fermi_engine.kernels.threads import default_threads

ATTENTION_BLOCK = 64  # absolute positions that merge together; page sizes do not change it
MAX_TAPS = 16  # of conv1d_silu: csrc/kernels.h
DEQUANTIZE_TILE = 256  # weight rows expanded to float32 at a time when activations stay float32


class Q8Rows(NamedTuple):
    """Activation rows in q8_0: codes int8 [T, n], scales d float32 [T, nb], sums of codes int32 [T, nb]."""

    codes: np.ndarray
    d: np.ndarray
    sums: np.ndarray


class Activations:
    """Rows [T, n] on their way into several matrices; quantised once, on first need."""

    def __init__(self, kernels: CpuKernels, x: np.ndarray) -> None:
        self.x = x
        self._kernels = kernels
        self._q8: Q8Rows | None = None

    @property
    def q8(self) -> Q8Rows:
        if self._q8 is None:
            self._q8 = self._kernels.quantize_q8_0(self.x)
        return self._q8

    def take(self, rows: np.ndarray) -> Activations:
        """Some of the rows; codes are gathered, not computed again."""
        taken = Activations(self._kernels, self.x[rows])
        if self._q8 is not None:
            taken._q8 = Q8Rows(*(part[rows] for part in self._q8))
        return taken


class CpuKernels:
    """Every op, bound to one table of C functions and a thread count.

    `ran` records op -> backend of each call made, so that a test can ask who really ran.
    """

    def __init__(self, table: dict[str, Kernel], threads: int | None = None) -> None:
        module = library()
        self._ffi, self._lib = module.ffi, module.lib
        self._table = table
        self.threads = threads or default_threads()
        self.ran: dict[str, str] = {}

    @property
    def backends(self) -> dict[str, str]:
        """Op -> backend that serves it."""
        return {op: kernel.backend for op, kernel in self._table.items()}

    def empty(self, shape: tuple[int, ...] | int, dtype: Any = np.float32) -> np.ndarray:
        """Where every result comes from; tests replace it to poison outputs and to guard their edges."""
        return np.empty(shape, dtype)

    def _run(self, op: str, struct: str, items: int, grain: int, fields: dict[str, Any]) -> None:
        kernel = self._table[op]
        self.ran[op] = kernel.backend
        args = self._ffi.new(struct, fields)
        self._lib.fermi_run(kernel.pointer, args, items, grain, self.threads)

    def _f32(self, array: np.ndarray) -> Any:
        return self._pointer(array, np.float32, "float[]")

    def _pointer(self, array: np.ndarray, dtype: Any, ctype: str) -> Any:
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise TypeError(f"kernel argument must be C-contiguous {np.dtype(dtype)}, got {array.dtype} "
                            f"with strides {array.strides}")
        return self._ffi.from_buffer(ctype, array)

    def _i32(self, array: np.ndarray) -> Any:
        return self._pointer(array, np.int32, "int32_t[]")

    # elementwise

    def _map(self, op: str, x: np.ndarray) -> np.ndarray:
        y = self.empty(x.shape)
        self._run(op, "map_args *", x.size, 16384, {"x": self._f32(x), "y": self._f32(y)})
        return y

    def exp_f32(self, x: np.ndarray) -> np.ndarray:
        """exp of each element; any shape."""
        return self._map("exp_f32", x)

    def log1p_f32(self, x: np.ndarray) -> np.ndarray:
        """log(1 + x) of each element; any shape."""
        return self._map("log1p_f32", x)

    def sin_f32(self, x: np.ndarray) -> np.ndarray:
        """Sine of each element; any shape."""
        return self._map("sin_f32", x)

    def cos_f32(self, x: np.ndarray) -> np.ndarray:
        """Cosine of each element; any shape."""
        return self._map("cos_f32", x)

    def add(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a + b, same shapes."""
        _same_shape("add", a, b)
        y = self.empty(a.shape)
        self._run("add", "add_args *", a.size, 16384, {"a": self._f32(a), "b": self._f32(b), "y": self._f32(y)})
        return y

    def swiglu(self, gate_up: np.ndarray) -> np.ndarray:
        """[T, 2n] -> silu(first half) * second half, [T, n]."""
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        y = self.empty((rows, n))
        self._run("swiglu", "swiglu_args *", rows, 4, {"gate_up": self._f32(gate_up), "y": self._f32(y), "n": n})
        return y

    def sigmoid_mul(self, x: np.ndarray, gate: np.ndarray, offset: int) -> np.ndarray:
        """x [rows, n] * sigmoid(gate[:, offset:offset + n]); gate [rows, stride]."""
        rows, n = x.shape
        if gate.shape[0] != rows or offset + n > gate.shape[1]:
            raise ValueError(f"sigmoid_mul: gate {gate.shape} does not cover {x.shape} at column {offset}")
        y = self.empty((rows, n))
        self._run("sigmoid_mul", "sigmoid_mul_args *", rows, 16,
                  {"x": self._f32(x), "gate": self._f32(gate) + offset, "y": self._f32(y),
                   "n": n, "gate_stride": gate.shape[1]})
        return y

    # matrices

    def activations(self, x: np.ndarray) -> Activations:
        """Wrap rows [T, n] that go into one or more matrices."""
        return Activations(self, x)

    def quantize_q8_0(self, x: np.ndarray) -> Q8Rows:
        """[T, n] -> q8_0 rows; n a multiple of 32, x finite."""
        rows, n = x.shape
        if n % 32:
            raise ValueError(f"quantize_q8_0: row length {n} is not a multiple of 32")
        q = Q8Rows(self.empty((rows, n), np.int8), self.empty((rows, n // 32)), self.empty((rows, n // 32), np.int32))
        self._run("quantize_q8_0", "quantize_q8_0_args *", rows, 4,
                  {"x": self._f32(x), "codes": self._pointer(q.codes, np.int8, "int8_t[]"),
                   "d": self._f32(q.d), "sums": self._i32(q.sums), "n": n})
        return q

    def matmul_q8(self, op: str, q: Q8Rows, w: Matrix, isums: np.ndarray | None = None) -> np.ndarray:
        """One of the four gemv_/gemm_ ops: q8_0 rows times a stored q4_0 or q8_0 matrix -> [T, rows].

        isums, int32 [T, rows, nb], receives the exact block dots where given.
        """
        tokens, n = q.codes.shape
        if n != w.cols or f"_{w.format}_" not in op:
            raise ValueError(f"{op}: activations of {n} columns against a {w.format} matrix of {w.cols}")
        y = self.empty((tokens, w.rows))
        self._run(op, "matmul_q8_args *", -(-w.rows // 8), 8,
                  {"w": self._pointer(w.data, np.uint8, "uint8_t[]"),
                   "codes": self._pointer(q.codes, np.int8, "int8_t[]"), "d": self._f32(q.d),
                   "sums": self._i32(q.sums), "y": self._f32(y),
                   "isums": self._ffi.NULL if isums is None else self._i32(isums),
                   "rows": w.rows, "n": n, "tokens": tokens, "y_stride": w.rows})
        return y

    def dequantize(self, w: Matrix, first: int = 0, count: int | None = None, ids: np.ndarray | None = None) -> np.ndarray:
        """Rows of a q4_0, q8_0 or f16 matrix as float32: `count` rows from `first`, or the rows named by int32 `ids`."""
        items = len(ids) if ids is not None else (w.rows - first if count is None else count)
        y = self.empty((items, w.cols))
        self._run(f"dequantize_{w.format}", "dequantize_args *", items, 16,
                  {"w": self._pointer(w.data, np.uint8, "uint8_t[]"), "y": self._f32(y), "n": w.cols,
                   "row_ids": self._ffi.NULL if ids is None else self._i32(ids), "first_row": first})
        return y

    def gemm_f32(self, x: np.ndarray, w: np.ndarray, out: np.ndarray | None = None, column: int = 0) -> np.ndarray:
        """x [T, n] times w [rows, n] transposed -> [T, rows], or into columns `column`.. of `out` [T, *]."""
        tokens, n = x.shape
        if w.shape[1] != n:
            raise ValueError(f"gemm_f32: rows of {n} against a matrix of {w.shape[1]} columns")
        y = self.empty((tokens, w.shape[0])) if out is None else out
        self._run("gemm_f32", "gemm_f32_args *", w.shape[0], 32,
                  {"x": self._f32(x), "w": self._f32(w), "y": self._f32(y) + column,
                   "n": n, "tokens": tokens, "y_stride": y.shape[1]})
        return y

    def linear(self, act: Activations, w: Matrix, mode: str) -> np.ndarray:
        """act [T, n] times any stored matrix -> [T, rows]; mode 'q8_0' or 'f32' for quantised weights (EngineConfig)."""
        if w.format == "f32":
            return self.gemm_f32(act.x, w.data.view(np.float32))
        if mode == "f32" or w.format == "f16":
            return self._linear_dequantized(act.x, w)
        kind = "gemv" if act.x.shape[0] == 1 else "gemm"
        return self.matmul_q8(f"{kind}_{w.format}_q8_0", act.q8, w)

    def _linear_dequantized(self, x: np.ndarray, w: Matrix) -> np.ndarray:
        y = self.empty((x.shape[0], w.rows))
        for first in range(0, w.rows, DEQUANTIZE_TILE):
            tile = self.dequantize(w, first, min(DEQUANTIZE_TILE, w.rows - first))
            self.gemm_f32(x, tile, out=y, column=first)
        return y

    def rows(self, w: Matrix, ids: np.ndarray) -> np.ndarray:
        """Embedding lookup: rows `ids` (int32 [T]) of any stored matrix as float32 [T, cols]."""
        if w.format == "f32":
            return w.data.view(np.float32)[ids]
        return self.dequantize(w, ids=ids)

    # norms

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float, offset: float = 1.0) -> np.ndarray:
        """RMSNorm with weight (offset + w) over the leading n = len(weight) columns of x [rows, stride] -> [rows, n]."""
        rows, stride = x.shape
        n = len(weight)
        y = self.empty((rows, n))
        self._run("rms_norm", "rms_norm_args *", rows, 8,
                  {"x": self._f32(x), "w": self._f32(weight), "y": self._f32(y), "n": n,
                   "x_stride": stride, "y_stride": n, "eps": eps, "offset": offset})
        return y

    def gated_rms_norm(self, o: np.ndarray, z: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        """RMSNorm with the plain weight times silu(z); o, z [rows, n]."""
        _same_shape("gated_rms_norm", o, z)
        y = self.empty(o.shape)
        self._run("gated_rms_norm", "gated_rms_norm_args *", o.shape[0], 8,
                  {"o": self._f32(o), "z": self._f32(z), "w": self._f32(weight), "y": self._f32(y),
                   "n": o.shape[1], "eps": eps})
        return y

    def l2_norm(self, x: np.ndarray, column: int, heads: int, n: int, eps: float, scale: float) -> np.ndarray:
        """Heads of n columns from `column` on in x [T, C], each scaled to length `scale` -> [T, heads, n]."""
        tokens, stride = x.shape
        if column + heads * n > stride:
            raise ValueError(f"l2_norm: {heads} heads of {n} from column {column} exceed {stride} columns")
        y = self.empty((tokens, heads, n))
        self._run("l2_norm", "l2_norm_args *", tokens * heads, 32,
                  {"x": self._f32(x) + column, "y": self._f32(y), "n": n, "heads": heads,
                   "token_stride": stride, "eps": eps, "scale": scale})
        return y

    # Gated DeltaNet

    def gdn_gates(self, a: np.ndarray, b: np.ndarray, A_log: np.ndarray, dt_bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """a, b [T, HV]; A_log, dt_bias [HV] -> log-decay g and beta, both [T, HV]."""
        _same_shape("gdn_gates", a, b)
        g, beta = self.empty(a.shape), self.empty(a.shape)
        self._run("gdn_gates", "gdn_gates_args *", a.shape[0], 16,
                  {"a": self._f32(a), "b": self._f32(b), "A_log": self._f32(A_log), "dt_bias": self._f32(dt_bias),
                   "g": self._f32(g), "beta": self._f32(beta), "heads": a.shape[1]})
        return g, beta

    def conv1d_silu(self, x: np.ndarray, weight: np.ndarray, tail: np.ndarray) -> np.ndarray:
        """Causal depthwise convolution and silu: x [T, C], weight [taps, C], tail [taps-1, C] updated in place -> [T, C].

        ValueError unless taps lie in 1..16 and the shapes fit each other.
        """
        tokens, channels = x.shape
        if not 1 <= weight.shape[0] <= MAX_TAPS:
            raise ValueError(f"conv1d_silu: {weight.shape[0]} taps, the kernels take 1..{MAX_TAPS}")
        if weight.shape[1] != channels or tail.shape != (weight.shape[0] - 1, channels):
            raise ValueError(f"conv1d_silu: x {x.shape}, weight {weight.shape}, tail {tail.shape} do not fit")
        y = self.empty(x.shape)
        self._run("conv1d_silu", "conv1d_silu_args *", channels, 512,
                  {"x": self._f32(x), "w": self._f32(weight), "tail": self._f32(tail), "y": self._f32(y),
                   "tokens": tokens, "channels": channels, "taps": weight.shape[0]})
        return y

    def gdn_recurrent(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, column: int, g: np.ndarray,
                      beta: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Gated delta rule in token order: q, k [T, HK, K], v = columns from `column` on of [T, C], g, beta [T, HV],
        state [HV, K, V] updated in place -> o [T, HV, V]."""
        tokens, k_heads, dk = q.shape
        v_heads, _, dv = state.shape
        if state.shape[1] != dk or k.shape != q.shape or g.shape != (tokens, v_heads) or column + v_heads * dv > v.shape[1]:
            raise ValueError(f"gdn_recurrent: q {q.shape}, v {v.shape} from {column}, g {g.shape} and state {state.shape} "
                             "do not fit")
        o = self.empty((tokens, v_heads, dv))
        self._run("gdn_recurrent", "gdn_recurrent_args *", v_heads, 1,
                  {"q": self._f32(q), "k": self._f32(k), "v": self._f32(v) + column, "g": self._f32(g),
                   "beta": self._f32(beta), "state": self._f32(state), "o": self._f32(o), "tokens": tokens,
                   "k_heads": k_heads, "v_heads": v_heads, "dk": dk, "dv": dv, "v_stride": v.shape[1]})
        return o

    # attention

    def rope_tables(self, positions: np.ndarray, inv_freq: np.ndarray, axis: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """positions int32 [3, T], inv_freq [half], axis int32 [half] -> cos, sin [T, half]."""
        tokens, half = positions.shape[1], len(inv_freq)
        cos, sin = self.empty((tokens, half)), self.empty((tokens, half))
        self._run("rope_tables", "rope_tables_args *", tokens, 16,
                  {"positions": self._i32(positions), "inv_freq": self._f32(inv_freq), "axis": self._i32(axis),
                   "cos": self._f32(cos), "sin": self._f32(sin), "tokens": tokens, "half": half})
        return cos, sin

    def rope(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        """Turns the leading 2 * half dimensions of x [T, heads, D] in place by cos, sin [T, half]; returns x."""
        tokens, heads, head_dim = x.shape
        if cos.shape[0] != tokens or 2 * cos.shape[1] > head_dim:
            raise ValueError(f"rope: tables {cos.shape} do not fit x {x.shape}")
        self._run("rope", "rope_args *", tokens * heads, 32,
                  {"x": self._f32(x), "cos": self._f32(cos), "sin": self._f32(sin), "heads": heads,
                   "head_dim": head_dim, "half": cos.shape[1]})
        return x

    def attention(self, q: np.ndarray, k_pages: list[np.ndarray], v_pages: list[np.ndarray], start: int,
                  scale: float) -> np.ndarray:
        """Causal attention of q [T, heads, D] at absolute positions start.. over pages [kv_heads, page_tokens, D] -> like q.

        The pages already hold the keys and values of these tokens.
        """
        tokens, heads, head_dim = q.shape
        kv_heads, page_tokens, _ = k_pages[0].shape
        if start + tokens > page_tokens * len(k_pages):
            raise ValueError(f"attention: {start + tokens} positions in {len(k_pages)} pages of {page_tokens}")
        o = self.empty(q.shape)
        keys = self._ffi.new("float *[]", [self._f32(page) for page in k_pages])
        values = self._ffi.new("float *[]", [self._f32(page) for page in v_pages])
        group = heads // kv_heads  # query heads that share one pass over the cache
        self._run("attention", "attention_args *", tokens * heads, group,
                  {"q": self._f32(q), "k_pages": keys, "v_pages": values, "o": self._f32(o), "heads": heads,
                   "kv_heads": kv_heads, "head_dim": head_dim, "start": start, "page_tokens": page_tokens, "scale": scale})
        return o

    # mixture of experts

    def router_topk(self, logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """logits [T, E] -> ids int32 [T, k] by higher logit, then lower id; weights [T, k], softmax over the chosen."""
        tokens, experts = logits.shape
        ids, weights = self.empty((tokens, k), np.int32), self.empty((tokens, k))
        self._run("router_topk", "router_topk_args *", tokens, 16,
                  {"logits": self._f32(logits), "ids": self._i32(ids), "weights": self._f32(weights),
                   "experts": experts, "k": k})
        return ids, weights

    def moe_combine(self, expert_out: np.ndarray, row_of: np.ndarray, weights: np.ndarray,
                    shared: np.ndarray, shared_gate: np.ndarray) -> np.ndarray:
        """Weighted sum of expert rows plus the gated shared expert: expert_out [*, n], row_of int32 [T, k],
        weights [T, k], shared [T, n], shared_gate [T, 1] (logits) -> [T, n]."""
        tokens, k = row_of.shape
        y = self.empty(shared.shape)
        self._run("moe_combine", "moe_combine_args *", tokens, 4,
                  {"expert_out": self._f32(expert_out), "row_of": self._i32(row_of), "weights": self._f32(weights),
                   "shared": self._f32(shared), "shared_gate": self._f32(shared_gate), "y": self._f32(y),
                   "n": shared.shape[1], "k": k})
        return y


def _same_shape(op: str, a: np.ndarray, b: np.ndarray) -> None:
    if a.shape != b.shape:
        raise ValueError(f"{op}: shapes {a.shape} and {b.shape} differ")
