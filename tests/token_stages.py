"""THE STAGE TABLE, test half: the rows of the sm_20 kernels of one token."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from fermi_engine.compare import Arrays
from reference import attention as ref_attention
from reference import gated_delta_rule as gdn
from reference import norms, rope
from tests import strategies as draw
from tests.kernel_references import FLUSH, weight_values
from tests.oracle import Oracle, Reference, Tensors, floats
from tests.strategies import Draws

EPS = 1e-6

# Inputs


def product_operands(d: Draws, rows: int, blocks: int, format: str, edge: str) -> Arrays:
    """A row of activations, a norm's weight, and two stored matrices alike; `edge` is that of the row where weights are
    floats, of the scales where they are not."""
    n = 32 * blocks
    x = d.signed_edge(edge, 1, n)[0] if format == "f32" else d.normal(n)
    w, w2 = (d.normal(rows, n) if format == "f32" else draw.stored_rows(d, rows, blocks, format, edge) for _ in range(2))
    return {"x": x, "norm": d.normal(n, scale=0.3), "w": w, "w2": w2, "before": d.normal(rows), "eps": draw.scalar(EPS)}


def delta_operands(d: Draws, k_heads: int, ratio: int, dk: int, dv: int, taps: int) -> Arrays:
    heads = k_heads * ratio
    channels = 2 * k_heads * dk + heads * dv
    return {"qkv": d.normal(channels), "z": d.normal(heads * dv), "a": d.normal(heads), "b": d.normal(heads),
            "weight": d.normal(taps, channels), "A_log": d.uniform(0, 2.5, heads), "dt_bias": d.uniform(-7, -2, heads),
            "norm": d.uniform(0.5, 1.5, dv), "tail": d.normal(taps - 1, channels), "state": d.normal(heads, dk, dv),
            "k_heads": draw.scalar(k_heads), "eps": draw.scalar(EPS), "scale": draw.scalar(dk**-0.5)}


def attention_operands(d: Draws, past: int, kv_heads: int, group: int, dim: int, half: int, spare: int) -> Arrays:
    """Sines of the cosines, so that turning a row leaves its length as it is."""
    heads, cos = kv_heads * group, d.uniform(-1, 1, half)
    return {"query_gate": d.normal(heads, 2 * dim), "key": d.normal(kv_heads, dim), "value": d.normal(kv_heads, dim),
            "q_norm": d.normal(dim, scale=0.3), "k_norm": d.normal(dim, scale=0.3), "past_k": d.normal(past, kv_heads, dim),
            "past_v": d.normal(past, kv_heads, dim), "cos": cos,
            "sin": np.sqrt(1 - np.square(cos, dtype=np.float64)).astype(np.float32), "eps": draw.scalar(EPS),
            "scale": draw.scalar(dim**-0.5), "spare": draw.scalar(spare)}


def choice_operands(d: Draws, count: int, kind: str) -> Arrays:
    x = {"plain": d.normal(count), "ties": np.round(d.normal(count)).astype(np.float32),
         "equal": np.zeros(count, np.float32), "lowest": np.full(count, -np.inf, np.float32),
         "holes": np.where(np.arange(count) % 3 == 0, np.nan, d.normal(count)).astype(np.float32),
         "nothing": np.full(count, np.nan, np.float32)}
    return {"x": x[kind]}


# References


def _products(a: Tensors, format: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The row, the same behind its norm, and both matrices."""
    x, norm = floats(a, dtype, "x", "norm")
    return (x, norms.rms_norm(x, norm, float(a["eps"])), *(weight_values(a[name], format).to(dtype) for name in ("w", "w2")))


def _product(format: str) -> Reference:
    def reference(a: Tensors, dtype: torch.dtype) -> Tensors:
        x, f, w, w2 = _products(a, format, dtype)
        before, plain, gate, up = a["before"].to(dtype), w @ x, w @ f, w2 @ f
        found = {"y": gate + before, "other": up + before, "swiglu": torch.nn.functional.silu(gate) * up, "plain": plain}
        return found if format == "f32" else {**found, "wide": plain}
    return reference


def _magnitudes(a: Tensors, format: str) -> Arrays:
    """Magnitudes of all terms. Of swiglu the product of both sums', each with what underflows in its terms, and where silu
    becomes 0: see FLUSH."""
    x, f, w, w2 = (values.abs() for values in _products(a, format, torch.float64))
    before, plain, below = a["before"].double().abs(), w @ x, len(x) * 2.0**-126
    gate, up = w @ f + below, w2 @ f + below
    found = {"y": w @ f + before, "other": w2 @ f + before, "swiglu": gate * up + up * FLUSH, "plain": plain, "wide": plain}
    return {name: bound.numpy() for name, bound in found.items() if name != "wide" or format != "f32"}


