"""Every stage that sm_20 has, in the emulator and on a card, against the reference; and that the table is all there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fermi_engine import verify
from fermi_engine.compare import Arrays, Case, Exact
from fermi_engine.errors import BackendError, DeviceError, VerifyError
from fermi_engine.kernels import sm20
from fermi_engine.kernels.cpu import CpuKernels
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.kernels.gpu import Device, open_device
from fermi_engine.stages import device_run
from fermi_engine.stages.device_run import DeviceRun, Reopened
from fermi_engine.stages.table import STAGES, Stage, find_stage
from tests.devices import no_cuda, on_devices
from tests.oracle import tensors
from tests.stages import ORACLES

GOLDEN = verify.golden_directory()
ON_GPU = [stage for stage in STAGES if stage.gpu]
OUTSIDE = {"selftest"}  # runs before any work, with known answers of its own: kernels/selftest.py
each_stage = pytest.mark.parametrize("stage", ON_GPU, ids=lambda stage: stage.name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_devices(metafunc, "device", ("emulated",), scope="module")


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_device(request.param)
    yield opened
    opened.close()


def golden(stage: Stage) -> Case:
    return verify.load(GOLDEN, stage.name).case


def differing(a: Arrays, b: Arrays) -> list[str]:
    """Outputs that differ in a byte."""
    assert a.keys() == b.keys()
    return [name for name in a if not Exact().judge(a, Case({}, {name: b[name]}, {})).passed]


def computed(stage: Stage, device: Device, inputs: Arrays, shift: int = 0) -> tuple[Arrays, set[str]]:
    """Outputs, and which kernels ran."""
    before = device.launched.copy()
    run = DeviceRun(device, shift)
    got = stage.gpu.compute(run, inputs)
    run.close()
    return got, set(device.launched - before)


# the table


def test_every_kernel_of_the_gpu_is_in_the_table() -> None:
    about = {entry for stage in ON_GPU for entry in stage.gpu.ops}
    assert about | OUTSIDE == set(sm20.entries())
    assert not about & OUTSIDE


def test_the_goldens_launch_every_kernel() -> None:
    """And a row about kernels those that it names, no others."""
    device, launched = EmulatedDevice(), set()
    for stage in ON_GPU:
        _, ran = computed(stage, device, golden(stage).inputs)
        launched |= ran
        assert ran, stage.name
        assert ran <= set(stage.gpu.ops) or not stage.gpu.ops, stage.name
    assert launched == set(sm20.entries()) - OUTSIDE


def test_a_stage_runs_where_it_was_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device named and with no help from the CPU's kernels; on the CPU without any device."""
    opened: list[tuple[str, Any]] = []

    def recording(kind: str) -> Device:
        opened.append((kind, open_device(kind)))
        return opened[-1][1]

    def no_cpu(*args: Any) -> None:
        raise AssertionError("a CPU kernel ran")

    stage = find_stage("rms_norm")
    monkeypatch.setenv("FERMI_BACKEND", "scalar")
    monkeypatch.setattr(device_run, "open_device", recording)
    stage.candidate(golden(stage).inputs, "scalar")
    assert opened == []
    monkeypatch.setattr(CpuKernels, "_run", no_cpu)
    for stage in ON_GPU:
        if stage.gpu.ops:
            stage.candidate(golden(stage).inputs, "emulated")
            kind, device = opened.pop()
            assert (kind, type(device), bool(device.launched), opened) == ("emulated", EmulatedDevice, True, []), stage.name
    if no_cuda():
        with pytest.raises(DeviceError):
            stage.candidate(golden(stage).inputs, "cuda")


