"""The sm_20 row ops and delta rule through the op layer: against the reference, in any cut, order and place."""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import sources_from

from fermi_engine import stage_limits as limits
from fermi_engine.compare import All, Arrays, Case, Exact, Rounding, Rule, TwiceReference, Ulp
from fermi_engine.errors import DeviceError
from fermi_engine.formats import FORMATS, Matrix
from fermi_engine.kernels import sm20
from fermi_engine.kernels.device_arrays import DeviceArray, DeviceExperts, DeviceMatrix
from fermi_engine.kernels.gpu import Device, open_device
from fermi_engine.kernels.gpu_kernels import CHUNK, LARGE_TILE, SMALL_TILE, GpuKernels, OpenChunk, gdn_chunk_scratch
from reference import gated_delta_rule as gdn
from tests import strategies as draw
from tests.kernel_references import delta_rule
from tests.oracle import Oracle, Tensors
from tests.stages import ORACLES
from tests.strategies import Draws
from tests.test_device import no_cuda

# csrc/sm20/math.cuh states these; tests/test_emulator.py holds them. The other counts are those of stage_limits.py with them.
EXP_ULP, LOG1P_ULP, SIN_ULP, COS_ULP = 0.97, 0.5001, 0.502, 0.502
LOGISTIC = 2 * EXP_ULP + 2
SILU = LOGISTIC + 1
GATES = 4 * EXP_ULP + 2 * LOG1P_ULP + 1
DELTA_STEP = 3 * 2 + 2 * EXP_ULP


class Lab:
    """Arrays to a device and back; what kernels fill starts as NaN or lowest integers. shift: bytes off alignment."""

    def __init__(self, device: Device, shift: int = 0, multiprocessors: int | None = None) -> None:
        self.device, self.shift, self.stream = device, shift, device.stream("test")
        self.k = GpuKernels(device, self.stream, multiprocessors)
        self._buffers: list[Any] = []

    def put(self, array: np.ndarray, shift: int | None = None) -> DeviceArray:
        shift = self.shift if shift is None else shift
        buffer = self.device.alloc(array.nbytes + shift + 4, "array")
        self._buffers.append(buffer)
        placed = DeviceArray.within(buffer, array.shape, array.dtype, shift)
        if array.size:
            placed.upload(self.device, np.ascontiguousarray(array), self.stream)
        return placed

    def empty(self, *shape: int, dtype: Any = np.float32, shift: int | None = None) -> DeviceArray:
        fill = np.nan if np.dtype(dtype).kind == "f" else np.iinfo(dtype).min
        return self.put(np.full(shape, fill, dtype), shift)

    def get(self, array: DeviceArray) -> np.ndarray:
        out = np.empty(array.shape, array.dtype)
        if out.size:
            array.download(self.device, out, self.stream)
        return out

    def matrix(self, w: Matrix) -> DeviceMatrix:
        return DeviceMatrix(w.format, w.rows, w.cols, self.put(w.data, 0))

    def clear(self) -> None:
        self.device.synchronize()
        for buffer in self._buffers:
            self.device.free(buffer)
        self._buffers = []