def _delta_token(a: Tensors, dtype: torch.dtype) -> Tensors:
    (heads, dk, dv), k_heads, eps = a["state"].shape, int(a["k_heads"]), float(a["eps"])
    y, _ = gdn.causal_conv_silu(a["qkv"][None].to(dtype), a["weight"].T.to(dtype), a["tail"].to(dtype))
    q, k, v = (part.unflatten(1, (-1, size)) for part, size in zip(
        y.split([k_heads * dk, k_heads * dk, heads * dv], dim=1), (dk, dk, dv), strict=True))
    g, beta = gdn.gates(*(x[None] for x in floats(a, dtype, "a", "b")), *floats(a, dtype, "A_log", "dt_bias"))
    q, k = norms.l2_norm(q, eps), norms.l2_norm(k, eps)
    o, state = gdn.recurrent(q, k, v, g, beta, a["state"].to(dtype), float(a["scale"]))
    gated = norms.gated_rms_norm(o[0], a["z"].to(dtype).unflatten(0, (heads, dv)), a["norm"].to(dtype), eps)
    return {"y": gated.flatten(), "state": state, "tail": torch.cat([a["tail"], a["qkv"][None]])[1:]}


def _attention(a: Tensors, dtype: torch.dtype) -> Tensors:
    dim, eps = a["key"].shape[1], float(a["eps"])
    cos, sin = a["cos"][None].to(dtype), a["sin"][None].to(dtype)
    query, gate = a["query_gate"].to(dtype).split(dim, dim=1)
    q, k = (rope.rotate(norms.rms_norm(x, a[name].to(dtype), eps)[None], cos, sin)
            for x, name in ((query, "q_norm"), (a["key"].to(dtype), "k_norm")))
    keys, values = torch.cat([a["past_k"].to(dtype), k]), torch.cat([a["past_v"], a["value"][None]]).to(dtype)
    return {"y": ref_attention.attend(q, keys, values)[0] * torch.sigmoid(gate), "k": k[0], "v": a["value"]}


def _choice(a: Tensors, dtype: torch.dtype) -> Tensors:
    """The first of the largest that are numbers."""
    numbers = (~a["x"].isnan()).nonzero().flatten().tolist()
    return {"index": torch.tensor([max(numbers, key=lambda i: (float(a["x"][i]), -i), default=-1)], dtype=torch.int32)}


# Rows

_EDGES = {"f32": ("plain", "zero row", "outlier", "ties"), "q4_0": ("plain", "highest", "lowest", "zero scales", "any scales")}
_dims = st.sampled_from((32, 64, 96, 128))


def _gemv(format: str, rows: int, blocks: int) -> Oracle:
    return Oracle(product_operands, {"rows": st.sampled_from((1, 7, 8, 33, 70)), "blocks": st.sampled_from((1, 2, 5, 16, 33)),
                                     "format": st.just(format),
                                     "edge": st.sampled_from(_EDGES.get(format, _EDGES["q4_0"]))},
                  {"rows": rows, "blocks": blocks, "format": format, "edge": "plain"}, _product(format),
                  lambda a: _magnitudes(a, format))


TOKEN_ORACLES: dict[str, Oracle] = {
    "token_gemv_f32": _gemv("f32", 11, 5),
    "token_gemv_q4_0": _gemv("q4_0", 41, 16),
    "token_gemv_q8_0": _gemv("q8_0", 41, 16),
    "gdn_token": Oracle(
        delta_operands, {"k_heads": st.integers(1, 2), "ratio": st.integers(1, 3), "dk": _dims, "dv": _dims,
                         "taps": st.sampled_from((1, 2, 4))},
        {"k_heads": 2, "ratio": 2, "dk": 32, "dv": 32, "taps": 4}, _delta_token),
    "token_attention": Oracle(
        attention_operands, {"past": st.sampled_from((0, 1, 63, 64, 65, 200)), "kv_heads": st.integers(1, 2),
                             "group": st.sampled_from((1, 3, 4, 9)), "dim": st.sampled_from((32, 96, 256)),
                             "half": st.sampled_from((1, 4, 16)), "spare": st.sampled_from((0, 1, 70))},
        {"past": 100, "kv_heads": 2, "group": 3, "dim": 32, "half": 4, "spare": 40}, _attention),
    "argmax": Oracle(
        choice_operands, {"count": st.sampled_from((1, 5, 300, 40_000)),
                          "kind": st.sampled_from(("plain", "ties", "equal", "lowest", "holes", "nothing"))},
        {"count": 3000, "kind": "ties"}, _choice),
}
