"""References of the kernels' stages: functions of (inputs as tensors, dtype) built from reference/, and their bounds.

Sums and products that kernels.h specifies as single IEEE operations are done in float32 in the truth, too (marked so):
there is nothing to err about.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fermi_engine.compare import Arrays
from reference import attention as ref_attention
from reference import gated_delta_rule as gdn
from reference import moe, norms, quant
from reference import rope as ref_rope
from tests.oracle import Reference, Tensors, floats

# exp(-x) overflows above 88.7 and the logistic becomes 0, as if x e^-x were 0: an error of at most 89 * 2^-128, which
# one rounding (u = 2^-24) of this magnitude covers.
FLUSH = 2.0**-97


def flush(truth: Tensor, factor: Tensor) -> np.ndarray:
    return (truth.abs() + factor.abs() * FLUSH).numpy()


# Elementwise


def elementwise(function: Callable[[Tensor], Tensor]) -> Reference:
    return lambda a, dtype: {"y": function(a["x"].to(dtype))}


def silu_times(a: Tensors, dtype: torch.dtype) -> Tensors:
    gate, up = a["gate_up"].to(dtype).chunk(2, dim=-1)
    return {"y": torch.nn.functional.silu(gate) * up}


def silu_bound(a: Tensors) -> Arrays:
    up = a["gate_up"].double().chunk(2, dim=-1)[1]
    return {"y": flush(silu_times(a, torch.float64)["y"], up)}


def times_logistic(a: Tensors, dtype: torch.dtype) -> Tensors:
    x, gate = floats(a, dtype, "x", "gate")
    first = int(a["column"])
    return {"y": x * torch.sigmoid(gate[:, first : first + x.shape[1]])}


# Quantisation and matrices

_PACK = {"q4_0": (quant.quantize_q4_0, quant.pack_q4_0, quant.unpack_q4_0, quant.dequantize_q4_0),
         "q8_0": (quant.quantize_q8_0_weight, quant.pack_q8_0, quant.unpack_q8_0, quant.dequantize_q8_0)}


def quantize(format: str) -> Reference:
    quantize, pack, _, dequantize = _PACK[format]

    def reference(a: Tensors, dtype: torch.dtype) -> Tensors:
        codes, d = quantize(a["x"])
        return {"bytes": pack(codes, d), "values": dequantize(codes, d)}
    return reference


def quantize_mse(a: Tensors, dtype: torch.dtype) -> Tensors:
    """Over all halves."""
    (codes, d), weighted = quant.quantize_q4_0_mse(a["x"]), quant.quantize_q4_0_mse(a["x"], a["weight"])
    return {"bytes": quant.pack_q4_0(codes, d), "weighted": quant.pack_q4_0(*weighted),
            "values": quant.dequantize_q4_0(codes, d)}


def quantize_f16(a: Tensors, dtype: torch.dtype) -> Tensors:
    half = a["x"].to(torch.float16)
    return {"bytes": half.view(torch.uint8), "values": half.float()}


def weight_values(w: Tensor, format: str) -> Tensor:
    """float32 [rows, n] that plain bytes stand for; a float32 matrix as it is."""
    if format in ("f32", "f16"):
        return w if format == "f32" else w.view(torch.float16).float()
    return _PACK[format][3](*_PACK[format][2](w))


def dequantize(format: str) -> Reference:
    def reference(a: Tensors, dtype: torch.dtype) -> Tensors:
        rows = weight_values(a["w"], format)
        return {"rows": rows[int(a["first"]) :], "picked": rows[a["ids"].long()]}
    return reference


def activation_blocks(a: Tensors, dtype: torch.dtype) -> Tensors:
    codes, d = quant.quantize_activation(a["x"])
    return {"codes": codes, "d": d, "sums": codes.unflatten(1, (-1, 32)).sum(-1, dtype=torch.int32)}


def product(format: str, single: bool) -> Reference:
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


def product_bound(format: str, single: bool) -> Callable[[Tensors], Arrays]:
    def bounds(a: Tensors) -> Arrays:
        _, d = _PACK[format][2](a["w"])
        isums = product(format, False)(a, torch.float64)["isums"]
        y = _scaled(isums.abs(), d.abs(), a["d"], torch.float64).numpy()
        return {"y": y[: 1 if single else len(y)], "picked": y[a["source"].numpy()]}
    return bounds


def grouped(format: str) -> Reference:
    """Row j of the work against its expert: with the activations of its token, and with those of row j."""
    def reference(a: Tensors, dtype: torch.dtype) -> Tensors:
        products = [product(format, False)({**a, "w": w, "source": a["source"]}, dtype) for w in a["w"]]
        return _by_expert(a, torch.stack([product["y"] for product in products]))
    return reference


def grouped_bound(format: str) -> Callable[[Tensors], Arrays]:
    def bounds(a: Tensors) -> Arrays:
        products = [product_bound(format, False)({**a, "w": w})["y"] for w in a["w"]]
        return {name: y.numpy() for name, y in _by_expert(a, torch.from_numpy(np.stack(products))).items()}
    return bounds


def _by_expert(a: Tensors, y: Tensor) -> Tensors:
    """y [E, activation row, rows] -> the rows of the work [T * k, rows]."""
    hits, row = int(a["hits"]), torch.arange(len(a["source"]))
    expert = a["hit"][:hits].long().repeat_interleave(a["first"][: hits + 1].diff().long())
    return {"tokens": y[expert, a["source"].long()], "rows": y[expert, row]}


def lane_product(a: Tensors, dtype: torch.dtype) -> Tensors:
    x, w = floats(a, dtype, "x", "w")
    return _placed(a, quant.linear(x, w), 7.0)


def _placed(a: Tensors, y: Tensor, outside: float) -> Tensors:
    wide = torch.full((len(y), y.shape[1] + int(a["column"]) + 1), outside, dtype=y.dtype)
    wide[:, int(a["column"]) : -1] = y
    return {"y": y, "wide": wide}


def lane_bound(a: Tensors) -> Arrays:
    x, w = floats(a, torch.float64, "x", "w")
    return {name: bound.numpy() for name, bound in _placed(a, x.abs() @ w.abs().T, 0.0).items()}


# Norms


def rms_norm(a: Tensors, dtype: torch.dtype) -> Tensors:
    x, w = floats(a, dtype, "x", "w")
    return {"y": norms.rms_norm(x[:, : len(w)], w + (float(a["offset"]) - 1), float(a["eps"]))}


def gated_rms_norm(a: Tensors, dtype: torch.dtype) -> Tensors:
    return {"y": norms.gated_rms_norm(*floats(a, dtype, "o", "z", "w"), float(a["eps"]))}


def l2_norm(a: Tensors, dtype: torch.dtype) -> Tensors:
    heads, n, first = int(a["heads"]), int(a["n"]), int(a["column"])
    x = a["x"].to(dtype)[:, first : first + heads * n].unflatten(1, (heads, n))
    return {"y": norms.l2_norm(x, float(a["eps"])) * float(a["scale"])}


# Gated DeltaNet


def gates(a: Tensors, dtype: torch.dtype) -> Tensors:
    """a + dt_bias is one float32 sum. exp(A_log) ends at float32's largest number, in float64 too."""
    x, A_log = (a["a"] + a["dt_bias"]).to(dtype), a["A_log"].to(dtype)
    if dtype == torch.float64:
        A_log = A_log.clamp(max=math.log(torch.finfo(torch.float32).max))
    g, beta = gdn.gates(x, a["b"].to(dtype), A_log, torch.zeros_like(A_log))
    return {"g": g, "beta": beta}


