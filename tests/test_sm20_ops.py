"""The sm_20 row ops and delta rule beyond the stage table: any cut, order and place give the same bits; long rows; refusals."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from fermi_engine.compare import Arrays, Case, Exact
from fermi_engine.kernels import sm20
from fermi_engine.kernels.device_arrays import DeviceArray, DeviceMatrix
from fermi_engine.kernels.gpu import Device, open_device
from fermi_engine.kernels.gpu_kernels import CHUNK, OpenChunk, gdn_chunk_scratch
from fermi_engine.stages import gpu
from fermi_engine.stages.device_run import DeviceRun
from fermi_engine.stages.table import find_stage
from tests import strategies as draw
from tests.devices import on_devices
from tests.stages import ORACLES
from tests.strategies import Draws

CHUNKED = ORACLES["gdn_chunk"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_devices(metafunc, "device", ("emulated",))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_device(request.param)
    yield opened
    opened.close()


def computed(candidate: gpu.Candidate, device: Device, inputs: Arrays) -> Arrays:
    run = DeviceRun(device)
    got = candidate.compute(run, inputs)
    run.close()
    return got


def differing(a: Arrays, b: Arrays) -> list[str]:
    return [name for name in a if not Exact().judge(a, Case({}, {name: b[name]}, {})).passed]


# rows


@pytest.mark.parametrize("op", ["rms_norm", "gated_rms_norm"])
@pytest.mark.parametrize("n", [1024, 1025, 2047, 5000])
@pytest.mark.parametrize("mode", ["plain", "checked"])
def test_rows_longer_than_a_block(op: str, n: int, mode: str) -> None:
    """In the checked mode without races in the sum that a row's warps share."""
    stage, oracle = find_stage(op), ORACLES[op]
    inputs = oracle.inputs(n, **{**oracle.golden, "n": n})
    opened = open_device("emulated", mode=mode)
    verdict = stage.gpu.judge(computed(getattr(gpu, op), opened, inputs), oracle.case(inputs))
    opened.close()
    assert verdict.passed, verdict


@pytest.mark.parametrize(("op", "along"), [
    ("swiglu", ("gate_up",)), ("sigmoid_mul", ("x", "gate")), ("rms_norm", ("x",)), ("gated_rms_norm", ("o", "z")),
    ("l2_norm", ("x",)), ("gdn_gates", ("a", "b")), ("rope", ("x", "cos", "sin"))])
def test_a_token_has_the_same_bits_alone(device: Device, op: str, along: tuple[str, ...]) -> None:
    """Among 300 rows, which more than one block shares, and by itself."""
    oracle, candidate = ORACLES[op], getattr(gpu, op)
    rows = "rows" if "rows" in oracle.structure else "tokens"
    sizes = {**oracle.golden, rows: 300, "edge": "plain"}
    inputs = oracle.inputs(5, **({**sizes, "n": 77} if op == "rms_norm" else sizes))
    together = computed(candidate, device, inputs)
    for row in (0, 7, 299):
        alone = computed(candidate, device, {**inputs, **{name: inputs[name][row : row + 1] for name in along}})
        assert differing(alone, {name: y[row : row + 1] for name, y in together.items()}) == [], row


def test_the_convolution_goes_on_where_it_stopped(device: Device) -> None:
    inputs = draw.conv_rows(Draws(2), 70, 40, 4, "plain")
    whole = computed(gpu.conv1d_silu, device, inputs)
    for cut in (1, 2, 3, 33, 69):
        first = computed(gpu.conv1d_silu, device, {**inputs, "x": inputs["x"][:cut]})
        second = computed(gpu.conv1d_silu, device, {**inputs, "x": inputs["x"][cut:], "tail": first["tail"]})
        joined = {"y": np.concatenate([first["y"], second["y"]]), "tail": second["tail"]}
        assert differing(joined, whole) == [], cut


# the delta rule in chunks


@functools.cache
def prompt(tokens: int = 200) -> Arrays:
    return draw.delta_operands(Draws(11), tokens, 1, 2, 32, 32, 1, "plain")


