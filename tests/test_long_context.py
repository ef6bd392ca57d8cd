"""Long contexts: attention by blocks against the whole matrix, and codes hidden there through the GPU: tools/long_context.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fermi_engine import EngineConfig
from fermi_engine.kernels import dispatch
from tests.conftest import SOAK
from tests.devices import on_devices
from tools import long_context
from tools.long_context import FULL, KINDS, LENGTHS, SMALL, errors, needles
from tools.tiny_accuracy import ROOT
from tools.tiny_tasks import DEPTHS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_devices(metafunc, "backend", ("emulated",))


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_err_as_the_whole_matrix_does(backend: str, length: int) -> None:
    found = errors(backend, [length], FULL if backend == "cuda" else SMALL)
    assert [error.kernel for error in found] == ["prefill", "token"] * len(KINDS)
    assert [error.line() for error in found if not error.passed] == []


@pytest.mark.parametrize("name", dispatch.supported())
def test_blocks_on_the_cpu_err_as_the_whole_matrix_does(name: str) -> None:
    found = errors(name, sizes=SMALL)
    assert [error.kernel for error in found] == ["cache", "view"] * (len(KINDS) * len(LENGTHS))
    assert [error.line() for error in found if not error.passed] == []


def test_an_error_over_twice_that_of_the_whole_matrix_fails() -> None:
    error = long_context.Error("prefill", 1000, "flat", 2e-7, 1e-7)
    assert error.passed
    assert not dataclasses.replace(error, found=2.1e-7).passed


def test_codes_are_found_through_the_gpu_where_the_cpu_finds_them(backend: str) -> None:
    """At every depth where there is time. Whether the CPU finds them is test_tiny.py's business."""
    tokens, every = (10000, 1) if backend == "cuda" else (2000, 1) if SOAK else (400, 4)
    ways = {"gpu": EngineConfig(prefill="gpu", device=backend), "cpu": EngineConfig()}
    found = needles(ROOT / "golden" / "tiny", tokens, 1, ways, every)
    assert found["gpu"].shape == (1, len(DEPTHS[::every]))
    assert np.all(found["gpu"] >= found["cpu"])
    assert found["cpu"].any()