def gates_bound(a: Tensors) -> Arrays:
    """Under 2^-126 softplus is subnormal: its error is that of a number of that size. beta: see FLUSH."""
    truth = gates(a, torch.float64)
    rate = a["A_log"].double().exp().clamp(max=torch.finfo(torch.float32).max)
    return {"g": torch.maximum(truth["g"].abs(), rate * 2.0**-126).numpy(),
            "beta": flush(truth["beta"], torch.ones(()))}


def conv(a: Tensors, dtype: torch.dtype) -> Tensors:
    y, _ = gdn.causal_conv_silu(a["x"].to(dtype), a["w"].T.to(dtype), a["tail"].to(dtype))
    return {"y": y, "tail": gdn.causal_conv_silu(a["x"], a["w"].T, a["tail"])[1]}


def conv_bound(a: Tensors) -> Arrays:
    known = torch.cat([a["tail"], a["x"]]).double().abs()
    w = a["w"].double().abs()
    terms = sum(w[j] * known[j : j + len(a["x"])] for j in range(len(w)))
    return {"y": flush(terms, torch.ones(()))}


def delta_values(a: Tensors, dtype: torch.dtype) -> Tensor:
    """v [T, HV, V] out of its wider rows."""
    heads, _, width = a["state"].shape
    return a["v"].to(dtype)[:, int(a["column"]) :][:, : heads * width].unflatten(1, (heads, width))


