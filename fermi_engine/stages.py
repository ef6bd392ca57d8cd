"""THE STAGE TABLE, shipped half: name, candidate and compare rule of everything that is checked against the reference.

tests/stages.py holds the other half, reference and inputs per name. Rows go from kernels up to generation, so the
first that diverges is the cause. A row for every op of csrc/kernels.h, and for the quantisers, mixers and whole small
models. Arrays are named as in kernels.h; sizes and factors come as arrays without dimensions. NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fermi_engine import kernels, runs
from fermi_engine.compare import All, Arrays, Divergence, Exact, Rounding, Rule, Tokens, TwiceReference, Ulp
from fermi_engine.formats import FORMATS, Experts, Matrix
from fermi_engine.kernels.cpu import KV_FORMATS, CpuKernels, ExpertRows, Q8Rows
from fermi_engine.runs import own
from fermi_engine.state import KVPages

Compute = Callable[[CpuKernels, Arrays], Arrays]
UNWRITTEN = 0xA5  # byte of a page before anything is appended


@dataclass(frozen=True)
class Stage:
    """One row. `op` is the kernel it is about, None above kernels; compute(kernels, inputs) gives the outputs."""

    name: str
    op: str | None
    compute: Compute
    compare: Rule

    def candidate(self, arrays: Arrays, backend: str | None = None, threads: int | None = None) -> Arrays:
        """Outputs of the engine by name. Raises BackendError where `backend` cannot run."""
        return self.compute(kernels.get(backend, threads), arrays)


# Kernels over named arrays


def _map(op: str) -> Compute:
    return lambda k, a: {"y": getattr(k, op)(a["x"])}


def _quantize_q8_0(k: CpuKernels, a: Arrays) -> Arrays:
    return k.quantize_q8_0(a["x"])._asdict()


def _stored(k: CpuKernels, format: str, plain: np.ndarray) -> Matrix:
    """Plain rows uint8 [rows, bytes] as kernels read them."""
    row = FORMATS[format]
    return Matrix(format, len(plain), plain.shape[1] // row.block_bytes * row.block, own(k, row.interleave(plain)))


def _product(op: str, format: str) -> Compute:
    """Of the activation rows in order (gemv: the first) with block dots, and of those that `source` names without."""
    def compute(k: CpuKernels, a: Arrays) -> Arrays:
        q, w = Q8Rows(a["codes"], a["d"], a["sums"]), _stored(k, format, a["w"])
        plain = Q8Rows(*(part[: 1 if "gemv" in op else None] for part in q))
        isums = k.empty((len(plain.codes), w.rows, q.d.shape[1]), np.int32)
        return {"isums": isums, "y": k.matmul_q8(op, plain, w, isums), "picked": k.matmul_q8(op, q, w, source=a["source"])}
    return compute


def _grouped_product(format: str) -> Compute:
    """w uint8 [E, rows, bytes] with `gap` bytes 0xff after each expert; activation rows of tokens, then rows in order."""
    def compute(k: CpuKernels, a: Arrays) -> Arrays:
        q, work = Q8Rows(a["codes"], a["d"], a["sums"]), ExpertRows(*(a[name] for name in ExpertRows._fields))
        experts = _experts(k, format, a["w"], int(a["gap"]))
        return {name: k.grouped_gemm(q, experts, work, gathered) for name, gathered in (("tokens", False), ("rows", True))}
    return compute


def _experts(k: CpuKernels, format: str, plain: np.ndarray, gap: int) -> Experts:
    matrices = [_stored(k, format, one) for one in plain]
    first = matrices[0]
    data = k.empty((len(matrices), first.nbytes + gap), np.uint8)
    data[...] = 0xFF
    for row, matrix in zip(data, matrices, strict=True):
        row[: first.nbytes] = matrix.data.reshape(-1)
    return Experts(format, len(matrices), first.rows, first.cols, first.nbytes + gap, data.reshape(-1))


def _dequantize(format: str) -> Compute:
    def compute(k: CpuKernels, a: Arrays) -> Arrays:
        w = _stored(k, format, a["w"])
        return {"rows": k.dequantize(w, int(a["first"])), "picked": k.dequantize(w, ids=a["ids"])}
    return compute


def _gemm_f32(k: CpuKernels, a: Arrays) -> Arrays:
    """Also into the columns from `column` on of a wider result, whose other columns stay 7."""
    wide = k.empty((len(a["x"]), len(a["w"]) + int(a["column"]) + 1))
    wide[...] = 7
    return {"y": k.gemm_f32(a["x"], a["w"]), "wide": k.gemm_f32(a["x"], a["w"], wide, int(a["column"]))}


def _rms_norm(k: CpuKernels, a: Arrays) -> Arrays:
    return {"y": k.rms_norm(a["x"], a["w"], float(a["eps"]), float(a["offset"]))}


def _gated_rms_norm(k: CpuKernels, a: Arrays) -> Arrays:
    return {"y": k.gated_rms_norm(a["o"], a["z"], a["w"], float(a["eps"]))}


def _l2_norm(k: CpuKernels, a: Arrays) -> Arrays:
    return {"y": k.l2_norm(a["x"], int(a["column"]), int(a["heads"]), int(a["n"]), float(a["eps"]), float(a["scale"]))}


def _gdn_gates(k: CpuKernels, a: Arrays) -> Arrays:
    g, beta = k.gdn_gates(a["a"], a["b"], a["A_log"], a["dt_bias"])
    return {"g": g, "beta": beta}


def _conv1d_silu(k: CpuKernels, a: Arrays) -> Arrays:
    tail = own(k, a["tail"])
    return {"y": k.conv1d_silu(a["x"], a["w"], tail), "tail": tail}


def _gdn_recurrent(k: CpuKernels, a: Arrays) -> Arrays:
    state = own(k, a["state"])
    o = k.gdn_recurrent(a["q"], a["k"], a["v"], int(a["column"]), a["g"], a["beta"], state)
    return {"o": o, "state": state}


def _rope_tables(k: CpuKernels, a: Arrays) -> Arrays:
    cos, sin = k.rope_tables(a["positions"], a["inv_freq"], a["axis"])
    return {"cos": cos, "sin": sin}


def _rope(k: CpuKernels, a: Arrays) -> Arrays:
    return {"x": k.rope(own(k, a["x"]), a["cos"], a["sin"])}


def _cache(k: CpuKernels, format: str, length: int, kv_heads: int, head_dim: int, page_tokens: int) -> KVPages:
    """Pages for `length` positions, as they come from the kernels."""
    dtype = np.float32 if format == "f32" else np.float16

    def allocate(shape: tuple[int, ...]) -> np.ndarray:
        return k.empty((*shape[:-1], shape[-1] // np.dtype(dtype).itemsize), dtype).view(np.uint8)

    cache = KVPages(kv_heads, page_tokens, head_dim, format, allocate)
    cache.reserve(length)
    return cache


def _kv_append(k: CpuKernels, a: Arrays) -> Arrays:
    """k and v [start + T, HKV, D], the first `start` in a call of their own, into pages that hold bytes 0xa5 -> all bytes of
    all pages, for each format."""
    out, length, start = {}, len(a["k"]), int(a["start"])
    for format in _formats(a["k"].shape[2]):
        cache = _cache(k, format, length, *a["k"].shape[1:], int(a["page_tokens"]))
        for page in (*cache.keys, *cache.values):
            page[...] = UNWRITTEN
        for begin, end in ((0, start), (start, length)):
            if begin < end:
                k.kv_append(cache, np.array([begin], np.int64), a["k"][begin:end], a["v"][begin:end])
        out |= {f"{format}.k": np.stack(cache.keys), f"{format}.v": np.stack(cache.values)}
    return out


def _formats(head_dim: int) -> tuple[str, ...]:
    return KV_FORMATS if head_dim % 32 == 0 else KV_FORMATS[:2]


def _attention(k: CpuKernels, a: Arrays) -> Arrays:
    """`<format>.k` and `<format>.v` [start + T, HKV, row bytes] in pages of `page_tokens`, whose rest is left as it comes ->
    o under the format's name."""
    tokens, _, head_dim = a["q"].shape
    out = {}
    for format in _formats(head_dim):
        rows = [a[f"{format}.{name}"] for name in ("k", "v")]
        length, kv_heads, _ = rows[0].shape
        cache = _cache(k, format, length, kv_heads, head_dim, int(a["page_tokens"]))
        for part, pages in zip(rows, (cache.keys, cache.values), strict=True):
            _fill(pages, part)
        out[format] = k.attention(a["q"], cache, np.array([length - tokens], np.int64), float(a["scale"]))
    return out


