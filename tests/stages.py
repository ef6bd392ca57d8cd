"""THE STAGE TABLE, test half: reference, inputs and golden of each row of fermi_engine/stages.py.

Sums and products that kernels.h specifies as single IEEE operations are done in float32 in the truth, too (marked so):
there is nothing to err about. The rows above kernels stand in model_stages.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from fermi_engine.compare import Arrays
from reference import attention, moe, norms, quant, rope
from reference import gated_delta_rule as gdn
from tests import strategies as draw
from tests.model_stages import MODEL_ORACLES
from tests.oracle import Oracle, Reference, Tensors, floats
from tests.strategies import EDGES, edges, few, gaps, lengths

# exp(-x) overflows above 88.7 and the logistic becomes 0, as if x e^-x were 0: an error of at most 89 * 2^-128, which
# one rounding (u = 2^-24) of this magnitude covers.
FLUSH = 2.0**-97


def _flush(truth: Tensor, factor: Tensor) -> np.ndarray:
    return (truth.abs() + factor.abs() * FLUSH).numpy()


# Elementwise


def _map(function: Callable[[Tensor], Tensor]) -> Reference:
    return lambda a, dtype: {"y": function(a["x"].to(dtype))}


def _maps(function: Callable[[Tensor], Tensor], reach: float) -> Oracle:
    kinds, reaches = st.sampled_from(("bits", "range", "powers")), st.sampled_from((1.0, 20.0, reach))
    return Oracle(draw.floats, {"count": st.integers(1, 700), "kind": kinds, "reach": reaches},
                  {"count": 2997, "kind": "all", "reach": reach}, _map(function))


def _silu_times(a: Tensors, dtype: torch.dtype) -> Tensors:
    gate, up = a["gate_up"].to(dtype).chunk(2, dim=-1)
    return {"y": torch.nn.functional.silu(gate) * up}


def _silu_bound(a: Tensors) -> Arrays:
    up = a["gate_up"].double().chunk(2, dim=-1)[1]
    return {"y": _flush(_silu_times(a, torch.float64)["y"], up)}


def _times_logistic(a: Tensors, dtype: torch.dtype) -> Tensors:
    x, gate = floats(a, dtype, "x", "gate")
    first = int(a["column"])
    return {"y": x * torch.sigmoid(gate[:, first : first + x.shape[1]])}


# Quantisation and matrices

_PACK = {"q4_0": (quant.quantize_q4_0, quant.pack_q4_0, quant.unpack_q4_0, quant.dequantize_q4_0),
         "q8_0": (quant.quantize_q8_0_weight, quant.pack_q8_0, quant.unpack_q8_0, quant.dequantize_q8_0)}


def _quantize(format: str) -> Reference:
    quantize, pack, _, dequantize = _PACK[format]

    def reference(a: Tensors, dtype: torch.dtype) -> Tensors:
        codes, d = quantize(a["x"])
        return {"bytes": pack(codes, d), "values": dequantize(codes, d)}
    return reference


def _quantize_f16(a: Tensors, dtype: torch.dtype) -> Tensors:
    half = a["x"].to(torch.float16)
    return {"bytes": half.view(torch.uint8), "values": half.float()}


def _dequantize(format: str) -> Reference:
    def reference(a: Tensors, dtype: torch.dtype) -> Tensors:
        rows = a["w"].view(torch.float16).float() if format == "f16" else _PACK[format][3](*_PACK[format][2](a["w"]))
        return {"rows": rows[int(a["first"]) :], "picked": rows[a["ids"].long()]}
    return reference


def _activation_blocks(a: Tensors, dtype: torch.dtype) -> Tensors:
    codes, d = quant.quantize_activation(a["x"])
    return {"codes": codes, "d": d, "sums": codes.unflatten(1, (-1, 32)).sum(-1, dtype=torch.int32)}


def _product(format: str, single: bool) -> Reference:
    dot = quant.dot_q4_0_q8_0 if format == "q4_0" else quant.dot_q8_0_q8_0

    def reference(a: Tensors, dtype: torch.dtype) -> Tensors:
        codes, d = _PACK[format][2](a["w"])
        isums, y = dot(codes, d, a["codes"], a["d"])
        y = y if dtype == torch.float64 else _scaled(isums, d, a["d"], dtype)
        rows = 1 if single else len(y)
        return {"isums": isums[:rows], "y": y[:rows], "picked": y[a["source"].long()]}
    return reference


def _scaled(isums: Tensor, wd: Tensor, ad: Tensor, dtype: torch.dtype) -> Tensor:
    return (isums.to(dtype) * (wd.to(dtype) * ad.to(dtype)[:, None])).sum(-1)


def _product_bound(format: str, single: bool) -> Callable[[Tensors], Arrays]:
    def bounds(a: Tensors) -> Arrays:
        _, d = _PACK[format][2](a["w"])
        isums = _product(format, False)(a, torch.float64)["isums"]
        y = _scaled(isums.abs(), d.abs(), a["d"], torch.float64).numpy()
        return {"y": y[: 1 if single else len(y)], "picked": y[a["source"].numpy()]}
    return bounds


def _grouped(format: str) -> Reference:
    """Row j of the work against its expert: with the activations of its token, and with those of row j."""
    def reference(a: Tensors, dtype: torch.dtype) -> Tensors:
        products = [_product(format, False)({**a, "w": w, "source": a["source"]}, dtype) for w in a["w"]]
        return _by_expert(a, torch.stack([product["y"] for product in products]))
    return reference


def _grouped_bound(format: str) -> Callable[[Tensors], Arrays]:
    def bounds(a: Tensors) -> Arrays:
        products = [_product_bound(format, False)({**a, "w": w})["y"] for w in a["w"]]
        return {name: y.numpy() for name, y in _by_expert(a, torch.from_numpy(np.stack(products))).items()}
    return bounds


def _by_expert(a: Tensors, y: Tensor) -> Tensors:
    """y [E, activation row, rows] -> the rows of the work [T * k, rows]."""
    hits, row = int(a["hits"]), torch.arange(len(a["source"]))
    expert = a["hit"][:hits].long().repeat_interleave(a["first"][: hits + 1].diff().long())
    return {"tokens": y[expert, a["source"].long()], "rows": y[expert, row]}


_matrix_rows = st.sampled_from((1, 7, 8, 9)) | st.integers(1, 40)
_token_counts = st.sampled_from((1, 2, 3, 4, 5, 8, 9, 16, 17, 35))  # round tiles of 4 and 16
_block_counts = st.sampled_from((*range(1, 10), 131))  # and what of a row fits the buffers at a time
_scale_edges = st.sampled_from(("plain", "highest", "lowest", "zero scales", "any scales"))
_choices = st.sampled_from(("any", "same", "last"))


def _products(format: str, single: bool) -> Oracle:
    sizes = {"rows": _matrix_rows, "blocks": _block_counts, "tokens": few if single else _token_counts,
             "picks": st.just(1) if single else _token_counts}
    return Oracle(draw.product, {**sizes, "format": st.just(format), "edge": _scale_edges},
                  {"rows": 43, "blocks": 35, "tokens": 3 if single else 19, "picks": 1 if single else 5, "format": format,
                   "edge": "any scales"},
                  _product(format, single), _product_bound(format, single))


def _grouped_products(format: str) -> Oracle:
    sizes = {"experts": st.sampled_from((1, 2, 5, 9)), "rows": _matrix_rows, "blocks": st.integers(1, 4),
             "tokens": st.sampled_from((1, 2, 3, 9, 18)), "k": st.sampled_from((1, 2, 8)), "gap": st.sampled_from((0, 6, 64))}
    return Oracle(draw.grouped_product, {**sizes, "format": st.just(format), "edge": _scale_edges, "choice": _choices},
                  {"experts": 9, "rows": 13, "blocks": 3, "tokens": 4, "k": 2, "gap": 6, "format": format, "edge": "any scales",
                   "choice": "any"}, _grouped(format), _grouped_bound(format))


def _rows(format: str) -> Oracle:
    return Oracle(draw.picked_rows, {"rows": st.integers(1, 20), "blocks": few, "first": st.integers(0, 19),
                                     "format": st.just(format), "edge": st.sampled_from(("plain", "any scales"))},
                  {"rows": 11, "blocks": 3, "first": 5, "format": format, "edge": "any scales"}, _dequantize(format))


def _block_rows(reference: Reference, edge: str) -> Oracle:
    ends = st.sampled_from((*EDGES, "zero block", "powers", "halves"))
    return Oracle(draw.weight_rows, {"rows": st.integers(1, 20), "blocks": few, "edge": ends},
                  {"rows": 13, "blocks": 3, "edge": edge}, reference)


def _lane_product(a: Tensors, dtype: torch.dtype) -> Tensors:
    x, w = floats(a, dtype, "x", "w")
    return _placed(a, quant.linear(x, w), 7.0)


def _placed(a: Tensors, y: Tensor, outside: float) -> Tensors:
    wide = torch.full((len(y), y.shape[1] + int(a["column"]) + 1), outside, dtype=y.dtype)
    wide[:, int(a["column"]) : -1] = y
    return {"y": y, "wide": wide}


def _lane_bound(a: Tensors) -> Arrays:
    x, w = floats(a, torch.float64, "x", "w")
    return {name: bound.numpy() for name, bound in _placed(a, x.abs() @ w.abs().T, 0.0).items()}


# Norms


def _rms_norm(a: Tensors, dtype: torch.dtype) -> Tensors:
    x, w = floats(a, dtype, "x", "w")
    return {"y": norms.rms_norm(x[:, : len(w)], w + (float(a["offset"]) - 1), float(a["eps"]))}


def _gated_rms_norm(a: Tensors, dtype: torch.dtype) -> Tensors:
    return {"y": norms.gated_rms_norm(*floats(a, dtype, "o", "z", "w"), float(a["eps"]))}


def _l2_norm(a: Tensors, dtype: torch.dtype) -> Tensors:
    heads, n, first = int(a["heads"]), int(a["n"]), int(a["column"])
    x = a["x"].to(dtype)[:, first : first + heads * n].unflatten(1, (heads, n))
    return {"y": norms.l2_norm(x, float(a["eps"])) * float(a["scale"])}


# Gated DeltaNet


def _gates(a: Tensors, dtype: torch.dtype) -> Tensors:
    """a + dt_bias is one float32 sum. exp(A_log) ends at float32's largest number, in float64 too."""
    x, A_log = (a["a"] + a["dt_bias"]).to(dtype), a["A_log"].to(dtype)
    if dtype == torch.float64:
        A_log = A_log.clamp(max=math.log(torch.finfo(torch.float32).max))
    g, beta = gdn.gates(x, a["b"].to(dtype), A_log, torch.zeros_like(A_log))
    return {"g": g, "beta": beta}


