"""THE STAGE TABLE, test half: the rows of kernels that sm_20 alone has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from fermi_engine.compare import Arrays
from fermi_engine.kernels.gpu_kernels import LARGE_TILE, SMALL_TILE
from reference import gated_delta_rule as gdn
from tests import strategies as draw
from tests.kernel_references import attention, delta_rule, delta_values, weight_values
from tests.oracle import Oracle, Reference, Tensors, floats
from tests.strategies import Draws, edges, few, gaps

# Inputs


def float_product(d: Draws, tokens: int, rows: int, blocks: int, picks: int, column: int, format: str, edge: str) -> Arrays:
    """float32 activations and a stored matrix, whose scales are as `edge` says; for a float32 one it is the activations'."""
    n = 32 * blocks
    if format == "f32":
        x, w = d.signed_edge(edge, tokens, n), d.normal(rows, n)
    else:
        x, w = d.normal(tokens, n), draw.stored_rows(d, rows, blocks, format, edge)
    return {"x": x, "w": w, "source": d.integers(0, tokens, picks).astype(np.int32), "column": draw.scalar(column)}


def grouped_operands(
    d: Draws, experts: int, rows: int, blocks: int, tokens: int, k: int, gap: int, format: str, edge: str, choice: str,
) -> Arrays:
    """Stored experts, float32 rows for every (token, slot), and the work list of a choice of experts."""
    k = min(k, experts)
    work = draw.work_list(draw.chosen_experts(d, tokens, experts, k, choice), experts)
    w = draw.stored_rows(d, experts * rows, blocks, format, edge).reshape(experts, rows, -1)
    return {"x": d.normal(tokens * k, 32 * blocks), "w": w, "gap": draw.scalar(gap), **work}


def tile_operands(d: Draws, hits: int, most: int) -> Arrays:
    """First rows of hits that have 1..most each."""
    first = np.append(0, np.cumsum(d.integers(1, most + 1, hits)))
    return {"first": first.astype(np.int32), "hits": np.array([hits], np.int32)}