def _fill(pages: list[np.ndarray], rows: np.ndarray) -> None:
    step = pages[0].shape[1]
    for page, first in zip(pages, range(0, len(rows), step), strict=True):
        part = rows[first:first + step].transpose(1, 0, 2)
        page[:, :part.shape[1]] = part


def _router_topk(k: CpuKernels, a: Arrays) -> Arrays:
    ids, weights = k.router_topk(a["logits"], int(a["k"]))
    return {"ids": ids, "weights": weights}


def _expert_rows(k: CpuKernels, a: Arrays) -> Arrays:
    """The work list; hit and first as far as there are hits."""
    work = k.expert_rows(a["ids"], int(a["experts"]))
    hits = int(work.hits[0])
    return work._replace(hit=work.hit[:hits], first=work.first[: hits + 1])._asdict()


def _swiglu(k: CpuKernels, a: Arrays) -> Arrays:
    return {"y": k.swiglu(a["gate_up"])}


def _sigmoid_mul(k: CpuKernels, a: Arrays) -> Arrays:
    return {"y": k.sigmoid_mul(a["x"], a["gate"], int(a["column"]))}


def _moe_combine(k: CpuKernels, a: Arrays) -> Arrays:
    return {"y": k.moe_combine(a["expert_out"], a["row_of"], a["weights"], a["shared"], a["shared_gate"])}