def chunked(device: Device, a: Arrays, cuts: tuple[int, ...] = (), at_once: int = 16) -> Arrays:
    """In calls that end at `cuts`; v in columns that come in fours. Also everything that is carried on."""
    run, (heads, dk, dv) = DeviceRun(device), a["state"].shape
    shapes = OpenChunk.shapes(a["q"].shape[1], heads, dk, dv)
    carried = OpenChunk(**{name: run.empty(*shape) for name, shape in shapes.items()})
    carried.state, final = run.put(a["state"]), run.empty(heads, dk, dv)
    column, rest = 4 * int(a["column"]), a["v"][:, int(a["column"]) :]
    v = np.pad(rest, ((0, 0), (column, -rest.shape[1] % 4)), constant_values=np.nan)
    parts = []
    for begin, end in pairwise((0, *cuts, len(a["q"]))):
        q, k, v_part, g, beta = (run.put(x[begin:end]) for x in (a["q"], a["k"], v, a["g"], a["beta"]))
        scratch = run.empty(gdn_chunk_scratch(end - begin, carried.tokens, heads, at_once))
        out = run.empty(end - begin, heads, dv)
        run.rows.gdn_chunk(q, k, v_part, column, g, beta, carried, out, scratch, final)
        parts.append(run.get(out))
    left = {name: run.get(getattr(carried, name))[: carried.tokens] for name in ("k", "v", "g", "beta")}
    found = {"o": np.concatenate(parts), "state": run.get(final), "boundary": run.get(carried.state), **left}
    run.close()
    return found


@pytest.fixture
def whole(device: Device) -> Arrays:
    """The prompt in one call."""
    return chunked(device, prompt())


SHORT, EVERY = (1, 2, 31, 62, 63, 64, 65, 127, 128, 129, 191, 192, 199), range(1, 200)


@pytest.mark.parametrize("cuts", [SHORT, pytest.param(EVERY, marks=pytest.mark.soak)], ids=["some", "every"])
def test_a_cut_of_a_prompt_changes_no_bit(device: Device, whole: Arrays, cuts: tuple[int, ...]) -> None:
    for cut in cuts:
        assert differing(chunked(device, prompt(), (cut,)), whole) == [], cut


CUTS = (1, 2, 3, 4), (63, 64, 65), (10, 20, 30, 40, 50, 60, 70), (64, 128, 192), (63, 126, 189)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("at_once", [1, 2, 16])
def test_many_cuts_and_little_scratch_give_the_same_bits(
    device: Device, whole: Arrays, cuts: tuple[int, ...], at_once: int,
) -> None:
    assert differing(chunked(device, prompt(), cuts, at_once), whole) == []


def test_a_cut_of_wide_heads_changes_no_bit(device: Device) -> None:
    """Several slices of W, an odd and an even number of them, and keys that leave warps of the pass without rows."""
    for dk in (96, 128):
        inputs = draw.delta_operands(Draws(12), 200, 2, 2, dk, 64, 0, "plain")
        assert differing(chunked(device, inputs, (70, 131), 1), chunked(device, inputs)) == [], dk


@pytest.mark.parametrize(("dk", "dv"), [(96, 64), (64, 32), (128, 128)])
def test_wide_heads_race_nowhere(dk: int, dv: int) -> None:
    inputs = CHUNKED.inputs(1, **{**CHUNKED.golden, "tokens": 70, "dk": dk, "dv": dv})
    opened = open_device("emulated", mode="checked")
    verdict = find_stage("gdn_chunk").gpu.judge(computed(gpu.gdn_chunk, opened, inputs), CHUNKED.case(inputs))
    opened.close()
    assert verdict.passed, verdict


def test_later_tokens_leave_earlier_outputs_alone(device: Device, whole: Arrays) -> None:
    """Even where they are NaN: nothing of them is multiplied by zero and added."""
    for at in (1, 8, 62, 64, 130, 199):
        inputs = {name: x.copy() for name, x in prompt().items()}
        for name in ("q", "k", "v", "g", "beta"):
            inputs[name][at:] = np.nan
        got = chunked(device, inputs)["o"]
        assert differing({"o": got[:at]}, {"o": whole["o"][:at]}) == [], at
        assert np.isnan(got[at:]).all()


