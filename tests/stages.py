"""THE STAGE TABLE, test half: reference, inputs and golden of each row of fermi_engine/stages/table.py.

The references stand in kernel_references.py, rows of sm_20 alone in gpu_stages.py and token_stages.py, rows above kernels in
model_stages.py and vision_stages.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from reference import vision
from tests import kernel_references as ref
from tests import strategies as draw
from tests.gpu_stages import GPU_ORACLES
from tests.model_stages import MODEL_ORACLES
from tests.oracle import Oracle, Reference
from tests.strategies import EDGES, edges, few, gaps, lengths
from tests.token_stages import TOKEN_ORACLES
from tests.vision_stages import GPU_KERNEL_ORACLES, KERNEL_ORACLES, VISION_ORACLES


def _maps(function: Callable[[Tensor], Tensor], reach: float) -> Oracle:
    kinds, reaches = st.sampled_from(("bits", "range", "powers")), st.sampled_from((1.0, 20.0, reach))
    return Oracle(draw.floats, {"count": st.integers(1, 700), "kind": kinds, "reach": reaches},
                  {"count": 2997, "kind": "all", "reach": reach}, ref.elementwise(function))


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
                  ref.product(format, single), ref.product_bound(format, single))


def _grouped_products(format: str) -> Oracle:
    sizes = {"experts": st.sampled_from((1, 2, 5, 9)), "rows": _matrix_rows, "blocks": st.integers(1, 4),
             "tokens": st.sampled_from((1, 2, 3, 9, 18)), "k": st.sampled_from((1, 2, 8)), "gap": st.sampled_from((0, 6, 64))}
    return Oracle(draw.grouped_product, {**sizes, "format": st.just(format), "edge": _scale_edges, "choice": _choices},
                  {"experts": 9, "rows": 13, "blocks": 3, "tokens": 4, "k": 2, "gap": 6, "format": format, "edge": "any scales",
                   "choice": "any"}, ref.grouped(format), ref.grouped_bound(format))


def _rows(format: str) -> Oracle:
    return Oracle(draw.picked_rows, {"rows": st.integers(1, 20), "blocks": few, "first": st.integers(0, 19),
                                     "format": st.just(format), "edge": st.sampled_from(("plain", "any scales"))},
                  {"rows": 11, "blocks": 3, "first": 5, "format": format, "edge": "any scales"}, ref.dequantize(format))


_ends = st.sampled_from((*EDGES, "zero block", "powers", "halves"))


def _block_rows(reference: Reference, edge: str) -> Oracle:
    return Oracle(draw.weight_rows, {"rows": st.integers(1, 20), "blocks": few, "edge": _ends},
                  {"rows": 13, "blocks": 3, "edge": edge}, reference)


_expert_counts = st.integers(1, 40) | st.sampled_from((128, 257, 512))
_head_dims = st.integers(1, 40) | st.sampled_from((32, 64, 96))
_delta_dims = st.integers(1, 20) | st.sampled_from((32, 33, 96))
_spread = st.sampled_from((1.0, 8.0, 40.0))

ORACLES: dict[str, Oracle] = {
    "exp_f32": _maps(torch.exp, 104.0),
    "log1p_f32": _maps(torch.log1p, 2.0**40),
    "sin_f32": _maps(torch.sin, 2.0**30),
    "cos_f32": _maps(torch.cos, 2.0**30),
    "gelu_tanh": _maps(vision.gelu_tanh, 16.0),
    "gelu_erf": _maps(vision.gelu_erf, 16.0),
    "q4_0_quantize": _block_rows(ref.quantize("q4_0"), "powers"),
    "q4_0_mse": Oracle(draw.weighted_rows, {"rows": st.integers(1, 2), "blocks": st.integers(1, 2), "edge": _ends},
                       {"rows": 5, "blocks": 3, "edge": "zero block"}, ref.quantize_mse),
    "q8_0_quantize": _block_rows(ref.quantize("q8_0"), "powers"),
    "f16_quantize": _block_rows(ref.quantize_f16, "powers"),
    "quantize_q8_0": _block_rows(ref.activation_blocks, "halves"),
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
        {"tokens": 5, "rows": 13, "n": 75, "column": 3, "edge": "plain"}, ref.lane_product, ref.lane_bound),
    "rms_norm": Oracle(
        draw.norm_rows, {"rows": few, "n": lengths, "extra": gaps, "offset": st.integers(0, 1), "edge": edges},
        {"rows": 3, "n": 1061, "extra": 3, "offset": 1, "edge": "zero row"}, ref.rms_norm),
    "layer_norm": KERNEL_ORACLES["layer_norm"],
    "gated_rms_norm": Oracle(
        draw.gated_norm_rows, {"rows": few, "n": lengths, "edge": edges, "spread": _spread},
        {"rows": 7, "n": 53, "edge": "zero row", "spread": 8.0}, ref.gated_rms_norm),
    "l2_norm": Oracle(
        draw.l2_heads, {"tokens": few, "heads": few, "n": lengths, "column": gaps, "extra": gaps, "edge": edges},
        {"tokens": 5, "heads": 3, "n": 37, "column": 5, "extra": 2, "edge": "small"}, ref.l2_norm),
    "gdn_gates": Oracle(
        draw.gate_inputs, {"tokens": few, "heads": st.integers(1, 20),
                           "edge": st.sampled_from(("plain", "no decay", "total decay", "infinite rate"))},
        {"tokens": 9, "heads": 13, "edge": "corners"}, ref.gates, ref.gates_bound),
    "conv1d_silu": Oracle(
        draw.conv_rows, {"tokens": st.integers(1, 9) | st.sampled_from((33, 70)), "channels": lengths,
                         "taps": st.sampled_from((1, 2, 3, 4, 16)), "edge": edges},
        {"tokens": 2, "channels": 83, "taps": 4, "edge": "plain"}, ref.conv, ref.conv_bound),
    "gdn_recurrent": Oracle(
        draw.delta_operands, {"tokens": st.integers(1, 9) | st.sampled_from((63, 64, 65)), "k_heads": st.integers(1, 3),
                              "ratio": st.integers(1, 3), "dk": _delta_dims, "dv": _delta_dims,
                              "column": gaps, "edge": st.sampled_from(("keep", "forget", *EDGES))},
        {"tokens": 65, "k_heads": 2, "ratio": 3, "dk": 19, "dv": 13, "column": 5, "edge": "plain"}, ref.delta_rule),
    "rope_tables": Oracle(
        draw.rope_positions, {"tokens": st.integers(1, 9), "half": lengths, "reach": st.sampled_from((9, 262144))},
        {"tokens": 11, "half": 29, "reach": 262144}, ref.rope_tables),
    "rope": Oracle(
        draw.rope_heads, {"tokens": few, "heads": few, "half": lengths, "extra": st.integers(0, 20), "edge": edges},
        {"tokens": 5, "heads": 3, "half": 11, "extra": 9, "edge": "plain"}, ref.rope, ref.rope_bound),
    "kv_append": Oracle(
        draw.cache_operands, {
            "start": st.integers(0, 9), "tokens": few, "kv_heads": st.integers(1, 3), "head_dim": _head_dims,
            "page_tokens": st.sampled_from((1, 4, 7, 64)),
            "edge": st.sampled_from(draw.CACHE_EDGES)},
        {"start": 5, "tokens": 9, "kv_heads": 2, "head_dim": 96, "page_tokens": 4, "edge": "all"}, ref.kv_append),
    "attention": Oracle(
        draw.attention_operands, {
            "past": st.integers(0, 9) | st.sampled_from((62, 63, 64, 65, 127, 128)), "tokens": few | st.just(17),
            "kv_heads": st.integers(1, 3), "group": st.integers(1, 4) | st.just(9), "head_dim": _head_dims,
            "page_tokens": st.sampled_from((1, 4, 7, 64, 100)), "edge": st.sampled_from(("sharp", "codes", *EDGES))},
        {"past": 66, "tokens": 5, "kv_heads": 2, "group": 3, "head_dim": 64, "page_tokens": 7, "edge": "small"},
        ref.attention),
    "full_attention": KERNEL_ORACLES["full_attention"],
    "router_topk": Oracle(
        draw.router_logits,
        {"tokens": few, "experts": _expert_counts, "k": st.sampled_from((1, 2, 8, 32)), "edge": edges},
        {"tokens": 33, "experts": 29, "k": 8, "edge": "ties"}, ref.route, ref.route_bound),
    "expert_rows": Oracle(
        draw.expert_choice, {"tokens": few | st.sampled_from((40, 200)), "experts": _expert_counts,
                             "k": st.sampled_from((1, 2, 8, 40)), "choice": _choices},
        {"tokens": 140, "experts": 29, "k": 4, "choice": "any"}, ref.expert_rows),
    "swiglu": Oracle(
        draw.gate_up, {"rows": few, "n": lengths, "edge": edges, "spread": _spread},
        {"rows": 5, "n": 53, "edge": "plain", "spread": 40.0}, ref.silu_times, ref.silu_bound),
    "sigmoid_mul": Oracle(
        draw.gated_rows, {"rows": few, "n": lengths, "column": gaps, "edge": edges, "spread": _spread},
        {"rows": 5, "n": 53, "column": 3, "edge": "plain", "spread": 40.0}, ref.times_logistic,
        lambda a: {"y": ref.flush(ref.times_logistic(a, torch.float64)["y"], a["x"].double())}),
    "moe_combine": Oracle(
        draw.expert_rows, {"tokens": few, "k": st.integers(1, 9), "n": lengths, "edge": edges},
        {"tokens": 7, "k": 5, "n": 37, "edge": "plain"}, ref.combine, ref.combine_bound),
    "add": Oracle(
        draw.sums, {"rows": few, "n": lengths, "edge": edges}, {"rows": 5, "n": 53, "edge": "outlier"}, ref.sum_of_two),
    "add_bias": KERNEL_ORACLES["add_bias"],
    "group_mean": KERNEL_ORACLES["group_mean"],
    **GPU_ORACLES,
    **TOKEN_ORACLES,
    **GPU_KERNEL_ORACLES,
    **MODEL_ORACLES,
    **VISION_ORACLES,
}
