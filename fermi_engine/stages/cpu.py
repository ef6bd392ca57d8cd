"""Candidates of the stage table on the CPU: every op of csrc/kernels.h over named arrays, as kernels.h names them.

Sizes and factors come as arrays without dimensions. Arrays that an op changes in place are copied first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fermi_engine.compare import Arrays
from fermi_engine.compression.scales import mse_q4_0
from fermi_engine.formats import FORMATS, Experts, Matrix
from fermi_engine.kernels.cpu import KV_FORMATS, CpuKernels, ExpertRows, Q8Rows
from fermi_engine.stages.runs import own
from fermi_engine.state import KVPages

Compute = Callable[[CpuKernels, Arrays], Arrays]
UNWRITTEN = 0xA5  # byte of a page before anything is appended
PAGE_TOKENS = 100  # no multiple of a block of attention


def elementwise(op: str) -> Compute:
    return lambda k, a: {"y": getattr(k, op)(a["x"])}


def quantize_q8_0(k: CpuKernels, a: Arrays) -> Arrays:
    return k.quantize_q8_0(a["x"])._asdict()


def _stored(k: CpuKernels, format: str, plain: np.ndarray) -> Matrix:
    """Plain rows uint8 [rows, bytes] as kernels read them."""
    row = FORMATS[format]
    return Matrix(format, len(plain), plain.shape[1] // row.block_bytes * row.block, own(k, row.interleave(plain)))


def product(op: str, format: str) -> Compute:
    """Of the activation rows in order (gemv: the first) with block dots, and of those that `source` names without."""
    def compute(k: CpuKernels, a: Arrays) -> Arrays:
        q, w = Q8Rows(a["codes"], a["d"], a["sums"]), _stored(k, format, a["w"])
        plain = Q8Rows(*(part[: 1 if "gemv" in op else None] for part in q))
        isums = k.empty((len(plain.codes), w.rows, q.d.shape[1]), np.int32)
        return {"isums": isums, "y": k.matmul_q8(op, plain, w, isums), "picked": k.matmul_q8(op, q, w, source=a["source"])}
    return compute


def grouped_product(format: str) -> Compute:
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


def dequantize(format: str) -> Compute:
    def compute(k: CpuKernels, a: Arrays) -> Arrays:
        w = _stored(k, format, a["w"])
        return {"rows": k.dequantize(w, int(a["first"])), "picked": k.dequantize(w, ids=a["ids"])}
    return compute


def gemm_f32(k: CpuKernels, a: Arrays) -> Arrays:
    """Also into the columns from `column` on of a wider result, whose other columns stay 7."""
    wide = k.empty((len(a["x"]), len(a["w"]) + int(a["column"]) + 1))
    wide[...] = 7
    return {"y": k.gemm_f32(a["x"], a["w"]), "wide": k.gemm_f32(a["x"], a["w"], wide, int(a["column"]))}


def rms_norm(k: CpuKernels, a: Arrays) -> Arrays:
    return {"y": k.rms_norm(a["x"], a["w"], float(a["eps"]), float(a["offset"]))}


def layer_norm(k: CpuKernels, a: Arrays) -> Arrays:
    return {"y": k.layer_norm(a["x"], a["w"], a["b"], float(a["eps"]))}


def gated_rms_norm(k: CpuKernels, a: Arrays) -> Arrays:
    return {"y": k.gated_rms_norm(a["o"], a["z"], a["w"], float(a["eps"]))}


def l2_norm(k: CpuKernels, a: Arrays) -> Arrays:
    return {"y": k.l2_norm(a["x"], int(a["column"]), int(a["heads"]), int(a["n"]), float(a["eps"]), float(a["scale"]))}


def gdn_gates(k: CpuKernels, a: Arrays) -> Arrays:
    g, beta = k.gdn_gates(a["a"], a["b"], a["A_log"], a["dt_bias"])
    return {"g": g, "beta": beta}


def conv1d_silu(k: CpuKernels, a: Arrays) -> Arrays:
    tail = own(k, a["tail"])
    return {"y": k.conv1d_silu(a["x"], a["w"], tail), "tail": tail}


def gdn_recurrent(k: CpuKernels, a: Arrays) -> Arrays:
    state = own(k, a["state"])
    o = k.gdn_recurrent(a["q"], a["k"], a["v"], int(a["column"]), a["g"], a["beta"], state)
    return {"o": o, "state": state}


def rope_tables(k: CpuKernels, a: Arrays) -> Arrays:
    cos, sin = k.rope_tables(a["positions"], a["inv_freq"], a["axis"])
    return {"cos": cos, "sin": sin}


def rope(k: CpuKernels, a: Arrays) -> Arrays:
    return {"x": k.rope(own(k, a["x"]), a["cos"], a["sin"])}


def _cache(k: CpuKernels, format: str, length: int, kv_heads: int, head_dim: int, page_tokens: int) -> KVPages:
    """Pages for `length` positions, as they come from the kernels."""
    dtype = np.float32 if format == "f32" else np.float16

    def allocate(shape: tuple[int, ...]) -> np.ndarray:
        return k.empty((*shape[:-1], shape[-1] // np.dtype(dtype).itemsize), dtype).view(np.uint8)

    cache = KVPages(kv_heads, page_tokens, head_dim, format, allocate)
    cache.reserve(length)
    return cache


def kv_append(k: CpuKernels, a: Arrays) -> Arrays:
    """k and v [start + T, HKV, D], the first `start` in a call of their own, into pages that hold bytes 0xa5 -> all bytes of
    all pages, for each format."""
    out, length, start = {}, len(a["k"]), int(a["start"])
    for format in cache_formats(a["k"].shape[2]):
        cache = _cache(k, format, length, *a["k"].shape[1:], int(a["page_tokens"]))
        for page in (*cache.keys, *cache.values):
            page[...] = UNWRITTEN
        for begin, end in ((0, start), (start, length)):
            if begin < end:
                k.kv_append(cache, np.array([begin], np.int64), a["k"][begin:end], a["v"][begin:end])
        out |= {f"{format}.k": np.stack(cache.keys), f"{format}.v": np.stack(cache.values)}
    return out


def cache_formats(head_dim: int) -> tuple[str, ...]:
    return KV_FORMATS if head_dim % 32 == 0 else KV_FORMATS[:2]


def given_formats(a: Arrays) -> list[str]:
    return [format for format in KV_FORMATS if f"{format}.k" in a]


def attention(k: CpuKernels, a: Arrays) -> Arrays:
    """`<format>.k` and `<format>.v` [start + T, HKV, row bytes] of some formats, in pages of `page_tokens` or, where there is no
    such input, PAGE_TOKENS, whose rest is left as it comes -> o under the format's name."""
    tokens, _, head_dim = a["q"].shape
    out = {}
    for format in given_formats(a):
        rows = [a[f"{format}.{name}"] for name in ("k", "v")]
        length, kv_heads, _ = rows[0].shape
        cache = _cache(k, format, length, kv_heads, head_dim, int(a.get("page_tokens", PAGE_TOKENS)))
        for part, pages in zip(rows, (cache.keys, cache.values), strict=True):
            fill_pages(pages, part)
        out[format] = k.attention(a["q"], cache, np.array([length - tokens], np.int64), float(a["scale"]))
    return out