def _gates_bound(a: Tensors) -> Arrays:
    """Under 2^-126 softplus is subnormal: its error is that of a number of that size. beta: see FLUSH."""
    truth = _gates(a, torch.float64)
    rate = a["A_log"].double().exp().clamp(max=torch.finfo(torch.float32).max)
    return {"g": torch.maximum(truth["g"].abs(), rate * 2.0**-126).numpy(),
            "beta": _flush(truth["beta"], torch.ones(()))}


def _conv(a: Tensors, dtype: torch.dtype) -> Tensors:
    y, _ = gdn.causal_conv_silu(a["x"].to(dtype), a["w"].T.to(dtype), a["tail"].to(dtype))
    return {"y": y, "tail": gdn.causal_conv_silu(a["x"], a["w"].T, a["tail"])[1]}


def _conv_bound(a: Tensors) -> Arrays:
    known = torch.cat([a["tail"], a["x"]]).double().abs()
    w = a["w"].double().abs()
    terms = sum(w[j] * known[j : j + len(a["x"])] for j in range(len(w)))
    return {"y": _flush(terms, torch.ones(()))}


def _delta_rule(a: Tensors, dtype: torch.dtype) -> Tensors:
    q, k, v, g, beta, state = floats(a, dtype, "q", "k", "v", "g", "beta", "state")
    heads, _, width = state.shape
    v = v[:, int(a["column"]) :][:, : heads * width].unflatten(1, (heads, width))
    o, final = gdn.recurrent(q, k, v, g, beta, state, 1.0)
    return {"o": o, "state": final}