def _add(k: CpuKernels, a: Arrays) -> Arrays:
    return {"y": k.add(a["a"], a["b"])}


def _quantize(format: str) -> Compute:
    """Weights to plain bytes, through the interleaved layout and back, and the values that they stand for."""
    def compute(k: CpuKernels, a: Arrays) -> Arrays:
        matrix = Matrix.from_f32(a["x"], format)
        return {"bytes": matrix.plain(), "values": matrix.dequantize()}
    return compute


# Roundings, as functions of the inputs. An error of L units in the last place counts as 2 L roundings.

EXP_ULP, LOG1P_ULP, SIN_ULP, COS_ULP = 0.891, 0.501, 0.503, 0.503  # stated in csrc/scalar/math.h over all inputs
LOGISTIC = 2 * EXP_ULP + 2  # 1 / (1 + exp(-x)): exp, sum, quotient
SILU = LOGISTIC + 1  # times x
GATES = 4 * EXP_ULP + 2 * LOG1P_ULP + 1  # exp(A_log) and log1p(exp(x)), then their product


def block_sum(a: Arrays) -> float:
    """Scale times scale, times the integer (exact below 2^24), then blocks - 1 additions."""
    return a["d"].shape[1] + 1


def block_gain(a: Arrays) -> float:
    """A scale product that underflows meets an integer of at most 32 * 128 * 127, in each block."""
    return 32 * 128 * 127 * a["d"].shape[1]


