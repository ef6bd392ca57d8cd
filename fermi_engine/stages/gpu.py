"""Candidates of the stage table on sm_20: the ops of csrc/sm20 over named arrays, as csrc/kernels.h or ops.h names them.

stage_products.py has those of matrices. Where a kernel wants heads of a multiple of 32, others are padded with zeros, which
changes no sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fermi_engine.compare import Arrays
from fermi_engine.kernels.device_arrays import DeviceArray
from fermi_engine.kernels.gpu_kernels import SLAB, OpenChunk, gdn_chunk_scratch
from fermi_engine.kernels.sm20_attention import HEAD_DIM_STEP, DeviceCache, DeviceExpertRows
from fermi_engine.stages.cpu import UNWRITTEN
from fermi_engine.stages.device_run import DeviceRun

Compute = Callable[[DeviceRun, Arrays], Arrays]


@dataclass(frozen=True)
class Candidate:
    """compute(run, inputs) launches `entries` of csrc/sm20 and no others, and gives `outputs` of the reference (none named:
    all of them)."""

    compute: Compute
    entries: tuple[str, ...]
    outputs: tuple[str, ...] = ()


def launches(*entries: str, outputs: tuple[str, ...] = ()) -> Callable[[Compute], Candidate]:
    """Decorator: makes a Candidate."""
    return lambda compute: Candidate(compute, entries, outputs)


# rows


@launches("add")
def add(run: DeviceRun, a: Arrays) -> Arrays:
    out = run.empty(*a["a"].shape)
    run.rows.add(run.put(a["a"]), run.put(a["b"]), out)
    return {"y": run.get(out)}


@launches("swiglu")
def swiglu(run: DeviceRun, a: Arrays) -> Arrays:
    out = run.empty(len(a["gate_up"]), a["gate_up"].shape[1] // 2)
    run.rows.swiglu(run.put(a["gate_up"]), out)
    return {"y": run.get(out)}


@launches("sigmoid_mul")
def sigmoid_mul(run: DeviceRun, a: Arrays) -> Arrays:
    out = run.empty(*a["x"].shape)
    run.rows.sigmoid_mul(run.put(a["x"]), run.put(a["gate"]), int(a["column"]), out)
    return {"y": run.get(out)}


@launches("rms_norm")
def rms_norm(run: DeviceRun, a: Arrays) -> Arrays:
    out = run.empty(len(a["x"]), len(a["w"]))
    run.rows.rms_norm(run.put(a["x"]), run.put(a["w"]), float(a["eps"]), out, float(a["offset"]))
    return {"y": run.get(out)}


@launches("gated_rms_norm")
def gated_rms_norm(run: DeviceRun, a: Arrays) -> Arrays:
    out = run.empty(*a["o"].shape)
    run.rows.gated_rms_norm(*(run.put(a[name]) for name in ("o", "z", "w")), float(a["eps"]), out)
    return {"y": run.get(out)}


@launches("l2_norm")
def l2_norm(run: DeviceRun, a: Arrays) -> Arrays:
    heads, n = int(a["heads"]), int(a["n"])
    out = run.empty(len(a["x"]), heads, n)
    run.rows.l2_norm(run.put(a["x"]), int(a["column"]), heads, n, float(a["eps"]), float(a["scale"]), out)
    return {"y": run.get(out)}


@launches("rope_tables")
def rope_tables(run: DeviceRun, a: Arrays) -> Arrays:
    shape = a["positions"].shape[1], len(a["inv_freq"])
    cos, sin = run.empty(*shape), run.empty(*shape)
    run.rows.rope_tables(*(run.put(a[name]) for name in ("positions", "inv_freq", "axis")), cos, sin)
    return {"cos": run.get(cos), "sin": run.get(sin)}


@launches("rope")
def rope(run: DeviceRun, a: Arrays) -> Arrays:
    x = run.put(a["x"])
    run.rows.rope(x, run.put(a["cos"]), run.put(a["sin"]))
    return {"x": run.get(x)}


# Gated DeltaNet


@launches("gdn_gates")
def gdn_gates(run: DeviceRun, a: Arrays) -> Arrays:
    g, beta = run.empty(*a["a"].shape), run.empty(*a["a"].shape)
    run.rows.gdn_gates(*(run.put(a[name]) for name in ("a", "b", "A_log", "dt_bias")), g, beta)
    return {"g": run.get(g), "beta": run.get(beta)}


@launches("conv1d_silu", "conv1d_silu_tail")
def conv1d_silu(run: DeviceRun, a: Arrays) -> Arrays:
    tail, out = run.put(a["tail"]), run.empty(*a["x"].shape)
    run.rows.conv1d_silu(run.put(a["x"]), run.put(a["w"]), tail, out)
    return {"y": run.get(out), "tail": run.get(tail)}


def _padded(array: np.ndarray, step: int, axis: int = -1) -> np.ndarray:
    """Zeros up to the next multiple of `step`."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = 0, -array.shape[axis] % step
    return np.pad(array, widths)