# Attention


def _rope_tables(a: Tensors, dtype: torch.dtype) -> Tensors:
    """The angle is one float32 product."""
    angle = a["positions"][a["axis"].long()].T.float() * a["inv_freq"]
    return {"cos": angle.to(dtype).cos(), "sin": angle.to(dtype).sin()}


def _rope(a: Tensors, dtype: torch.dtype) -> Tensors:
    return {"x": rope.rotate(*floats(a, dtype, "x", "cos", "sin"))}


def _rope_bound(a: Tensors) -> Arrays:
    x, cos, sin = (t.abs() for t in floats(a, torch.float64, "x", "cos", "sin"))
    half = cos.shape[1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return {"x": torch.cat([first * cos + second * sin, second * cos + first * sin, 0 * rest], dim=-1).numpy()}


def _formats(a: Tensors, row: str) -> list[str]:
    return [format for format in ("f32", "f16", "q8_0") if row.format(format) in a]


def _attention(a: Tensors, dtype: torch.dtype) -> Tensors:
    """Over the values that the stored bytes stand for."""
    out = {}
    for format in _formats(a, "{}.k"):
        k, v = (quant.decode_cache(a[f"{format}.{name}"], format).to(dtype) for name in ("k", "v"))
        out[format] = attention.attend(a["q"].to(dtype), k, v)
    return out


def _kv_append(a: Tensors, dtype: torch.dtype) -> Tensors:
    """Every byte of the pages; 0xa5 where nothing was appended."""
    out, size = {}, int(a["page_tokens"])
    for format in ("f32", "f16", "q8_0") if a["k"].shape[2] % 32 == 0 else ("f32", "f16"):
        for name in ("k", "v"):
            rows = quant.encode_cache(a[name], format)
            missing = rows.new_full((-len(rows) % size, *rows.shape[1:]), 0xA5)
            out[f"{format}.{name}"] = torch.cat([rows, missing]).unflatten(0, (-1, size)).transpose(1, 2).contiguous()
    return out


# Experts


def _route(a: Tensors, dtype: torch.dtype) -> Tensors:
    ids, weights = moe.route(a["logits"].to(dtype), int(a["k"]))
    return {"ids": ids.int(), "weights": weights}


def _route_bound(a: Tensors) -> Arrays:
    chosen = _route(a, torch.float64)
    best = a["logits"].double().gather(1, chosen["ids"].long())
    return {"weights": (chosen["weights"] * (1 + best[:, :1] - best)).numpy()}


def _expert_rows(a: Tensors, dtype: torch.dtype) -> Tensors:
    hit, first, source, row_of = (x.int() for x in moe.expert_rows(a["ids"]))
    return {"hit": hit, "first": first, "hits": torch.tensor([len(hit)], dtype=torch.int32), "source": source, "row_of": row_of}


def _combine(a: Tensors, dtype: torch.dtype) -> Tensors:
    rows, weights, shared, gate = floats(a, dtype, "expert_out", "weights", "shared", "shared_gate")
    return {"y": (weights[..., None] * rows[a["row_of"].long()]).sum(1) + torch.sigmoid(gate) * shared}


def _combine_bound(a: Tensors) -> Arrays:
    magnitudes = {name: value.abs() if name in ("expert_out", "shared") else value for name, value in a.items()}
    return {"y": _flush(_combine(magnitudes, torch.float64)["y"], a["shared"].double())}


def _sum(a: Tensors, dtype: torch.dtype) -> Tensors:
    return {"y": a["a"] + a["b"]}


_head_dims = st.integers(1, 40) | st.sampled_from((32, 64, 96))
_spread = st.sampled_from((1.0, 8.0, 40.0))

ORACLES: dict[str, Oracle] = {
    "exp_f32": _maps(torch.exp, 104.0),
    "log1p_f32": _maps(torch.log1p, 2.0**40),
    "sin_f32": _maps(torch.sin, 2.0**30),
    "cos_f32": _maps(torch.cos, 2.0**30),
    "q4_0_quantize": _block_rows(_quantize("q4_0"), "powers"),
    "q8_0_quantize": _block_rows(_quantize("q8_0"), "powers"),
    "f16_quantize": _block_rows(_quantize_f16, "powers"),
    "quantize_q8_0": _block_rows(_activation_blocks, "halves"),
    "gemv_q4_0_q8_0": _products("q4_0", single=True),
    "gemm_q4_0_q8_0": _products("q4_0", single=False),
    "gemv_q8_0_q8_0": _products("q8_0", single=True),
    "gemm_q8_0_q8_0": _products("q8_0", single=False),
    "grouped_gemm_q4_0_q8_0": _grouped_products("q4_0"),
    "grouped_gemm_q8_0_q8_0": _grouped_products("q8_0"),
    "dequantize_q4_0": _rows("q4_0"),
    "dequantize_q8_0": _rows("q8_0"),
    "dequantize_f16": _rows("f16"),
    "gemm_f32": Oracle(
        draw.rows_and_matrix, {"tokens": st.integers(1, 9), "rows": st.integers(1, 40), "n": lengths,
                               "column": gaps, "edge": edges},
        {"tokens": 5, "rows": 13, "n": 75, "column": 3, "edge": "plain"}, _lane_product, _lane_bound),
    "rms_norm": Oracle(
        draw.norm_rows, {"rows": few, "n": lengths, "extra": gaps, "offset": st.integers(0, 1), "edge": edges},
        {"rows": 7, "n": 77, "extra": 3, "offset": 1, "edge": "zero row"}, _rms_norm),
    "gated_rms_norm": Oracle(
        draw.gated_norm_rows, {"rows": few, "n": lengths, "edge": edges, "spread": _spread},
        {"rows": 7, "n": 53, "edge": "zero row", "spread": 8.0}, _gated_rms_norm),
    "l2_norm": Oracle(
        draw.l2_heads, {"tokens": few, "heads": few, "n": lengths, "column": gaps, "extra": gaps, "edge": edges},
        {"tokens": 5, "heads": 3, "n": 37, "column": 5, "extra": 2, "edge": "small"}, _l2_norm),
    "gdn_gates": Oracle(
        draw.gate_inputs, {"tokens": few, "heads": st.integers(1, 20),
                           "edge": st.sampled_from(("plain", "no decay", "total decay", "infinite rate"))},
        {"tokens": 9, "heads": 13, "edge": "corners"}, _gates, _gates_bound),
    "conv1d_silu": Oracle(
        draw.conv_rows, {"tokens": st.integers(1, 9), "channels": lengths, "taps": st.sampled_from((1, 2, 3, 4, 16)),
                         "edge": edges},
        {"tokens": 2, "channels": 83, "taps": 4, "edge": "plain"}, _conv, _conv_bound),
    "gdn_recurrent": Oracle(
        draw.delta_operands, {"tokens": st.integers(1, 9) | st.sampled_from((63, 64, 65)), "k_heads": st.integers(1, 3),
                              "ratio": st.integers(1, 3), "dk": st.integers(1, 20), "dv": st.integers(1, 20),
                              "column": gaps, "edge": st.sampled_from(("keep", "forget", *EDGES))},
        {"tokens": 65, "k_heads": 2, "ratio": 3, "dk": 19, "dv": 13, "column": 5, "edge": "plain"}, _delta_rule),
    "rope_tables": Oracle(
        draw.rope_positions, {"tokens": st.integers(1, 9), "half": lengths, "reach": st.sampled_from((9, 262144))},
        {"tokens": 11, "half": 29, "reach": 262144}, _rope_tables),
    "rope": Oracle(
        draw.rope_heads, {"tokens": few, "heads": few, "half": lengths, "extra": st.integers(0, 20), "edge": edges},
        {"tokens": 5, "heads": 3, "half": 11, "extra": 9, "edge": "plain"}, _rope, _rope_bound),
    "kv_append": Oracle(
        draw.cache_operands, {
            "start": st.integers(0, 9), "tokens": few, "kv_heads": st.integers(1, 3), "head_dim": _head_dims,
            "page_tokens": st.sampled_from((1, 4, 7, 64)),
            "edge": st.sampled_from(draw.CACHE_EDGES)},
        {"start": 5, "tokens": 9, "kv_heads": 2, "head_dim": 96, "page_tokens": 4, "edge": "all"}, _kv_append),
    "attention": Oracle(
        draw.attention_operands, {
            "past": st.integers(0, 9) | st.sampled_from((62, 63, 64, 65, 127, 128)), "tokens": few | st.just(17),
            "kv_heads": st.integers(1, 3), "group": st.integers(1, 4) | st.just(9), "head_dim": _head_dims,
            "page_tokens": st.sampled_from((1, 4, 7, 64, 100)), "edge": st.sampled_from(("sharp", "codes", *EDGES))},
        {"past": 66, "tokens": 5, "kv_heads": 2, "group": 3, "head_dim": 64, "page_tokens": 7, "edge": "small"},
        _attention),
    "router_topk": Oracle(
        draw.router_logits,
        {"tokens": few, "experts": st.integers(1, 40), "k": st.sampled_from((1, 2, 8, 40)), "edge": edges},
        {"tokens": 33, "experts": 29, "k": 8, "edge": "ties"}, _route, _route_bound),
    "expert_rows": Oracle(
        draw.expert_choice, {"tokens": few | st.just(40), "experts": st.integers(1, 40), "k": st.sampled_from((1, 2, 8, 40)),
                             "choice": _choices},
        {"tokens": 33, "experts": 29, "k": 4, "choice": "any"}, _expert_rows),
    "swiglu": Oracle(
        draw.gate_up, {"rows": few, "n": lengths, "edge": edges, "spread": _spread},
        {"rows": 5, "n": 53, "edge": "plain", "spread": 40.0}, _silu_times, _silu_bound),
    "sigmoid_mul": Oracle(
        draw.gated_rows, {"rows": few, "n": lengths, "column": gaps, "edge": edges, "spread": _spread},
        {"rows": 5, "n": 53, "column": 3, "edge": "plain", "spread": 40.0}, _times_logistic,
        lambda a: {"y": _flush(_times_logistic(a, torch.float64)["y"], a["x"].double())}),
    "moe_combine": Oracle(
        draw.expert_rows, {"tokens": few, "k": st.integers(1, 9), "n": lengths, "edge": edges},
        {"tokens": 7, "k": 5, "n": 37, "edge": "plain"}, _combine, _combine_bound),
    "add": Oracle(
        draw.sums, {"rows": few, "n": lengths, "edge": edges}, {"rows": 5, "n": 53, "edge": "outlier"}, _sum),
    **MODEL_ORACLES,
}