def lane_dot(a: Arrays) -> float:
    """The product, ceil(n / 16) - 1 additions in a lane (the first one is to 0), four in the tree."""
    return 1 + (-(-a["x"].shape[1] // 16) - 1) + 4


def term_count(a: Arrays) -> float:
    """Each of the n products may underflow, not only those on one chain."""
    return a["x"].shape[1]


def conv_silu(a: Arrays) -> float:
    """A product and taps - 1 additions, which silu (slope at most 1.1) passes on, and silu's own."""
    return 1.1 * len(a["w"]) + SILU


def chosen_softmax(a: Arrays) -> float:
    """Of weight * (1 + |l - l_first|): the difference (in the bound) and exp of the element; the same of the sum,
    whose differences weigh at most e^-d d < 0.4 each; its k - 1 additions; the quotient."""
    return 2 * (1 + 2 * EXP_ULP) + 1.4 * int(a["k"]) + 1


def weighted_rows(a: Arrays) -> float:
    """A product, k additions, and the logistic of the shared expert."""
    return 1 + int(a["k"]) + LOGISTIC


def up_gain(a: Arrays) -> float:
    """silu underflows, `up` enlarges."""
    return max(1.0, float(np.abs(a["gate_up"]).max(initial=0)))


def x_gain(a: Arrays) -> float:
    """The logistic underflows, `x` enlarges."""
    return max(1.0, float(np.abs(a["x"]).max(initial=0)))


# Roundings of single elements, sums left out (compare.TwiceReference). A matrix: a product and the last addition.
NORM = 6  # mean + eps (halved by the root), root, quotient; x * scale, 1 + w, product
DELTA_STEP = 3 * 2 + 2 * EXP_ULP  # of one token: decay, two products and sums, beta
SOFTMAX = 4 + 2 * EXP_ULP  # scale, difference, product, quotient
SWIGLU = 1 + SILU
MATRIX = 2
GATED_DELTA_NET = GATES + SILU + NORM + DELTA_STEP + NORM + SILU + 2 * MATRIX  # convolution, l2 norm, gated norm
GATED_ATTENTION = NORM + 3 + SOFTMAX + LOGISTIC + 1 + 2 * MATRIX  # norm of q and k, rope (3), output gate
DENSE = SWIGLU + 3 * MATRIX
FEED_FORWARD = DENSE + SOFTMAX + LOGISTIC  # router, gate of the shared expert


def decoder_chain(a: Arrays) -> float:
    """Two additions a layer in the residual stream; then at most one mixer, into a state, or norm and head."""
    layers = 1 + max(int(name.split(".")[1]) for name in a if name.startswith("layers."))
    return 2 * layers + GATED_DELTA_NET


def score_softmax(a: Arrays) -> float:
    """The scale's product and the difference from the maximum round a score s by u |s| each, which exp makes relative;
    then exp, the product with the value, and the quotient."""
    largest = 0.0
    for keys in _cached(a, "k"):
        keys = np.repeat(keys, a["q"].shape[1] // keys.shape[1], axis=1)
        scores = np.einsum("thd,shd->hts", a["q"], keys, dtype=np.float64) * float(a["scale"])
        largest = max(largest, np.abs(scores).max())
    return 2 * largest + 2 * EXP_ULP + 2


def _cached(a: Arrays, name: str) -> list[np.ndarray]:
    """Keys or values [S, HKV, D] as each format stands for them."""
    head_dim, found = a["q"].shape[2], []
    for format in _formats(head_dim):
        rows = a[f"{format}.{name}"]
        cache = KVPages(rows.shape[1], len(rows), head_dim, format)
        cache.reserve(len(rows))
        _fill(cache.keys, rows)
        found.append(cache.filled(len(rows))[0])
    return found


def cached_size(a: Arrays) -> float:
    """Largest value in any format, which may cancel."""
    return max(float(np.abs(values).max()) for values in _cached(a, "v"))


def value_size(a: Arrays) -> float:
    """Largest number that goes into sums of values, which may cancel."""
    return max(float(np.abs(a[name]).max(initial=0)) for name in ("v", "state") if name in a)


def read_size(a: Arrays) -> float:
    """The same, read out of a state through q."""
    return value_size(a) * float(np.sqrt(np.square(a["q"]).sum(-1)).max())


_MATMUL = All(Rounding(block_sum, block_gain), isums=Exact())
_GROUPED = Rounding(block_sum, block_gain)
_DELTA_RULE = All(o=TwiceReference(DELTA_STEP, read_size), state=TwiceReference(DELTA_STEP, value_size))

def _kernel(name: str, compute: Compute, compare: Rule) -> Stage:
    return Stage(name, name, compute, compare)


STAGES = (
    #       name               candidate                            compare
    _kernel("exp_f32",         _map("exp_f32"),                     Ulp(EXP_ULP)),
    _kernel("log1p_f32",       _map("log1p_f32"),                   Ulp(LOG1P_ULP)),
    _kernel("sin_f32",         _map("sin_f32"),                     Ulp(SIN_ULP)),
    _kernel("cos_f32",         _map("cos_f32"),                     Ulp(COS_ULP)),
    Stage("q4_0_quantize",     None, _quantize("q4_0"),             Exact()),
    Stage("q8_0_quantize",     None, _quantize("q8_0"),             Exact()),
    Stage("f16_quantize",      None, _quantize("f16"),              Exact()),
    _kernel("quantize_q8_0",   _quantize_q8_0,                      Exact()),
    _kernel("gemv_q4_0_q8_0",  _product("gemv_q4_0_q8_0", "q4_0"),  _MATMUL),
    _kernel("gemm_q4_0_q8_0",  _product("gemm_q4_0_q8_0", "q4_0"),  _MATMUL),
    _kernel("gemv_q8_0_q8_0",  _product("gemv_q8_0_q8_0", "q8_0"),  _MATMUL),
    _kernel("gemm_q8_0_q8_0",  _product("gemm_q8_0_q8_0", "q8_0"),  _MATMUL),
    _kernel("grouped_gemm_q4_0_q8_0", _grouped_product("q4_0"),     _GROUPED),
    _kernel("grouped_gemm_q8_0_q8_0", _grouped_product("q8_0"),     _GROUPED),
    _kernel("dequantize_q4_0", _dequantize("q4_0"),                 Exact()),
    _kernel("dequantize_q8_0", _dequantize("q8_0"),                 Exact()),
    _kernel("dequantize_f16",  _dequantize("f16"),                  Exact()),
    _kernel("gemm_f32",        _gemm_f32,                           Rounding(lane_dot, term_count)),
    _kernel("rms_norm",        _rms_norm,                           TwiceReference(NORM)),
    _kernel("gated_rms_norm",  _gated_rms_norm,                     TwiceReference(NORM + SILU)),
    _kernel("l2_norm",         _l2_norm,                            TwiceReference(NORM)),
    _kernel("gdn_gates",       _gdn_gates,                          All(g=Rounding(GATES), beta=Rounding(LOGISTIC))),
    _kernel("conv1d_silu",     _conv1d_silu,                        All(y=Rounding(conv_silu), tail=Exact())),
    _kernel("gdn_recurrent",   _gdn_recurrent,                      _DELTA_RULE),
    _kernel("rope_tables",     _rope_tables,                        All(cos=Ulp(COS_ULP), sin=Ulp(SIN_ULP))),
    _kernel("rope",            _rope,                               Rounding(2)),
    _kernel("kv_append",       _kv_append,                          Exact()),
    _kernel("attention",       _attention,                          TwiceReference(score_softmax, cached_size)),
    _kernel("router_topk",     _router_topk,                        All(ids=Exact(), weights=Rounding(chosen_softmax))),
    _kernel("expert_rows",     _expert_rows,                        Exact()),
    _kernel("swiglu",          _swiglu,                             Rounding(SWIGLU, up_gain)),
    _kernel("sigmoid_mul",     _sigmoid_mul,                        Rounding(LOGISTIC + 1, x_gain)),
    _kernel("moe_combine",     _moe_combine,                        Rounding(weighted_rows)),
    _kernel("add",             _add,                                Exact()),
    Stage("gated_delta_net",   None, runs.gated_delta_net,          TwiceReference(GATED_DELTA_NET)),
    Stage("gated_attention",   None, runs.gated_attention,          TwiceReference(GATED_ATTENTION)),
    Stage("dense_mlp",         None, runs.dense_mlp,                TwiceReference(DENSE)),
    Stage("sparse_moe",        None, runs.sparse_moe,               All(TwiceReference(FEED_FORWARD), ids=Exact())),
    Stage("decoder",           None, runs.decoder,                  TwiceReference(decoder_chain)),
    Stage("decoder_q4_0",      None, runs.decoder_q4_0,             All(logits=Divergence(), digest=Exact())),
    Stage("snapshot_resume",   None, runs.resumed,                  Exact()),
    Stage("generate",          None, runs.greedy,                   Tokens()),
)


def find_stage(name: str) -> Stage:
    """The row called `name`. Raises KeyError."""
    return next(stage for stage in STAGES if stage.name == name)