Compute = Callable[[Lab, Arrays], Arrays]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """On `cuda` too where there is a card, and where `-m gpu` demands one."""
    if "device" in metafunc.fixturenames:
        wanted = "gpu" in metafunc.config.getoption("-m") or no_cuda() is None
        card = [pytest.param("cuda", marks=pytest.mark.gpu)] if wanted else []
        metafunc.parametrize("device", ["emulated", *card], indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_device(request.param)
    yield opened
    opened.close()


# every op over named arrays, as in stages.py


def _add(lab: Lab, a: Arrays) -> Arrays:
    out = lab.empty(*a["a"].shape)
    lab.k.add(lab.put(a["a"]), lab.put(a["b"]), out)
    return {"y": lab.get(out)}


def _swiglu(lab: Lab, a: Arrays) -> Arrays:
    out = lab.empty(a["gate_up"].shape[0], a["gate_up"].shape[1] // 2)
    lab.k.swiglu(lab.put(a["gate_up"]), out)
    return {"y": lab.get(out)}


def _sigmoid_mul(lab: Lab, a: Arrays) -> Arrays:
    out = lab.empty(*a["x"].shape)
    lab.k.sigmoid_mul(lab.put(a["x"]), lab.put(a["gate"]), int(a["column"]), out)
    return {"y": lab.get(out)}


def _rms_norm(lab: Lab, a: Arrays) -> Arrays:
    out = lab.empty(len(a["x"]), len(a["w"]))
    lab.k.rms_norm(lab.put(a["x"]), lab.put(a["w"]), float(a["eps"]), out, float(a["offset"]))
    return {"y": lab.get(out)}


def _gated_rms_norm(lab: Lab, a: Arrays) -> Arrays:
    out = lab.empty(*a["o"].shape)
    lab.k.gated_rms_norm(lab.put(a["o"]), lab.put(a["z"]), lab.put(a["w"]), float(a["eps"]), out)
    return {"y": lab.get(out)}


def _l2_norm(lab: Lab, a: Arrays) -> Arrays:
    heads, n = int(a["heads"]), int(a["n"])
    out = lab.empty(len(a["x"]), heads, n)
    lab.k.l2_norm(lab.put(a["x"]), int(a["column"]), heads, n, float(a["eps"]), float(a["scale"]), out)
    return {"y": lab.get(out)}


def _gdn_gates(lab: Lab, a: Arrays) -> Arrays:
    g, beta = lab.empty(*a["a"].shape), lab.empty(*a["a"].shape)
    lab.k.gdn_gates(*(lab.put(a[name]) for name in ("a", "b", "A_log", "dt_bias")), g, beta)
    return {"g": lab.get(g), "beta": lab.get(beta)}


def _conv1d_silu(lab: Lab, a: Arrays) -> Arrays:
    tail, out = lab.put(a["tail"]), lab.empty(*a["x"].shape)
    lab.k.conv1d_silu(lab.put(a["x"]), lab.put(a["w"]), tail, out)
    return {"y": lab.get(out), "tail": lab.get(tail)}


def _rope_tables(lab: Lab, a: Arrays) -> Arrays:
    shape = a["positions"].shape[1], len(a["inv_freq"])
    cos, sin = lab.empty(*shape), lab.empty(*shape)
    lab.k.rope_tables(*(lab.put(a[name]) for name in ("positions", "inv_freq", "axis")), cos, sin)
    return {"cos": lab.get(cos), "sin": lab.get(sin)}


def _rope(lab: Lab, a: Arrays) -> Arrays:
    x = lab.put(a["x"])
    lab.k.rope(x, lab.put(a["cos"]), lab.put(a["sin"]))
    return {"x": lab.get(x)}


def _rows(format: str) -> Compute:
    def compute(lab: Lab, a: Arrays) -> Arrays:
        row, n = FORMATS[format], a["w"].shape[1] // FORMATS[format].block_bytes * FORMATS[format].block
        w = lab.matrix(Matrix(format, len(a["w"]), n, row.interleave(a["w"])))
        shift, first = 0 if row.lanes > 1 else None, int(a["first"])  # codes become floats four at a time
        rows, picked = (lab.empty(count, n, shift=shift) for count in (w.rows - first, len(a["ids"])))
        lab.k.rows(w, rows, first=first)
        lab.k.rows(w, picked, lab.put(a["ids"]))
        return {"rows": lab.get(rows), "picked": lab.get(picked)}
    return compute


def _float_rows(lab: Lab, a: Arrays) -> Arrays:
    return _rows("f32")(lab, {**a, "w": a["w"].view(np.uint8)})


def _gdn_step(lab: Lab, a: Arrays) -> Arrays:
    state, out = lab.put(a["state"], 0), lab.empty(len(a["q"]), *a["g"].shape[1:], a["state"].shape[2], shift=0)
    q, k, v, g, beta = (lab.put(a[name], 0) for name in ("q", "k", "v", "g", "beta"))
    lab.k.gdn_step(q, k, v, int(a["column"]), g, beta, state, out)
    return {"o": lab.get(out), "state": lab.get(state)}


def _gdn_chunk(lab: Lab, a: Arrays, cuts: tuple[int, ...] = (), at_once: int = 16) -> Arrays:
    """In calls that end at `cuts`; v in columns that come in fours. Also everything that is carried on."""
    heads, dk, dv = a["state"].shape
    shapes = OpenChunk.shapes(a["q"].shape[1], heads, dk, dv)
    carried = OpenChunk(**{name: lab.empty(*shape, shift=0) for name, shape in shapes.items()})
    carried.state = lab.put(a["state"], 0)
    final = lab.empty(heads, dk, dv, shift=0)
    tokens, column, rest = len(a["q"]), 4 * int(a["column"]), a["v"][:, int(a["column"]) :]
    v = np.pad(rest, ((0, 0), (column, -rest.shape[1] % 4)), constant_values=np.nan)
    parts = []
    for begin, end in pairwise((0, *cuts, tokens)):
        q, k, v_part, g, beta = (lab.put(x[begin:end], 0) for x in (a["q"], a["k"], v, a["g"], a["beta"]))
        out = lab.empty(end - begin, heads, dv, shift=0)
        scratch = lab.empty(gdn_chunk_scratch(end - begin, carried.tokens, heads, at_once), shift=0)
        lab.k.gdn_chunk(q, k, v_part, column, g, beta, carried, out, scratch, final)
        parts.append(lab.get(out))
    left = {name: lab.get(getattr(carried, name))[: carried.tokens] for name in ("k", "v", "g", "beta")}
    return {"o": np.concatenate(parts), "state": lab.get(final), "boundary": lab.get(carried.state), **left}


def _delta_form(a: Tensors, dtype: torch.dtype) -> Tensors:
    """The truth token by token; in float32 torch's own chunked form is what the chunked kernels are held against."""
    if dtype == torch.float64:
        return delta_rule(a, dtype)
    names = ("q", "k", "v", "g", "beta", "state")
    q, k, v, g, beta, state = (a[name].to(dtype) for name in names)
    heads, _, width = state.shape
    v = v[:, int(a["column"]) :][:, : heads * width].unflatten(1, (heads, width))
    o, final = gdn.chunked(q, k, v, g, beta, state, 1.0)
    return {"o": o, "state": final}


def _picked_floats(d: Draws, rows: int, n: int, first: int) -> Arrays:
    return {"w": d.normal(rows, n), "first": draw.scalar(first % rows),
            "ids": d.integers(0, rows, 1 + rows // 2).astype(np.int32)}


_dims = st.sampled_from((32, 64, 96, 128))
_delta = {"k_heads": st.integers(1, 2), "ratio": st.integers(1, 3), "dk": _dims, "dv": _dims,
          "column": st.integers(0, 3), "edge": st.sampled_from(("keep", "forget", *draw.EDGES))}
STEP = Oracle(draw.delta_operands, {"tokens": st.sampled_from((1, 2, 7, 33)), **_delta}, {}, delta_rule)
CHUNKED = Oracle(draw.delta_operands, {"tokens": st.sampled_from((1, 2, 3, 4, 5, 63, 64, 65, 129)), **_delta}, {},
                 _delta_form)
FLOAT_ROWS = Oracle(_picked_floats, {"rows": st.integers(1, 20), "n": draw.lengths, "first": st.integers(0, 19)}, {},
                    lambda a, dtype: {"rows": a["w"][int(a["first"]) :], "picked": a["w"][a["ids"].long()]})
DELTA_RULE = All(o=TwiceReference(DELTA_STEP, limits.read_size), state=TwiceReference(DELTA_STEP, limits.value_size))


def conv_silu(a: Arrays) -> float:
    """A chain of taps, which silu (slope at most 1.1) passes on, and silu's own."""
    return 1.1 * len(a["w"]) + SILU


OPS: Mapping[str, tuple[Oracle, Compute, Rule]] = {
    "add": (ORACLES["add"], _add, Exact()),
    "swiglu": (ORACLES["swiglu"], _swiglu, Rounding(1 + SILU, limits.up_gain)),
    "sigmoid_mul": (ORACLES["sigmoid_mul"], _sigmoid_mul, Rounding(LOGISTIC + 1, limits.x_gain)),
    "rms_norm": (ORACLES["rms_norm"], _rms_norm, TwiceReference(limits.NORM)),
    "gated_rms_norm": (ORACLES["gated_rms_norm"], _gated_rms_norm, TwiceReference(limits.NORM + SILU)),
    "l2_norm": (ORACLES["l2_norm"], _l2_norm, TwiceReference(limits.NORM)),
    "gdn_gates": (ORACLES["gdn_gates"], _gdn_gates, All(g=Rounding(GATES), beta=Rounding(LOGISTIC))),
    "conv1d_silu": (ORACLES["conv1d_silu"], _conv1d_silu, All(y=Rounding(conv_silu), tail=Exact())),
    "rope_tables": (ORACLES["rope_tables"], _rope_tables, All(cos=Ulp(COS_ULP), sin=Ulp(SIN_ULP))),
    "rope": (ORACLES["rope"], _rope, Rounding(2)),
    "dequantize_q4_0": (ORACLES["dequantize_q4_0"], _rows("q4_0"), Exact()),
    "dequantize_q8_0": (ORACLES["dequantize_q8_0"], _rows("q8_0"), Exact()),
    "dequantize_f16": (ORACLES["dequantize_f16"], _rows("f16"), Exact()),
    "embed": (FLOAT_ROWS, _float_rows, Exact()),
    "gdn_step": (STEP, _gdn_step, DELTA_RULE),
    "gdn_chunk": (CHUNKED, _gdn_chunk, DELTA_RULE),
}
each_op = pytest.mark.parametrize("op", OPS)
LONG_ROWS = {"rms_norm": ("x", "w"), "gated_rms_norm": ("o", "z", "w")}


def differing(a: Arrays, b: Arrays) -> list[str]:
    return [name for name in a if not Exact().judge(a, Case({}, {name: b[name]}, {})).passed]


@each_op
def test_op(device: Device, op: str) -> None:
    """Within the row's rule of the reference at any shape, and the same bits at addresses that no vector load likes."""
    oracle, compute, rule = OPS[op]

    @settings(max_examples=max(3, settings().max_examples // 4))
    @given(st.integers(0, 2**32 - 1), st.fixed_dictionaries(dict(oracle.structure)))
    def holds(seed: int, structure: dict[str, Any]) -> None:
        inputs = oracle.inputs(seed, **structure)
        results = []
        for shift in (0, 4):
            lab = Lab(device, shift)
            results.append(compute(lab, inputs))
            lab.clear()
        verdict = rule.judge(results[0], oracle.case(inputs))
        assert verdict.passed, verdict
        assert differing(*results) == []
    holds()


@pytest.mark.parametrize("op", LONG_ROWS)
@pytest.mark.parametrize("n", [1024, 1025, 2047, 5000])
def test_rows_longer_than_a_block(device: Device, op: str, n: int) -> None:
    oracle, compute, rule = OPS[op]
    base = {**ORACLES[op].golden, "n": n}
    inputs = oracle.inputs(n, **base)
    verdict = rule.judge(compute(Lab(device), inputs), oracle.case(inputs))
    assert verdict.passed, verdict


@pytest.mark.parametrize(("op", "along"), [
    ("swiglu", ("gate_up",)), ("sigmoid_mul", ("x", "gate")), ("rms_norm", ("x",)), ("gated_rms_norm", ("o", "z")),
    ("l2_norm", ("x",)), ("gdn_gates", ("a", "b")), ("rope", ("x", "cos", "sin"))])
def test_a_token_has_the_same_bits_alone(device: Device, op: str, along: tuple[str, ...]) -> None:
    """Among 300 rows, which more than one block shares, and by itself."""
    oracle, compute, _ = OPS[op]
    rows = "rows" if "rows" in oracle.structure else "tokens"
    inputs = oracle.inputs(5, **{**oracle.golden, rows: 300, "edge": "plain"})
    together = compute(Lab(device), inputs)
    for row in (0, 7, 299):
        alone = compute(Lab(device), {**inputs, **{name: inputs[name][row : row + 1] for name in along}})
        assert differing(alone, {name: y[row : row + 1] for name, y in together.items()}) == [], row


def test_the_convolution_goes_on_where_it_stopped(device: Device) -> None:
    inputs = draw.conv_rows(Draws(2), 70, 40, 4, "plain")
    whole = _conv1d_silu(Lab(device), inputs)
    for cut in (1, 2, 3, 33, 69):
        first = _conv1d_silu(Lab(device), {**inputs, "x": inputs["x"][:cut]})
        second = _conv1d_silu(Lab(device), {**inputs, "x": inputs["x"][cut:], "tail": first["tail"]})
        joined = {"y": np.concatenate([first["y"], second["y"]]), "tail": second["tail"]}
        assert differing(joined, whole) == [], cut


# the delta rule in chunks


@functools.cache
def prompt(tokens: int = 200, edge: str = "plain") -> Arrays:
    return draw.delta_operands(Draws(11), tokens, 1, 2, 32, 32, 1, edge)


def whole(device: Device) -> Arrays:
    return _gdn_chunk(Lab(device), prompt())


def test_every_cut_of_a_prompt_gives_the_same_bits(device: Device) -> None:
    expected = whole(device)
    for cut in range(1, 200):
        lab = Lab(device)
        assert differing(_gdn_chunk(lab, prompt(), (cut,)), expected) == [], cut
        lab.clear()


CUTS = (1, 2, 3, 4), (63, 64, 65), (10, 20, 30, 40, 50, 60, 70), (64, 128, 192), (63, 126, 189)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("at_once", [1, 2, 16])
def test_many_cuts_and_little_scratch_give_the_same_bits(device: Device, cuts: tuple[int, ...], at_once: int) -> None:
    assert differing(_gdn_chunk(Lab(device), prompt(), cuts, at_once), whole(device)) == []


def test_later_tokens_leave_earlier_outputs_alone(device: Device) -> None:
    """Even where they are NaN: nothing of them is multiplied by zero and added."""
    expected = whole(device)["o"]
    for at in (1, 8, 62, 64, 130, 199):
        inputs = {name: x.copy() for name, x in prompt().items()}
        for name in ("q", "k", "v", "g", "beta"):
            inputs[name][at:] = np.nan
        got = _gdn_chunk(Lab(device), inputs)["o"]
        assert differing({"o": got[:at]}, {"o": expected[:at]}) == [], at
        assert np.isnan(got[at:]).all()


def test_the_final_state_goes_on_token_by_token(device: Device) -> None:
    """What a decoder without chunks gets: chunks for 100 tokens, then steps, against the truth of all."""
    inputs = prompt()
    first = {name: x if x.ndim == 0 or name == "state" else x[:100] for name, x in inputs.items()}
    chunked = _gdn_chunk(Lab(device), first)
    rest = {name: x if x.ndim == 0 else x[100:] for name, x in inputs.items()} | {"state": chunked["state"]}
    stepped = _gdn_step(Lab(device), rest)
    verdict = DELTA_RULE.judge({"o": np.concatenate([chunked["o"], stepped["o"]]), "state": stepped["state"]},
                               CHUNKED.case(inputs))
    assert verdict.passed, verdict


def hard_keys(edge: str) -> Arrays:
    """A prompt whose keys nearly agree, so that the triangular system is far from the identity.

    Decay as models have it, none, or jumps beyond what exp can hold between tokens without decay.
    """
    d, tokens, heads, dim = Draws(3), 320, 2, 64
    common = d.normal(1, 1, dim)
    q, k = (draw._unit_rows(common + spread * d.normal(tokens, 1, dim)) for spread in (0.5, 0.3))
    rate, bias = np.exp(d.uniform(0, 2.8, heads)), d.uniform(-6, -2, heads)
    g = -(rate * np.log1p(np.exp(d.normal(tokens, heads) + bias))).astype(np.float32)
    if edge == "none":
        g[...] = 0
    elif edge == "jumps":
        g = np.where(d.unit(tokens, heads) < 0.1, np.float32(-90), g * np.float32(1e-3))
        g[5] = -np.inf
    return {"q": (q / np.sqrt(np.float64(dim))).astype(np.float32), "k": k, "v": d.normal(tokens, heads * dim), "g": g,
            "beta": d.uniform(0, 1, tokens, heads), "state": d.normal(heads, dim, dim), "column": draw.scalar(0)}


@pytest.mark.parametrize("edge", ["model", "none", "jumps"])
def test_relative_error_is_that_of_torch(device: Device, edge: str) -> None:
    """|error| / |truth| over everything, which is no matter of luck, at most twice that of torch's chunked form."""
    inputs = hard_keys(edge)
    truth, single = (CHUNKED.run(inputs, dtype) for dtype in (torch.float64, torch.float32))
    got = _gdn_chunk(Lab(device), inputs)
    for name in ("o", "state"):
        ours, theirs = (np.linalg.norm(x[name] - truth[name]) / np.linalg.norm(truth[name]) for x in (got, single))
        assert ours <= 2 * theirs, f"{name}: {ours:.3g}, torch {theirs:.3g}"


def test_steps_do_not_depend_on_the_cut(device: Device) -> None:
    inputs = prompt(20)
    expected = _gdn_step(Lab(device), inputs)
    state, parts = inputs["state"], []
    for t in range(20):
        one = {name: x if x.ndim == 0 else x[t : t + 1] for name, x in inputs.items()}
        got = _gdn_step(Lab(device), one | {"state": state})
        state = got["state"]
        parts.append(got["o"])
    assert differing({"o": np.concatenate(parts), "state": state}, expected) == []


# products through the op layer


@pytest.mark.parametrize("format", ["f32", "q4_0", "q8_0"])
@pytest.mark.parametrize("multiprocessors", [1, 1000])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 32), (5, 33, 64), (70, 130, 96), (125, 250, 32)])
def test_gemm(device: Device, format: str, multiprocessors: int, m: int, n: int, k: int) -> None:
    """In a column of a wider result and from picked rows; every tile gives the same bits."""
    d, lab = Draws(m), Lab(device, 0, multiprocessors)
    x, w = d.normal(m, k), Matrix.from_f32(d.normal(n, k), format)
    source, wide, picked = d.integers(0, m, m + 2).astype(np.int32), lab.empty(m, n + 5), lab.empty(m + 2, n)
    lab.k.gemm(lab.put(x), lab.matrix(w), wide, 4)
    lab.k.gemm(lab.put(x), lab.matrix(w), picked, source=lab.put(source))
    got, values = lab.get(wide), w.dequantize().astype(np.float64)
    case = Case({}, {"y": x @ values.T.astype(np.float64)}, {"y": np.abs(x) @ np.abs(values).T})
    verdict = Rounding(k).judge({"y": np.ascontiguousarray(got[:, 4:-1])}, case)
    assert verdict.passed, verdict
    assert np.isnan(got[:, :4]).all()
    assert np.isnan(got[:, -1]).all()
    assert differing({"y": lab.get(picked)}, {"y": got[source, 4:-1]}) == []
    if format == "f32":
        crooked = lab.empty(m, n)
        lab.k.gemm(lab.put(x, 4), lab.matrix(w), crooked)
        assert differing({"y": lab.get(crooked)}, {"y": got[:, 4:-1]}) == []


@pytest.mark.parametrize("small", [False, True])
def test_grouped_gemm(device: Device, small: bool) -> None:
    """The rows of each expert as a product of their own has them, in slots that are not in order."""
    d, lab, k, n = Draws(4), Lab(device), 64, 40
    work = draw.work_list(draw.chosen_experts(d, 50, 6, 2, "any"), 6)
    experts = [Matrix.from_f32(d.normal(n, k), "q4_0") for _ in range(6)]
    x, slot = lab.put(d.normal(50, k)), np.array([3, 0, 5, 1, 4, 2], np.int32)
    order = np.argsort(slot)  # the expert that each slot holds
    blob = np.concatenate([experts[e].data.reshape(-1) for e in order])
    held = DeviceExperts("q4_0", 6, n, k, experts[0].nbytes, lab.put(blob, 0))
    first, source = lab.put(work["first"]), lab.put(work["source"])
    tile_rows = (SMALL_TILE if small else LARGE_TILE)[0]
    tiles, out = lab.empty(1 + 2 * (6 + 100 // tile_rows), dtype=np.int32), lab.empty(100, n)
    lab.k.grouped_tiles(first, lab.put(work["hits"]), tiles, tile_rows)
    lab.k.grouped_gemm(x, held, first, tiles, out, source, lab.put(slot[work["hit"]]), small)
    got = lab.get(out)
    for i, expert in enumerate(work["hit"][: work["hits"][0]]):
        rows = slice(work["first"][i], work["first"][i + 1])
        alone = lab.empty(rows.stop - rows.start, n)
        lab.k.gemm(x, lab.matrix(experts[expert]), alone, source=lab.put(work["source"][rows]))
        assert differing({"y": lab.get(alone)}, {"y": got[rows]}) == [], expert


# checks, orders, faults


def test_wrong_arguments_are_refused(device: Device) -> None:
    lab = Lab(device)
    x, y = lab.empty(3, 8), lab.empty(3, 9)
    with pytest.raises(ValueError, match=r"add: shapes \(3, 8\), \(3, 8\), \(3, 9\) differ"):
        lab.k.add(x, x, y)
    with pytest.raises(TypeError, match="must be float32, got int32"):
        lab.k.add(*[lab.empty(3, 8, dtype=np.int32)] * 3)
    with pytest.raises(ValueError, match=r"gate .* does not cover"):
        lab.k.sigmoid_mul(x, y, 2, x)
    with pytest.raises(ValueError, match="gemm: x"):
        lab.k.gemm(x, DeviceMatrix("f32", 4, 8, lab.empty(4, 8)), lab.empty(4, 4))
    with pytest.raises(ValueError, match="takes 128 bytes, found 96"):
        DeviceMatrix("f32", 4, 8, x)
    with pytest.raises(ValueError, match="from byte 4 of buffer"):
        DeviceArray.within(x.buffer, (3, 9), np.float32, 4)
    state, gates = lab.empty(2, 48, 32), lab.empty(5, 2)
    with pytest.raises(ValueError, match=r"gdn_step: .* do not fit"):
        lab.k.gdn_step(*[lab.empty(5, 1, 48)] * 2, lab.empty(5, 64), 0, gates, gates, state, lab.empty(5, 2, 32))


def test_no_tokens_are_no_work(device: Device) -> None:
    empty = {name: x if x.ndim == 0 or name == "state" else x[:0] for name, x in prompt().items()}
    for compute in (_gdn_step, _gdn_chunk):
        got = compute(Lab(device), empty)
        assert got["o"].shape == (0, 2, 32)
    assert differing({"state": _gdn_step(Lab(device), empty)["state"]}, {"state": empty["state"]}) == []


SHARING = ("rms_norm", "gdn_step", "gdn_chunk")  # shared memory, barriers


@pytest.mark.parametrize("op", SHARING)
def test_no_races_and_no_byte_beside_a_buffer(op: str) -> None:
    oracle, compute, rule = OPS[op]
    delta = {"tokens": 70, "k_heads": 1, "ratio": 2, "dk": 32, "dv": 32, "column": 0, "edge": "plain"}
    inputs = oracle.inputs(1, **({**oracle.golden, "n": 300} if oracle.golden else delta))
    opened = open_device("emulated", mode="checked")
    verdict = rule.judge(compute(Lab(opened), inputs), oracle.case(inputs))
    opened.close()
    assert verdict.passed, verdict


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_threads_and_blocks_changes_no_bit(seed: int) -> None:
    results = []
    for order in (None, seed):
        opened = open_device("emulated", seed=order)
        results.append({op: compute(Lab(opened), inputs) for op, compute, inputs in (
            ("chunk", _gdn_chunk, prompt()), ("step", _gdn_step, prompt(20)),
            ("norm", _rms_norm, ORACLES["rms_norm"].inputs(1, rows=5, n=700, extra=1, offset=1, edge="plain")))})
        opened.close()
    for op in results[0]:
        assert differing(results[0][op], results[1][op]) == [], op


def holds(op: str, opened: Device) -> bool:
    """Whether `op` passes a short version of the tests above."""
    if op == "cut":
        return not differing(_gdn_chunk(Lab(opened), prompt(), (30, 100)), whole(opened))
    if op == "later":
        inputs = {name: x.copy() for name, x in prompt().items()}
        inputs["v"][5:] = np.nan
        return not differing({"o": _gdn_chunk(Lab(opened), inputs)["o"][:5]}, {"o": whole(opened)["o"][:5]})
    if op == "alone":
        inputs = ORACLES["rms_norm"].inputs(1, rows=40, n=80, extra=0, offset=1, edge="plain")
        together, alone = _rms_norm(Lab(opened), inputs), _rms_norm(Lab(opened), {**inputs, "x": inputs["x"][9:10]})
        return not differing(alone, {"y": together["y"][9:10]})
    oracle, compute, rule = OPS[op]
    delta = {"tokens": 130, "k_heads": 2, "ratio": 2, "dk": 32, "dv": 32, "column": 1, "edge": "plain"}
    inputs = oracle.inputs(1, **(oracle.golden or delta))
    return rule.judge(compute(Lab(opened), inputs), oracle.case(inputs)).passed


FAULTS = {  # name -> op, right text, wrong text, which check
    "delta without its barrier": (
        "gdn_chunk", "put_deltas(acc, p, v);\n        __syncthreads();", "put_deltas(acc, p, v);", "gdn_chunk"),
    "decay within a chunk forgotten": ("gdn_chunk_intra", "acc[2 * p][j] * f32_exp(", "acc[2 * p][j]; (void)(", "gdn_chunk"),
    "state not decayed": ("gdn_chunk", "fmaf(decay, *at, acc[i][j])", "*at + acc[i][j]", "gdn_chunk"),
    "first row of the open chunk lost": ("gdn_chunk", "if (row < 0)", "if (row < 0 || to == 0)", "cut"),
    "state kept from the last token": (
        "gdn_chunk", "if (!whole)\n            store_state(a.state, a, p, state);", "", "cut"),
    "zeros above the diagonal added": ("gdn_chunk", "!DIAGONAL || k <= row", "true || k <= row", "later"),
    "sums of g in float": ("gdn_chunk_intra", "double sum = 0.0", "float sum = 0.0f", "gdn_chunk"),
    "key heads tiled": ("gdn_step", "head / ((int)a.v_heads / (int)a.k_heads)", "head % (int)a.k_heads", "gdn_step"),
    "tail one token late": (
        "conv1d_silu", "conv_input(a, a.tokens + i, channel)", "conv_input(a, a.tokens + i - 1, channel)",
        "conv1d_silu"),
    "last float of a row lost": ("rows.cuh", "if (left > 0)\n        p[0]", "if (left > 1)\n        p[0]", "swiglu"),
    "rows that share a block mixed": ("rows.cuh", "return shared[t - lane];", "return shared[0];", "alone"),
}


@contextmanager
def faulty(folder: Path, op: str, right: str, wrong: str) -> Iterator[None]:
    """The kernels with one text replaced."""
    csrc = folder / "csrc"
    shutil.copytree(sm20.csrc() / "emulator", csrc / "emulator")
    shutil.copytree(sm20.csrc() / "sm20", csrc / "sm20")
    path = csrc / "sm20" / (op if "." in op else f"{op}.cu")
    text = path.read_text()
    assert right in text
    path.write_text(text.replace(right, wrong))
    with sources_from(csrc):
        yield


def fails(check: str) -> bool:
    try:
        return not holds(check, open_device("emulated", seed=1))
    except DeviceError:
        return True


def in_a_child(question: Callable[[], bool]) -> bool:
    """Asked in a forked process, with which the faulty kernels and the stacks of their threads go away."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if question() else 1)
        finally:
            os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1)
    return status == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, tmp_path: Path) -> None:
    op, right, wrong, check = FAULTS[fault]
    with faulty(tmp_path, op, right, wrong):
        assert in_a_child(lambda: fails(check))


def test_the_short_checks_pass_without_a_fault() -> None:
    opened = open_device("emulated", seed=1)
    assert all(holds(check, opened) for *_, check in FAULTS.values())
    opened.close()
    assert not in_a_child(lambda: fails("swiglu"))


def test_chunks_and_scratch_are_those_of_the_kernels() -> None:
    text = (sm20.csrc() / "sm20" / "gdn_chunk.cuh").read_text()
    assert f"#define CHUNK {CHUNK}\n" in text
    assert gdn_chunk_scratch(65, 63, 3) == 2 * 3 * (2 * CHUNK**2 + 3 * CHUNK)
    assert math.prod(OpenChunk.shapes(1, 2, 32, 64)["v"]) == 63 * 2 * 64
