"""The CPU kernels as methods over NumPy arrays. csrc/kernels.h defines every op; this file only checks and passes arrays.

Arrays are C-contiguous float32 unless a docstring says otherwise; results are new arrays. T tokens, H hidden size,
HK/HV key and value heads, K/V their sizes, D head size, n row length, nb = n / 32 blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fermi_engine.formats import Experts, KVLayout, Matrix
from fermi_engine.kernels.runner import Runner

MAX_TAPS = 16  # of conv1d_silu: csrc/kernels.h
MATRIX_GROUPS = 16  # groups of 8 rows that a thread takes at least
WINDOW_TOKENS = 64  # tokens that share a pass over the keys and values of an image: csrc/*/attention_rows.h
SHARED_TOKENS = 8  # tokens that share a pass over the keys and values in prefill
KV_FORMATS = ("f32", "f16", "q8_0")  # in the order of csrc/kernels.h
DEQUANTIZE_TILE = 256  # weight rows expanded to float32 at a time when activations stay float32


class Q8Rows(NamedTuple):
    """Activation rows in q8_0: codes int8 [T, n], scales d float32 [T, nb], sums of codes int32 [T, nb]."""

    codes: np.ndarray
    d: np.ndarray
    sums: np.ndarray


class ExpertRows(NamedTuple):
    """Which expert each row belongs to, int32: hit [min(E, T*k)], first [the same + 1], hits [1], source [T*k], row_of [T, k]."""

    hit: np.ndarray
    first: np.ndarray
    hits: np.ndarray
    source: np.ndarray
    row_of: np.ndarray


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


class CpuKernels(Runner):
    """Every op, as methods over arrays."""

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

    def gelu_tanh(self, x: np.ndarray) -> np.ndarray:
        """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) of each element; any shape."""
        return self._map("gelu_tanh", x)

    def gelu_erf(self, x: np.ndarray) -> np.ndarray:
        """x/2 (1 + erf(x / sqrt 2)) of each element; any shape."""
        return self._map("gelu_erf", x)

    def add(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a + b, same shapes."""
        _same_shape("add", a, b)
        y = self.empty(a.shape)
        self._run("add", "add_args *", a.size, 16384, {"a": self._f32(a), "b": self._f32(b), "y": self._f32(y)})
        return y

    def add_bias(self, x: np.ndarray, bias: np.ndarray) -> np.ndarray:
        """x [rows, n] + bias [n], in place; returns x."""
        rows, n = x.shape
        if bias.shape != (n,):
            raise ValueError(f"add_bias: {bias.shape} to rows of {n}")
        self._run("add_bias", "add_bias_args *", rows, 8, {"x": self._f32(x), "b": self._f32(bias), "n": n})
        return x

    def group_mean(self, x: np.ndarray, group: int) -> np.ndarray:
        """Mean of each `group` rows that follow each other: [rows * group, n] -> [rows, n]."""
        rows, n = x.shape[0] // group, x.shape[1]
        if rows * group != x.shape[0]:
            raise ValueError(f"group_mean: {x.shape[0]} rows in groups of {group}")
        y = self.empty((rows, n))
        self._run("group_mean", "group_mean_args *", rows, 8,
                  {"x": self._f32(x), "y": self._f32(y), "group": group, "n": n})
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

    def matmul_q8(self, op: str, q: Q8Rows, w: Matrix, isums: np.ndarray | None = None, source: np.ndarray | None = None,
                  out: np.ndarray | None = None, column: int = 0) -> np.ndarray:
        """One of the four gemv_/gemm_ ops: q8_0 rows times a stored q4_0 or q8_0 matrix -> [T, rows], or into columns
        `column`.. of `out` [T, *].

        isums, int32 [T, rows, nb], receives the exact block dots where given; source, int32 [T], names the row of q that
        each token takes.
        """
        tokens, n = q.codes.shape if source is None else (len(source), q.codes.shape[1])
        if n != w.cols or f"_{w.format}_" not in op:
            raise ValueError(f"{op}: activations of {n} columns against a {w.format} matrix of {w.cols}")
        y = self._output(tokens, w.rows, out, column)
        self._run(op, "matmul_q8_args *", -(-w.rows // 8), MATRIX_GROUPS,
                  {"w": self._pointer(w.data, np.uint8, "uint8_t[]"),
                   "codes": self._pointer(q.codes, np.int8, "int8_t[]"), "d": self._f32(q.d),
                   "sums": self._i32(q.sums), "y": self._f32(y) + column,
                   "source": self._ffi.NULL if source is None else self._i32(source),
                   "isums": self._ffi.NULL if isums is None else self._i32(isums),
                   "rows": w.rows, "n": n, "tokens": tokens, "y_stride": y.shape[1]})
        return y

    def grouped_gemm(self, q: Q8Rows, experts: Experts, work: ExpertRows, gathered: bool) -> np.ndarray:
        """Every expert's rows times its own matrix -> [T*k, rows] in the order of `work`. `gathered`: row j of q belongs to
        row j of the work; else it takes row work.source[j], its token's."""
        n, groups, slots = q.codes.shape[1], -(-experts.rows // 8), work.source.size
        if n != experts.cols or (gathered and len(q.codes) != slots):
            raise ValueError(f"grouped_gemm: activations {q.codes.shape} against experts of {experts.cols} columns, {slots} rows")
        y = self.empty((slots, experts.rows))
        self._run(f"grouped_gemm_{experts.format}_q8_0", "grouped_q8_args *", work.hit.size * groups, MATRIX_GROUPS,
                  {"w": self._pointer(experts.data, np.uint8, "uint8_t[]"),
                   "codes": self._pointer(q.codes, np.int8, "int8_t[]"), "d": self._f32(q.d), "sums": self._i32(q.sums),
                   "hit": self._i32(work.hit), "first": self._i32(work.first), "hits": self._i32(work.hits),
                   "source": self._ffi.NULL if gathered else self._i32(work.source), "y": self._f32(y),
                   "stride": experts.stride, "rows": experts.rows, "n": n})
        return y

    def _output(self, tokens: int, rows: int, out: np.ndarray | None, column: int) -> np.ndarray:
        if out is None:
            return self.empty((tokens, rows))
        if len(out) != tokens or column + rows > out.shape[1]:
            raise ValueError(f"product of {tokens} by {rows} does not fit {out.shape} from column {column} on")
        return out

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
        y = self._output(tokens, w.shape[0], out, column)
        self._run("gemm_f32", "gemm_f32_args *", w.shape[0], 32,
                  {"x": self._f32(x), "w": self._f32(w), "y": self._f32(y) + column,
                   "n": n, "tokens": tokens, "y_stride": y.shape[1]})
        return y

    def linear(self, act: Activations, w: Matrix, mode: str, out: np.ndarray | None = None, column: int = 0) -> np.ndarray:
        """act [T, n] times any stored matrix -> [T, rows], or into columns `column`.. of `out` [T, *]; mode 'q8_0' or 'f32'
        for quantised weights (EngineConfig)."""
        if w.format == "f32":
            return self.gemm_f32(act.x, w.data.view(np.float32), out, column)
        if mode == "f32" or w.format == "f16":
            return self._linear_dequantized(act.x, w, out, column)
        kind = "gemv" if act.x.shape[0] == 1 else "gemm"
        return self.matmul_q8(f"{kind}_{w.format}_q8_0", act.q8, w, out=out, column=column)

    def _linear_dequantized(self, x: np.ndarray, w: Matrix, out: np.ndarray | None, column: int) -> np.ndarray:
        y = self._output(x.shape[0], w.rows, out, column)
        for first in range(0, w.rows, DEQUANTIZE_TILE):
            tile = self.dequantize(w, first, min(DEQUANTIZE_TILE, w.rows - first))
            self.gemm_f32(x, tile, out=y, column=column + first)
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

    def layer_norm(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
        """Layer norm of x [rows, n] with weight and bias [n] -> [rows, n]."""
        rows, n = x.shape
        if weight.shape != (n,) or bias.shape != (n,):
            raise ValueError(f"layer_norm: weight {weight.shape} and bias {bias.shape} for rows of {n}")
        y = self.empty((rows, n))
        self._run("layer_norm", "layer_norm_args *", rows, 8,
                  {"x": self._f32(x), "w": self._f32(weight), "b": self._f32(bias), "y": self._f32(y), "n": n, "eps": eps})
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
        # The state of a head is fetched while the one before it is computed: a call of few heads has little to hide behind.
        grain = 1 if tokens > 1 else max(2, min(8, v_heads // self.threads))
        self._run("gdn_recurrent", "gdn_recurrent_args *", v_heads, grain,
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

    def kv_append(self, cache: KVLayout, start: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
        """key, value [T, kv_heads, D] into the cache at positions start[0].. (int64 [1]); its pages must be there."""
        tokens, kv_heads, head_dim = key.shape
        if value.shape != key.shape or kv_heads != cache.kv_heads or head_dim != cache.head_dim:
            raise ValueError(f"kv_append: keys {key.shape}, values {value.shape} into a cache of {cache.kv_heads} heads of "
                             f"{cache.head_dim}")
        self._room("kv_append", cache, start, tokens)
        self._run("kv_append", "kv_append_args *", tokens * kv_heads, 16,
                  {"k": self._f32(key), "v": self._f32(value), "kv_heads": kv_heads, **self._cache(cache, start)})

    def attention(self, q: np.ndarray, cache: KVLayout, start: np.ndarray, scale: float) -> np.ndarray:
        """Causal attention of q [T, heads, D] at absolute positions start[0].. (int64 [1]) over the cache -> like q.

        The cache already holds the keys and values of these tokens.
        """
        tokens, heads, head_dim = q.shape
        if head_dim != cache.head_dim or heads % cache.kv_heads:
            raise ValueError(f"attention: queries {q.shape} against a cache of {cache.kv_heads} heads of {cache.head_dim}")
        self._room("attention", cache, start, tokens)
        o = self.empty(q.shape)
        # Query heads of a key head share one pass over the cache unless threads would go without, and so do tokens where there
        # are enough for all threads.
        grain = min(heads // cache.kv_heads, max(1, heads // self.threads))
        if tokens >= 2 * SHARED_TOKENS * self.threads:
            grain = SHARED_TOKENS * heads
        self._run("attention", "attention_args *", tokens * heads, grain,
                  {"q": self._f32(q), "o": self._f32(o), "heads": heads, "kv_heads": cache.kv_heads, "scale": scale,
                   **self._cache(cache, start)})
        return o

    def full_attention(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int, scale: float) -> np.ndarray:
        """Attention of q, k, v [T, heads, D] inside windows of `window` tokens, all of which see each other -> like q."""
        tokens, heads, head_dim = q.shape
        if k.shape != q.shape or v.shape != q.shape or window < 1 or tokens % window:
            raise ValueError(f"full_attention: q {q.shape}, k {k.shape}, v {v.shape} in windows of {window}")
        o = self.empty(q.shape)
        # As many tokens share a pass over keys and values as there are, unless threads would go without.
        shared = max(1, min(WINDOW_TOKENS, tokens // (2 * self.threads)))
        self._run("full_attention", "full_attention_args *", tokens * heads, shared * heads,
                  {"q": self._f32(q), "k": self._f32(k), "v": self._f32(v), "o": self._f32(o), "heads": heads,
                   "head_dim": head_dim, "window": window, "scale": scale})
        return o

    def _room(self, op: str, cache: KVLayout, start: np.ndarray, tokens: int) -> None:
        if int(start[0]) + tokens > cache.capacity:
            raise ValueError(f"{op}: {int(start[0]) + tokens} positions in a cache of {cache.capacity}")

    def _cache(self, cache: KVLayout, start: np.ndarray) -> dict[str, Any]:
        return {"k_pages": self._pointer(cache.k_table, np.uintp, "void *[]"),
                "v_pages": self._pointer(cache.v_table, np.uintp, "void *[]"),
                "start": self._pointer(start, np.int64, "int64_t[]"),
                "head_dim": cache.head_dim, "page_tokens": cache.page_tokens, "format": KV_FORMATS.index(cache.format)}

    # mixture of experts

    def router_topk(self, logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """logits [T, E] -> ids int32 [T, k] by higher logit, then lower id; weights [T, k], softmax over the chosen."""
        tokens, experts = logits.shape
        ids, weights = self.empty((tokens, k), np.int32), self.empty((tokens, k))
        self._run("router_topk", "router_topk_args *", tokens, 16,
                  {"logits": self._f32(logits), "ids": self._i32(ids), "weights": self._f32(weights),
                   "experts": experts, "k": k})
        return ids, weights

    def expert_rows(self, ids: np.ndarray, experts: int) -> ExpertRows:
        """The experts' work list for the router's choice ids int32 [T, k] among `experts`."""
        tokens, k = ids.shape
        most = min(experts, ids.size)
        work = ExpertRows(*(self.empty(shape, np.int32) for shape in (experts, experts + 1, 1, ids.size, ids.shape)))
        self._run("expert_rows", "expert_rows_args *", 1, 1,
                  {"ids": self._i32(ids), **{name: self._i32(array) for name, array in work._asdict().items()},
                   "tokens": tokens, "k": k, "experts": experts})
        return work._replace(hit=work.hit[:most], first=work.first[: most + 1])

    def weighted_rows(self, table: np.ndarray, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Sum of weights [T, k] times rows int32 [T, k] of table [*, n] -> [T, n]: the routed part of `moe_combine`."""
        if rows.shape != weights.shape:
            raise ValueError(f"weighted_rows: {rows.shape} rows with {weights.shape} weights")
        y = self.empty((len(rows), table.shape[1]))
        self._run("moe_combine", "moe_combine_args *", len(rows), 4,
                  {"expert_out": self._f32(table), "row_of": self._i32(rows), "weights": self._f32(weights),
                   "shared": self._ffi.NULL, "y": self._f32(y), "n": table.shape[1], "k": rows.shape[1]})
        return y

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