def fill_pages(pages: list[np.ndarray], rows: np.ndarray) -> None:
    step = pages[0].shape[1]
    for page, first in zip(pages, range(0, len(rows), step), strict=True):
        part = rows[first:first + step].transpose(1, 0, 2)
        page[:, :part.shape[1]] = part


def router_topk(k: CpuKernels, a: Arrays) -> Arrays:
    ids, weights = k.router_topk(a["logits"], int(a["k"]))
    return {"ids": ids, "weights": weights}


def expert_rows(k: CpuKernels, a: Arrays) -> Arrays:
    """The work list; hit and first as far as there are hits."""
    work = k.expert_rows(a["ids"], int(a["experts"]))
    hits = int(work.hits[0])
    return work._replace(hit=work.hit[:hits], first=work.first[: hits + 1])._asdict()


def swiglu(k: CpuKernels, a: Arrays) -> Arrays:
    return {"y": k.swiglu(a["gate_up"])}


def sigmoid_mul(k: CpuKernels, a: Arrays) -> Arrays:
    return {"y": k.sigmoid_mul(a["x"], a["gate"], int(a["column"]))}


def moe_combine(k: CpuKernels, a: Arrays) -> Arrays:
    return {"y": k.moe_combine(a["expert_out"], a["row_of"], a["weights"], a["shared"], a["shared_gate"])}


def add(k: CpuKernels, a: Arrays) -> Arrays:
    return {"y": k.add(a["a"], a["b"])}


def quantize(format: str) -> Compute:
    """Weights to plain bytes, through the interleaved layout and back, and the values that they stand for."""
    def compute(k: CpuKernels, a: Arrays) -> Arrays:
        matrix = Matrix.from_f32(a["x"], format)
        return {"bytes": matrix.plain(), "values": matrix.dequantize()}
    return compute


def full_attention(k: CpuKernels, a: Arrays) -> Arrays:
    return {"o": k.full_attention(a["q"], a["k"], a["v"], int(a["window"]), float(a["scale"]))}


def add_bias(k: CpuKernels, a: Arrays) -> Arrays:
    return {"x": k.add_bias(own(k, a["x"]), a["b"])}


def group_mean(k: CpuKernels, a: Arrays) -> Arrays:
    return {"y": k.group_mean(a["x"], int(a["group"]))}


def quantize_mse(k: CpuKernels, a: Arrays) -> Arrays:
    """The scales of least error, and the same under weights."""
    plain = [mse_q4_0(a["x"], weight, k.threads) for weight in (None, a["weight"])]
    return {"bytes": plain[0], "weighted": plain[1], "values": FORMATS["q4_0"].dequantize(plain[0])}