def test_the_final_state_goes_on_token_by_token(device: Device) -> None:
    """What a decoder without chunks gets: chunks for 100 tokens, then steps, against the truth of all."""
    inputs = prompt()
    first = {name: x if x.ndim == 0 or name == "state" else x[:100] for name, x in inputs.items()}
    begun = chunked(device, first)
    rest = {name: x if x.ndim == 0 else x[100:] for name, x in inputs.items()} | {"state": begun["state"]}
    stepped = computed(gpu.gdn_step, device, rest)
    verdict = find_stage("gdn_chunk").gpu.judge(
        {"o": np.concatenate([begun["o"], stepped["o"]]), "state": stepped["state"]}, CHUNKED.case(inputs))
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
    got = chunked(device, inputs)
    for name in ("o", "state"):
        ours, theirs = (np.linalg.norm(x[name] - truth[name]) / np.linalg.norm(truth[name]) for x in (got, single))
        assert ours <= 2 * theirs, f"{name}: {ours:.3g}, torch {theirs:.3g}"


def test_steps_do_not_depend_on_the_cut(device: Device) -> None:
    inputs = prompt(20)
    expected = computed(gpu.gdn_step, device, inputs)
    state, parts = inputs["state"], []
    for t in range(20):
        one = {name: x if x.ndim == 0 else x[t : t + 1] for name, x in inputs.items()}
        got = computed(gpu.gdn_step, device, one | {"state": state})
        state = got["state"]
        parts.append(got["o"])
    assert differing({"o": np.concatenate(parts), "state": state}, expected) == []


# arguments


def test_wrong_arguments_are_refused(device: Device) -> None:
    run = DeviceRun(device)
    x, y = run.empty(3, 8), run.empty(3, 9)
    with pytest.raises(ValueError, match=r"add: shapes \(3, 8\), \(3, 8\), \(3, 9\) differ"):
        run.rows.add(x, x, y)
    with pytest.raises(TypeError, match="must be float32, got int32"):
        run.rows.add(*[run.empty(3, 8, dtype=np.int32)] * 3)
    with pytest.raises(ValueError, match=r"gate .* does not cover"):
        run.rows.sigmoid_mul(x, y, 2, x)
    with pytest.raises(ValueError, match="gemm: x"):
        run.rows.gemm(x, DeviceMatrix("f32", 4, 8, run.empty(4, 8)), run.empty(4, 4))
    with pytest.raises(ValueError, match="takes 128 bytes, found 96"):
        DeviceMatrix("f32", 4, 8, x)
    with pytest.raises(ValueError, match="from byte 4 of buffer"):
        DeviceArray.within(x.buffer, (3, 9), np.float32, 4)
    state, gates = run.empty(2, 48, 32), run.empty(5, 2)
    with pytest.raises(ValueError, match=r"gdn_step: .* do not fit"):
        run.rows.gdn_step(*[run.empty(5, 1, 48)] * 2, run.empty(5, 64), 0, gates, gates, state, run.empty(5, 2, 32))


def test_no_tokens_are_no_work(device: Device) -> None:
    empty: dict[str, Any] = {name: x if x.ndim == 0 or name == "state" else x[:0] for name, x in prompt().items()}
    stepped = computed(gpu.gdn_step, device, empty)
    assert chunked(device, empty)["o"].shape == stepped["o"].shape == (0, 2, 32)
    assert differing({"state": stepped["state"]}, {"state": empty["state"]}) == []


def test_chunks_and_scratch_are_those_of_the_kernels() -> None:
    text = (sm20.csrc() / "sm20" / "gdn_chunk.cuh").read_text()
    assert f"#define CHUNK {CHUNK}\n" in text
    found = re.search(r"GDN_CHUNK_SCRATCH = (.*) }", (sm20.csrc() / "sm20" / "ops.h").read_text())
    floats = sum(math.prod(map(int, term.split("*"))) for term in found.group(1).split("+"))
    assert gdn_chunk_scratch(65, 63, 3) == 2 * 3 * floats
    assert math.prod(OpenChunk.shapes(1, 2, 32, 64)["v"]) == 63 * 2 * 64
