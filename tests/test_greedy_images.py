"""Greedy answers about images on the GPU against the CPU engine and the reference: tools/greedy_images.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fermi_engine.model import gpu_inputs
from tests.conftest import SOAK
from tests.devices import on_devices
from tools import greedy_images
from tools.greedy_images import MODELS, PROMPTS, STEPS, Truth, compare, gpu_engine, made
from tools.hybrid_greedy import SHARE

FEW = {"prompts": 3, "steps": 6, "draws": 3}
_packs: dict[str, Path] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_devices(metafunc, "backend", ("emulated",))


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param
    if name not in _packs:
        _packs[name] = made(name, tmp_path_factory.mktemp(name))
    return _packs[name]


@pytest.mark.parametrize("pack", list(MODELS), indirect=True)
def test_the_tokens_are_those_of_the_reference(pack: Path, backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, Any] = {} if SOAK or backend == "cuda" else FEW
    report = compare(pack, gpu_engine(pack, backend), **sizes)
    with capsys.disabled():
        print("", *report.lines(), sep="\n")
    assert report.positions == sizes.get("prompts", PROMPTS) * sizes.get("steps", STEPS)
    assert list(report.unlike.values()) == [[], [], []]
    assert report.compared >= SHARE * report.positions
    assert report.passed


def one_late(device: Any, stream: Any, x: Any, runs: Any, splice: Any = gpu_inputs.splice) -> None:
    splice(device, stream, x, [(first + 1, rows) for first, rows in runs])


@pytest.mark.parametrize("pack", ["dense"], indirect=True)
@pytest.mark.parametrize("fault", ["shift", "slots"])
def test_a_wrong_position_or_place_is_noticed(pack: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = gpu_engine(pack, "emulated")
    if fault == "slots":
        monkeypatch.setattr("fermi_engine.gpu.resident.splice", one_late)
    else:
        decode = engine.resident.decode
        monkeypatch.setattr(engine.resident, "decode", lambda token, state, shift: decode(token, state))
    report = compare(pack, engine, 2, 4, 1)
    assert not report.passed
    assert report.divergence["GPU"] > 100 * report.divergence["CPU engine"]


def test_other_tokens_fail_the_comparison() -> None:
    """Where the margin counts; within the noise they do not, and too many of those fail as well."""
    exact = np.zeros((10, 4))
    exact[:, 1], exact[9, 1] = 1.0, 1e-3
    right = [Truth(exact, [1] * 10, [exact + 1e-3])]
    same, wrong = (greedy_images._report(right, {"GPU": run[None]}, 5) for run in (exact, exact[:, [0, 2, 1, 3]]))
    assert (same.compared, same.unlike, same.passed) == (9, {"GPU": []}, False)
    assert wrong.unlike == {"GPU": [(0, step) for step in range(9)]}
