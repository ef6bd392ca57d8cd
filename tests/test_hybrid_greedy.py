"""Greedy answers of GPU prefill with CPU decode, against the CPU over chats with the trained model: tools/hybrid_greedy.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fermi_engine import Engine, EngineConfig
from fermi_engine.convert import convert
from fermi_engine.state import HybridState
from tests.devices import on_devices
from tools import hybrid_greedy
from tools.hybrid_greedy import CHATS, SHARE, STEPS, TINY, Float32Prefill, Report, compare

FEW = CHATS if os.environ.get("FERMI_SOAK") else 6  # chats in the emulator: three seconds each


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_devices(metafunc, "report", ("emulated",), scope="module")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(TINY, tmp_path_factory.mktemp("greedy") / "tiny.pack", "q4_0")


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest, pack: Path) -> Report:
    is_card = request.param == "cuda"
    mixed = Engine.load(pack, config=EngineConfig(threads=None if is_card else 1, prefill="gpu", device=request.param))
    found = compare(pack, mixed, *(("full", CHATS) if is_card else ("short", FEW)))
    assert mixed.gpu.prefill.last is not None
    return found


def test_the_tokens_are_those_of_the_cpu(report: Report) -> None:
    assert report.unlike == ()
    assert report.positions in (FEW * STEPS, CHATS * STEPS)
    assert report.compared >= SHARE * report.positions


def test_the_logits_differ_as_rounding_makes_them(report: Report) -> None:
    """The hybrid run stands to the oracle as one with inputs moved by one unit in the last place, of which the worst counts
    twice: there are few."""
    assert report.divergence <= 2 * report.noise_divergence


def test_format_loss_is_reported(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    """And larger than what the device adds, else the report would not tell them apart."""
    with capsys.disabled():
        print("", *report.lines(), sep="\n")
    assert report.divergence < report.format_divergence < 0.01
    assert report.format_agreement > 0.98


class Faulty(Float32Prefill):
    """Leaves the convolution of one layer behind one token late."""

    def hidden(self, ids: np.ndarray, state: HybridState, *rest: Any) -> np.ndarray | None:
        found = super().hidden(ids, state, *rest)
        if found is not None:
            state.layers[0].conv[...] = np.roll(state.layers[0].conv, 1, axis=0)
        return found


@pytest.mark.parametrize(("prefill", "passes"), [(Float32Prefill, True), (Faulty, False)])
def test_a_wrong_state_is_noticed(pack: Path, prefill: type[Float32Prefill], passes: bool) -> None:
    engine = Engine.load(pack, config=EngineConfig(threads=1))
    engine.gpu = prefill(engine)
    assert compare(pack, engine, "short", 3).passed == passes


def test_other_tokens_fail_the_comparison() -> None:
    """Where the margin counts; within the noise they do not, and too many of those fail as well."""
    truth = np.zeros((1, 10, 4), np.float32)
    truth[..., 1], truth[:, 9, 1] = 1.0, 1e-3
    draw = truth + np.float32(1e-3)
    run = hybrid_greedy.Run(truth[0], [1] * 10, 5)
    other = truth[..., [0, 2, 1, 3]]
    same, wrong = (hybrid_greedy._report([run], hybrid, [draw], truth) for hybrid in (truth, other))
    assert (same.compared, same.left_out, same.unlike, same.passed) == (9, ((0, 9),), (), False)
    assert wrong.unlike == tuple((0, step) for step in range(9))