def float_rows(d: Draws, rows: int, n: int, first: int) -> Arrays:
    return {"w": d.normal(rows, n), "first": draw.scalar(first % rows),
            "ids": d.integers(0, rows, 1 + rows // 2).astype(np.int32)}


def long_attention(d: Draws, edge: str, **sizes: int) -> Arrays:
    """Keys and values of more than one block of 128 positions, or of more than one span of 1024, float32 only. 'rising' and
    'falling': a block's largest score is more than 88 above or below those of the blocks before it."""
    slopes = {"rising": (0, 100), "falling": (100, 0)}
    arrays = draw.attention_operands(d, page_tokens=64, edge="plain" if edge in slopes else edge, **sizes)
    if edge in slopes:
        k = np.abs(arrays["f32.k"].view(np.float32))
        k *= np.linspace(*slopes[edge], len(k), dtype=np.float32)[:, None, None]
        arrays |= {"q": np.abs(arrays["q"]), "f32.k": k.view(np.uint8)}
    return {name: array for name, array in arrays.items() if name in ("q", "f32.k", "f32.v", "scale")}


def chunk_operands(d: Draws, tokens: int, cuts: tuple[int, ...], **sizes: object) -> Arrays:
    """Cuts beyond the end are left out."""
    return {**draw.delta_operands(d, tokens, **sizes), "cuts": np.array([cut for cut in cuts if cut < tokens], np.int64)}


# References


def _product(a: Tensors, format: str, dtype: torch.dtype, magnitudes: bool = False) -> Tensor:
    """x times each matrix transposed, or of the magnitudes of both."""
    rows = weight_values(a["w"].flatten(0, -2), format).to(dtype)
    x, w = a["x"].to(dtype), rows.unflatten(0, a["w"].shape[:-1])
    return x.abs() @ w.abs().mT if magnitudes else x @ w.mT


def _tiles(a: Tensors, y: Tensor, format: str, outside: float) -> Tensors:
    wide = torch.full((len(y), y.shape[1] + int(a["column"]) + 1), outside, dtype=y.dtype)
    wide[:, int(a["column"]) : -1] = y
    crooked = {"any": y} if format == "f32" else {}
    return {"large": wide, "small": y[a["source"].long()], **crooked}


def _rows(a: Tensors, y: Tensor, format: str, outside: float) -> Tensors:
    return {"y": y, "picked": y[a["source"].long()]}


def _grouped(a: Tensors, y: Tensor, format: str, outside: float) -> Tensors:
    """y [E, row of x, rows] -> row j of the work with the row that its source names, and with row j."""
    hits, row = int(a["hits"]), torch.arange(len(a["source"]))
    expert = a["hit"][:hits].long().repeat_interleave(a["first"][: hits + 1].diff().long())
    return {"tokens": y[expert, a["source"].long()], "rows": y[expert, row]}


Shown = Callable[[Tensors, Tensor, str, float], Tensors]


def _reference(shown: Shown, format: str) -> Reference:
    return lambda a, dtype: shown(a, _product(a, format, dtype), format, 7.0)


def _bounds(shown: Shown, format: str) -> Callable[[Tensors], Arrays]:
    return lambda a: {name: bound.numpy() for name, bound in
                      shown(a, _product(a, format, torch.float64, True), format, 0.0).items()}


def _tile_list(a: Tensors, dtype: torch.dtype) -> Tensors:
    found, first = {}, a["first"].tolist()
    for name, (height, _, _) in (("large", LARGE_TILE), ("small", SMALL_TILE)):
        tiles = [(hit, row) for hit in range(len(first) - 1) for row in range(first[hit], first[hit + 1], height)]
        found[name] = torch.tensor([len(tiles), *(number for tile in tiles for number in tile)], dtype=torch.int32)
    return found


def _picked(a: Tensors, dtype: torch.dtype) -> Tensors:
    return {"rows": a["w"][int(a["first"]) :], "picked": a["w"][a["ids"].long()]}


def _chunked(a: Tensors, dtype: torch.dtype) -> Tensors:
    """The truth token by token; in float32 torch's own chunked form is what the chunked kernels are held against."""
    if dtype == torch.float64:
        return delta_rule(a, dtype)
    q, k, g, beta, state = floats(a, dtype, "q", "k", "g", "beta", "state")
    o, final = gdn.chunked(q, k, delta_values(a, dtype), g, beta, state, 1.0)
    return {"o": o, "state": final}


# Rows

_scales = st.sampled_from(("plain", "highest", "lowest", "zero scales", "any scales"))
_heights = st.sampled_from((1, 7, 8, 33, 40, 65))  # round tiles of 32 and 64 rows
_widths = st.sampled_from((1, 9, 64, 65, 129))  # and of 64 and 128 columns


def _products(shown: Shown, format: str, golden: dict[str, int], heights: st.SearchStrategy[int] = _heights) -> Oracle:
    sizes = {"tokens": heights, "rows": _widths, "blocks": st.integers(1, 4), "picks": heights, "column": gaps}
    edge = edges if format == "f32" else _scales
    return Oracle(float_product, {**sizes, "format": st.just(format), "edge": edge},
                  {**golden, "format": format, "edge": "plain" if format == "f32" else "any scales"},
                  _reference(shown, format), _bounds(shown, format))


def _groups(format: str, golden: dict[str, object]) -> Oracle:
    sizes = {"experts": st.sampled_from((1, 2, 5, 9)), "rows": st.sampled_from((1, 8, 67)), "blocks": st.integers(1, 3),
             "tokens": st.sampled_from((1, 3, 18, 66)), "k": st.sampled_from((1, 2, 8)), "gap": st.sampled_from((0, 4, 64))}
    return Oracle(grouped_operands, {**sizes, "format": st.just(format), "edge": _scales,
                                     "choice": st.sampled_from(("any", "same", "last"))},
                  {"experts": 5, "rows": 11, "gap": 4, "format": format, "edge": "any scales", **golden},
                  _reference(_grouped, format), _bounds(_grouped, format))


_dims = st.sampled_from((32, 64, 96, 128))

GPU_ORACLES: dict[str, Oracle] = {
    "embed": Oracle(
        float_rows, {"rows": st.integers(1, 20), "n": draw.lengths, "first": st.integers(0, 19)},
        {"rows": 11, "n": 37, "first": 5}, _picked),
    "gemm_f32_tiles": _products(_tiles, "f32", {"tokens": 66, "rows": 9, "blocks": 2, "picks": 34, "column": 4}),
    "gemm_q4_0": _products(_tiles, "q4_0", {"tokens": 9, "rows": 131, "blocks": 2, "picks": 3, "column": 3}),
    "gemm_q8_0": _products(_tiles, "q8_0", {"tokens": 66, "rows": 9, "blocks": 3, "picks": 34, "column": 4}),
    "gemv_rows_q4_0": _products(_rows, "q4_0", {"tokens": 3, "rows": 131, "blocks": 2, "picks": 2, "column": 0}, few),
    "gemv_rows_q8_0": _products(_rows, "q8_0", {"tokens": 3, "rows": 131, "blocks": 2, "picks": 2, "column": 0}, few),
    "grouped_tiles": Oracle(
        tile_operands, {"hits": st.integers(1, 20) | st.sampled_from((256, 300)), "most": st.sampled_from((1, 40, 200))},
        {"hits": 300, "most": 70}, _tile_list),
    "grouped_gemm_q4_0": _groups("q4_0", {"tokens": 20, "k": 2, "blocks": 2, "choice": "any"}),
    "grouped_gemm_q8_0": _groups("q8_0", {"tokens": 66, "k": 1, "blocks": 1, "choice": "same"}),
    "attention_long": Oracle(
        long_attention, {"past": st.sampled_from((120, 127, 128, 260, 1020, 1151)), "tokens": few | st.just(30),
                         "kv_heads": st.integers(1, 2), "group": st.sampled_from((1, 3, 9)),
                         "head_dim": st.sampled_from((32, 64, 160, 256)),
                         "edge": st.sampled_from(("sharp", "rising", "falling", *draw.EDGES))},
        {"past": 1022, "tokens": 5, "kv_heads": 1, "group": 3, "head_dim": 32, "edge": "plain"}, attention),
    "gdn_chunk": Oracle(
        chunk_operands, {"tokens": st.sampled_from((1, 2, 3, 4, 5, 63, 64, 65, 129)), "k_heads": st.integers(1, 2),
                         "ratio": st.integers(1, 3), "dk": _dims, "dv": _dims, "column": st.integers(0, 3),
                         "edge": st.sampled_from(("keep", "forget", *draw.EDGES)),
                         "cuts": st.sampled_from(((), (1,), (2, 64), (63, 65), (60, 128)))},
        {"tokens": 133, "k_heads": 1, "ratio": 2, "dk": 96, "dv": 32, "column": 1, "edge": "plain", "cuts": (3,)},
        _chunked),
}
