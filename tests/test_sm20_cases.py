"""The small cases that compute-sanitizer runs (tools/lab/sanitize.py): complete, clean in the emulator, alike everywhere."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from planted import faulty, in_a_child

from fermi_engine.compare import Arrays, Case, Exact
from fermi_engine.errors import DeviceError
from fermi_engine.kernels import sm20
from fermi_engine.kernels.gpu import Device, open_device
from tests.devices import on_devices
from tests.sm20_cases import CASES, FAULTS, Bench

EMULATORS = {"checked": {"mode": "checked"}, "shuffled": {"seed": 5}}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_devices(metafunc, "device", tuple(EMULATORS))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_device("cuda") if request.param == "cuda" else open_device("emulated", **EMULATORS[request.param])
    yield opened
    opened.close()


@functools.cache
def plain(name: str) -> tuple[Arrays, frozenset[str]]:
    """Results in the emulator as it is, and the entry points that were launched."""
    device = open_device("emulated")
    bench = Bench(device)
    found = bench.run(CASES[name])
    device.close()
    return found, frozenset(device.launched)


@pytest.mark.parametrize("name", CASES)
def test_case(device: Device, name: str) -> None:
    expected, _ = plain(name)
    verdict = Exact().judge(Bench(device).run(CASES[name]), Case({}, expected, {})) if expected else None
    assert verdict is None or verdict.passed, verdict


def test_every_entry_point_is_launched() -> None:
    assert set().union(*(plain(name)[1] for name in CASES)) == set(sm20.entries())


def unwritten(found: Arrays) -> list[str]:
    """What nobody has written is NaN, or an integer in the thousand millions, in the emulator."""
    return [part for part, array in found.items()
            if not (np.isfinite(array).all() if array.dtype.kind == "f" else np.abs(array).max() < 1 << 20)]


@pytest.mark.parametrize("name", CASES)
def test_every_element_is_written(name: str) -> None:
    assert unwritten(plain(name)[0]) == []


def is_clean(case: str) -> bool:
    """What the tools of compute-sanitizer look for, by the emulator."""
    try:
        return not unwritten(Bench(open_device("emulated", mode="checked")).run(CASES[case]))
    except DeviceError:
        return False


@pytest.mark.parametrize("tool", FAULTS)
def test_the_planted_faults_show(tool: str, tmp_path: Path) -> None:
    """Those that each tool must see on a card."""
    fault = FAULTS[tool]
    assert is_clean(fault.case)
    with faulty(tmp_path, fault.file, fault.right, fault.wrong):
        assert not in_a_child(lambda: is_clean(fault.case))