def test_a_row_without_a_form_raises() -> None:
    with pytest.raises(BackendError, match=r"stage exp_f32 has no form for emulated; it runs on avx2, ssse3, scalar"):
        find_stage("exp_f32").candidate({}, "emulated")
    with pytest.raises(BackendError, match=r"stage gdn_chunk has no form for scalar; it runs on emulated, cuda"):
        find_stage("gdn_chunk").candidate({}, "scalar")
    with pytest.raises(VerifyError, match=r"stage exp_f32 has no form for emulated; it runs on avx2"):
        verify.replay("emulated", ["swiglu", "exp_f32"])


# against the reference


@each_stage
def test_stage(stage: Stage, device: Device) -> None:
    """Within the row's rule of the reference, inputs as they were; and the same bits at addresses that no vector load likes,
    and in another order of threads and blocks."""
    oracle, shuffled = ORACLES[stage.name], EmulatedDevice(seed=3)

    @settings(max_examples=max(3, settings().max_examples // (4 if stage.gpu.ops else 16)))
    @given(st.integers(0, 2**32 - 1), st.fixed_dictionaries(dict(oracle.structure)))
    def holds(seed: int, structure: dict[str, Any]) -> None:
        inputs = oracle.inputs(seed, **structure)
        assume(oracle.usable(tensors(inputs)))
        given_to = {name: array.copy() for name, array in inputs.items()}
        got, ran = computed(stage, device, given_to)
        assert differing(given_to, inputs) == []
        assert ran <= set(stage.gpu.ops) or not stage.gpu.ops
        verdict = stage.gpu.judge(got, oracle.case(inputs))
        assert verdict.passed, verdict
        moved, _ = computed(stage, device if device.name != shuffled.name else shuffled, inputs, shift=4)
        assert differing(moved, got) == []
    holds()
    shuffled.close()


@each_stage
def test_no_races_and_no_byte_beside_a_buffer(stage: Stage) -> None:
    """The golden in the emulator's checked mode."""
    case, device = golden(stage), EmulatedDevice(mode="checked")
    got, _ = computed(stage, device, case.inputs)
    device.close()
    assert stage.gpu.judge(got, case).passed


@pytest.mark.gpu
def test_every_golden_replays_on_a_card(request: pytest.FixtureRequest) -> None:
    if "gpu" not in request.config.getoption("-m") and no_cuda():
        pytest.skip(f"the goldens replayed on the emulated device only: {no_cuda()}")
    rows = verify.replay("cuda")
    assert [row.stage for row in rows] == [stage.name for stage in ON_GPU]
    assert [row for row in rows if not row.passed] == []


# failures


def test_a_device_that_fails_fails_its_stage_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first launch of a stage breaks the device, which stays broken until it is opened again."""
    run = EmulatedDevice._run

    def broken(self: EmulatedDevice, entry: sm20.Entry, *args: Any) -> None:
        if entry.name == "rms_norm":
            self._fail("launch of rms_norm failed: planted")
        run(self, entry, *args)
    monkeypatch.setattr(EmulatedDevice, "_run", broken)
    rows = verify.replay("emulated", ["gemm_f32", "rms_norm", "l2_norm"])
    assert [row.passed for row in rows] == [True, False, True]
    assert (rows[1].metric, rows[1].detail) == ("device error", "launch of rms_norm failed: planted")
    assert verify.first_divergence(rows).stage == "rms_norm"


def test_results_start_as_nan_and_memory_is_given_back() -> None:
    device = Reopened("emulated")
    with device.run() as run:
        assert np.isnan(run.get(run.empty(3, 2))).all()
        assert (run.get(run.empty(5, dtype=np.int32)) == np.iinfo(np.int32).min).all()
        assert run.put(np.zeros(4, np.float32)).address % 16 == 0
        held, opened = run.device.free_bytes, run.device
    with device.run() as run:
        assert run.device is opened
        assert run.device.free_bytes > held
        shifted = DeviceRun(opened, shift=4)
        assert shifted.put(np.zeros(4, np.float32)).address % 16 == 4
        assert shifted.put(np.zeros(4, np.float32), aligned=True).address % 16 == 0
    device.close()