def delta_rule(a: Tensors, dtype: torch.dtype) -> Tensors:
    q, k, g, beta, state = floats(a, dtype, "q", "k", "g", "beta", "state")
    o, final = gdn.recurrent(q, k, delta_values(a, dtype), g, beta, state, 1.0)
    return {"o": o, "state": final}


# Attention


def rope_tables(a: Tensors, dtype: torch.dtype) -> Tensors:
    """The angle is one float32 product."""
    angle = a["positions"][a["axis"].long()].T.float() * a["inv_freq"]
    return {"cos": angle.to(dtype).cos(), "sin": angle.to(dtype).sin()}


def rope(a: Tensors, dtype: torch.dtype) -> Tensors:
    return {"x": ref_rope.rotate(*floats(a, dtype, "x", "cos", "sin"))}


def rope_bound(a: Tensors) -> Arrays:
    x, cos, sin = (t.abs() for t in floats(a, torch.float64, "x", "cos", "sin"))
    half = cos.shape[1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return {"x": torch.cat([first * cos + second * sin, second * cos + first * sin, 0 * rest], dim=-1).numpy()}


def _formats(a: Tensors, row: str) -> list[str]:
    return [format for format in ("f32", "f16", "q8_0") if row.format(format) in a]


def attention(a: Tensors, dtype: torch.dtype) -> Tensors:
    """Over the values that the stored bytes stand for."""
    out = {}
    for format in _formats(a, "{}.k"):
        k, v = (quant.decode_cache(a[f"{format}.{name}"], format).to(dtype) for name in ("k", "v"))
        out[format] = ref_attention.attend(a["q"].to(dtype), k, v)
    return out


def kv_append(a: Tensors, dtype: torch.dtype) -> Tensors:
    """Every byte of the pages; 0xa5 where nothing was appended."""
    out, size = {}, int(a["page_tokens"])
    for format in ("f32", "f16", "q8_0") if a["k"].shape[2] % 32 == 0 else ("f32", "f16"):
        for name in ("k", "v"):
            rows = quant.encode_cache(a[name], format)
            missing = rows.new_full((-len(rows) % size, *rows.shape[1:]), 0xA5)
            out[f"{format}.{name}"] = torch.cat([rows, missing]).unflatten(0, (-1, size)).transpose(1, 2).contiguous()
    return out


# Experts


def route(a: Tensors, dtype: torch.dtype) -> Tensors:
    ids, weights = moe.route(a["logits"].to(dtype), int(a["k"]))
    return {"ids": ids.int(), "weights": weights}


def route_bound(a: Tensors) -> Arrays:
    chosen = route(a, torch.float64)
    best = a["logits"].double().gather(1, chosen["ids"].long())
    return {"weights": (chosen["weights"] * (1 + best[:, :1] - best)).numpy()}


def expert_rows(a: Tensors, dtype: torch.dtype) -> Tensors:
    hit, first, source, row_of = (x.int() for x in moe.expert_rows(a["ids"]))
    return {"hit": hit, "first": first, "hits": torch.tensor([len(hit)], dtype=torch.int32), "source": source, "row_of": row_of}


def combine(a: Tensors, dtype: torch.dtype) -> Tensors:
    rows, weights, shared, gate = floats(a, dtype, "expert_out", "weights", "shared", "shared_gate")
    return {"y": (weights[..., None] * rows[a["row_of"].long()]).sum(1) + torch.sigmoid(gate) * shared}


def combine_bound(a: Tensors) -> Arrays:
    magnitudes = {name: value.abs() if name in ("expert_out", "shared") else value for name, value in a.items()}
    return {"y": flush(combine(magnitudes, torch.float64)["y"], a["shared"].double())}


def sum_of_two(a: Tensors, dtype: torch.dtype) -> Tensors:
    return {"y": a["a"] + a["b"]}