def _heads(a: Arrays, multiple: int) -> tuple[Arrays, int]:
    """The delta rule's operands with heads of multiples of 32, v's columns in multiples of `multiple` around NaN, and the
    column that v starts at."""
    heads, _, dv = a["state"].shape
    column = -(-int(a["column"]) // multiple) * multiple
    v = _padded(a["v"][:, int(a["column"]) :][:, : heads * dv].reshape(-1, heads, dv), SLAB)
    wide = np.full((len(v), column + heads * v.shape[2] + multiple), np.nan, np.float32)
    wide[:, column:-multiple] = v.reshape(len(v), heads * v.shape[2])
    state = _padded(_padded(a["state"], SLAB), SLAB, axis=1)
    return {**a, "q": _padded(a["q"], SLAB), "k": _padded(a["k"], SLAB), "v": wide, "state": state}, column


@launches("gdn_step")
def gdn_step(run: DeviceRun, a: Arrays) -> Arrays:
    p, column = _heads(a, 1)
    state, out = run.put(p["state"], aligned=True), run.empty(len(p["q"]), *p["g"].shape[1:], p["state"].shape[2], aligned=True)
    q, k, v, g, beta = (run.put(p[name], aligned=True) for name in ("q", "k", "v", "g", "beta"))
    run.rows.gdn_step(q, k, v, column, g, beta, state, out)
    _, dk, dv = a["state"].shape
    return {"o": run.get(out)[..., :dv].copy(), "state": run.get(state)[:, :dk, :dv].copy()}


@launches("gdn_chunk_intra", "gdn_chunk_solve", "gdn_chunk_pass", "gdn_chunk_out")
def gdn_chunk(run: DeviceRun, a: Arrays) -> Arrays:
    """In calls that end at `cuts`."""
    p, column = _heads(a, 4)
    heads, dk, dv = p["state"].shape
    carried = OpenChunk(**{name: run.empty(*shape, aligned=True)
                           for name, shape in OpenChunk.shapes(p["q"].shape[1], heads, dk, dv).items()})
    carried.state, final = run.put(p["state"], aligned=True), run.empty(heads, dk, dv, aligned=True)
    parts = []
    for begin, end in pairwise((0, *a["cuts"].tolist(), len(p["q"]))):
        inputs = (run.put(p[name][begin:end], aligned=True) for name in ("q", "k", "v", "g", "beta"))
        parts.append(_chunks(run, *inputs, column, carried, final))
    _, dk, dv = a["state"].shape
    return {"o": np.concatenate(parts)[..., :dv], "state": run.get(final)[:, :dk, :dv].copy()}


def _chunks(run: DeviceRun, q: DeviceArray, k: DeviceArray, v: DeviceArray, g: DeviceArray, beta: DeviceArray, column: int,
            carried: OpenChunk, final: DeviceArray) -> np.ndarray:
    heads, _, dv = carried.state.shape
    out = run.empty(q.shape[0], heads, dv, aligned=True)
    scratch = run.empty(gdn_chunk_scratch(q.shape[0], carried.tokens, heads), aligned=True)
    run.rows.gdn_chunk(q, k, v, column, g, beta, carried, out, scratch, final)
    return run.get(out)


# attention


def _cache(run: DeviceRun, kv: list[np.ndarray]) -> DeviceCache:
    return DeviceCache(*(run.put(rows, aligned=True) for rows in kv))


@launches("kv_append", outputs=("f32.k", "f32.v"))
def kv_append(run: DeviceRun, a: Arrays) -> Arrays:
    """The cache's bytes, cut into the pages that a CPU has."""
    (length, kv_heads, head_dim), start, page = a["k"].shape, int(a["start"]), int(a["page_tokens"])
    pages = -(-length // page)
    fresh = np.full((kv_heads, pages * page, head_dim * 4), UNWRITTEN, np.uint8).view(np.float32)
    cache = _cache(run, [fresh, fresh])
    for begin, end in ((0, start), (start, length)):
        if begin < end:
            run.tokens.kv_append(cache, begin, run.put(a["k"][begin:end]), run.put(a["v"][begin:end]))
    return {f"f32.{name}": np.ascontiguousarray(run.get(array).view(np.uint8).reshape(kv_heads, pages, page, -1)
                                                .transpose(1, 0, 2, 3)) for name, array in vars(cache).items()}


@launches("attention", outputs=("f32",))
def attention(run: DeviceRun, a: Arrays) -> Arrays:
    """Over a float32 cache with NaN behind its last position."""
    tokens, _, head_dim = a["q"].shape
    rows = [_padded(a[f"f32.{name}"].view(np.float32), HEAD_DIM_STEP).transpose(1, 0, 2) for name in ("k", "v")]
    length = rows[0].shape[1]
    cache = _cache(run, [np.pad(x, ((0, 0), (0, 3), (0, 0)), constant_values=np.nan) for x in rows])
    q = run.put(_padded(a["q"], HEAD_DIM_STEP), aligned=True)
    out = run.empty(*q.shape, aligned=True)
    total = run.empty(*q.shape, aligned=True)
    run.tokens.attention(q, cache, length - tokens, float(a["scale"]), out, total)
    return {"f32": run.get(out)[..., :head_dim].copy()}


# experts


@launches("router_topk")
def router_topk(run: DeviceRun, a: Arrays) -> Arrays:
    shape = len(a["logits"]), int(a["k"])
    ids, weights = run.empty(*shape, dtype=np.int32), run.empty(*shape)
    run.tokens.router_topk(run.put(a["logits"]), ids, weights)
    return {"ids": run.get(ids), "weights": run.get(weights)}


@launches("expert_rows_count", "expert_rows_scan", "expert_rows_place")
def expert_rows(run: DeviceRun, a: Arrays) -> Arrays:
    """The work list; hit and first as far as there are hits."""
    experts = int(a["experts"])
    shapes = DeviceExpertRows.shapes(*a["ids"].shape, experts)
    work = DeviceExpertRows(**{name: run.empty(*shape, dtype=np.int32) for name, shape in shapes.items()})
    run.tokens.expert_rows(run.put(a["ids"]), experts, work)
    found: dict[str, Any] = {name: run.get(array) for name, array in vars(work).items() if name != "counts"}
    hits = int(found["hits"][0])
    return {**found, "hit": found["hit"][:hits], "first": found["first"][: hits + 1]}


@launches("moe_combine")
def moe_combine(run: DeviceRun, a: Arrays) -> Arrays:
    out = run.empty(*a["shared"].shape)
    arrays = {name: run.put(a[name]) for name in ("expert_out", "row_of", "weights", "shared", "shared_gate")}
    run.tokens.moe_combine(**arrays, out=out)
    return {"y": run.get(out)}
