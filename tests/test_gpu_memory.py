"""GPU prefill's memory: the ledger, what does not fit, refused page locks, and failures that leave everything as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fermi_engine import Engine, EngineConfig
from fermi_engine.errors import DeviceError, DeviceMemoryError
from fermi_engine.gpu import choice as gpu_choice
from fermi_engine.gpu import stream as gpu_stream
from fermi_engine.kernels.emulated import EmulatedDevice
from tests.gpu_cases import engines, fresh, hybrid, ids_for, outcome, packs, plain, run


@pytest.mark.parametrize("failing", [1, 2, 3, 5, 7, None])
@pytest.mark.parametrize("streamed", [False, True])
def test_refused_page_locks_change_no_bit_and_warn_once(engines, plain, monkeypatch, failing, streamed):
    """One refusal ends page-locking; what follows goes through the ring, or straight where that was refused, too."""
    monkeypatch.setattr(gpu_stream, "RING_BYTES", 10_000)
    engine, ids = engines["moe"], ids_for(engines["moe"])
    vram = hybrid(engine).plan(0, len(ids)).total - 1 if streamed else None
    device, notes = EmulatedDevice(seed=failing), []
    for nth in (failing,) if failing else range(1, 20):
        device.faults.fail("pinned", nth)
    assert run(engine, ids, device, notes, vram=vram) == plain["moe"]
    assert len(notes) == 1
    assert notes[0].startswith("warning: page-locking")
    assert "--load resident" in notes[0]


class Metered(EmulatedDevice):
    """Keeps the most bytes it ever had handed out."""

    most = 0

    def alloc(self, nbytes: int, name: str = "buffer") -> Any:
        buffer = super().alloc(nbytes, name)
        self.most = max(self.most, self.total_bytes - self.free_bytes)
        return buffer


def test_the_peak_is_what_the_device_handed_out_and_the_plan_said(engines):
    engine = engines["moe"]
    least = hybrid(engine, token_block=64).plan(0, 300)
    right = {tokens: run(engine, ids_for(engine, tokens)) for tokens in (20, 300, 100)}
    floor = least.total - sum(nbytes for name, nbytes in least.sizes.items() if ", layer" in name)
    for vram in range(floor + 200_000, least.total + 100_000, 70_000):
        device = Metered()
        prefill = hybrid(engine, device, vram=vram)
        for tokens in right:  # what the longest pushes out has to come back
            state = fresh(engine)
            assert outcome(prefill.run(ids_for(engine, tokens), state), state) == right[tokens]
            assert prefill.ledger.used == device.total_bytes - device.free_bytes
            held, sizes = prefill.ledger.held(), prefill.last.plan.sizes
            assert held.keys() == sizes.keys()
            assert all(held[name] >= nbytes for name, nbytes in sizes.items())
        assert prefill.ledger.peak == device.most <= vram
        prefill.close()
        assert device.free_bytes == device.total_bytes


def test_weights_that_a_failed_call_pushed_out_come_back(engines):
    """A long prompt takes the room of resident layers, and then gets none of its own."""
    engine, device = engines["moe"], EmulatedDevice()
    prefill = hybrid(engine, device, vram=hybrid(engine).plan(0, 300).total - 1)
    ids = ids_for(engine, 20)
    before = prefill.run(ids, fresh(engine))
    assert prefill.last.plan.resident == 4 > prefill.plan(0, 300).resident
    device.faults.fail("alloc")
    with pytest.raises(DeviceMemoryError, match="injected"):
        prefill.run(ids_for(engine, 300), fresh(engine))
    assert len([name for name in prefill.ledger.held() if ", layer" in name]) < 4
    np.testing.assert_array_equal(prefill.run(ids, fresh(engine)), before)


def test_what_does_not_fit_is_refused_before_any_work(engines):
    device = EmulatedDevice()
    prefill = hybrid(engines["moe"], device, vram=100_000)
    with pytest.raises(DeviceMemoryError, match=r"takes at least \d+ bytes .* 100000 are allowed: raise --vram"):
        prefill.run(ids_for(engines["moe"]), fresh(engines["moe"]))
    assert device.faults.calls["alloc"] == device.faults.calls["copy"] == 0


@pytest.mark.parametrize(("kind", "nth"), [("alloc", 1), ("alloc", 6), ("copy", 1), ("copy", 60), ("launch", 1), ("launch", 70)])
def test_a_failure_is_one_line_and_leaves_the_session_usable(engines, packs, kind, nth):
    cpu = engines["moe"]
    options = EngineConfig(activations="f32", threads=1, prefill="gpu", device="emulated")
    engine = Engine.load(packs["moe"], config=options)
    ids = ids_for(engine).tolist()
    session = engine.session()
    session.decode(ids[0])
    device = EmulatedDevice()
    device.faults.fail(kind, nth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_choice, "open_device", lambda kind: device)
        with pytest.raises(DeviceError, match="injected") as caught:
            session.prefill(ids[1:])
    assert "\n" not in str(caught.value)
    assert session.tokens == tuple(ids[:1])
    assert engine.gpu.prefill.ledger.used == device.total_bytes - device.free_bytes
    engine.gpu, gpu = None, engine.gpu
    one = cpu.session()
    one.decode(ids[0])
    assert np.array_equal(session.prefill(ids[1:]), one.prefill(ids[1:]))
    engine.gpu = gpu  # and the device, which has got over it, gives its usual bits
    again, right = engine.session(), Engine.load(packs["moe"], config=options).session()
    assert np.array_equal(again.prefill(ids), right.prefill(ids))


def test_a_device_that_breaks_stays_broken_in_one_line(engines):
    engine, device = engines["moe"], EmulatedDevice()
    prefill, state = hybrid(engine, device), fresh(engine)
    device.close()
    for _ in range(2):
        with pytest.raises(DeviceError, match="the device is closed"):
            prefill.run(ids_for(engine), state)
    assert state.position == 0


def test_an_interrupt_frees_the_device(engines):
    engine, device = engines["moe"], EmulatedDevice(seed=3)
    prefill, state = hybrid(engine, device), fresh(engine)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prefill.run(ids_for(engine), state, stop)
    assert prefill.ledger.held() == prefill.plan(0, len(ids_for(engine))).sizes
    assert state.position == 0
    for length in (200, 150):  # the longer one gives buffers back, which must not be in use any more
        state, ids = fresh(engine), ids_for(engine, length)
        assert outcome(prefill.run(ids, state), state) == run(engine, ids)
