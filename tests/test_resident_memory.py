"""The resident model's memory and failures: the ledger, what does not fit, and a real geometry within 6 GiB."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fermi_engine.errors import DeviceError, DeviceMemoryError
from fermi_engine.gpu.resident import CAPACITY_STEP, Resident
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.kernels.threads import default_threads
from fermi_engine.model.decoder import Decoder
from fermi_engine.state import HybridState
from tests.resident_cases import Hollow, Unread, dense, drive, everything, fresh, ids_for, resident
from tools.bench.geometries import geometry

MOST_LAUNCHES = 10  # of a layer of one token


class Metered(EmulatedDevice):
    """Keeps the most bytes it ever had handed out."""

    most = 0

    def alloc(self, nbytes: int, name: str = "buffer") -> Any:
        buffer = super().alloc(nbytes, name)
        self.most = max(self.most, self.total_bytes - self.free_bytes)
        return buffer


@pytest.mark.parametrize("gemm", ["own", "vendor"])
def test_minicpm_fits_6_gib_with_10240_tokens(gemm):
    """Every launch and copy of the released text model's sizes, checked; the ledger counts what is handed out."""
    c, device = geometry("minicpm-v-4.6"), Hollow(6 << 30)
    weights = Unread(c, "q8_0")
    from fermi_engine import kernels

    decoder = Decoder(weights, kernels.get(None, default_threads()), "f32")
    r, state = Resident(device, weights, decoder, gemm=gemm, note=lambda text: None), HybridState.fresh(c, 64)
    r.prefill(np.zeros(10240, np.int32), state)
    assert r.ledger.peak < 6 << 30
    assert r.ledger.used == device.total_bytes - device.free_bytes
    r.decode(0, state)
    assert r.position(state) == 10241
    per_layer = (len(r.token.layers) - 2) / c.num_hidden_layers
    assert per_layer <= MOST_LAUNCHES
    held = r.ledger.held()
    assert held["embedding and head"] + sum(nbytes for name, nbytes in held.items() if ", layer" in name) < 0.86e9
    r.close()
    assert device.free_bytes == device.total_bytes


def test_a_token_takes_few_launches_whatever_the_layer(dense):
    for engine in dense.values():
        r, state = resident(engine), fresh(engine)
        r.decode(1, state)
        kinds = engine.config.layer_types
        assert len(r.token.layers) == 2 + 5 * kinds.count("linear_attention") + 7 * kinds.count("full_attention")


def test_a_token_costs_the_host_one_wait(dense, monkeypatch):
    engine = dense["q8_0"]
    device = EmulatedDevice()
    r, state = resident(engine, device), fresh(engine)
    r.prefill(ids_for(engine, 5), state)
    waits, streams = [], (r.compute, r.results)
    for stream in streams:
        wait = stream.synchronize
        monkeypatch.setattr(stream, "synchronize", lambda wait=wait: (waits.append(1), wait())[1])
    monkeypatch.setattr(device, "synchronize", lambda: waits.append(1))
    r.decode(3, state)
    assert len(waits) == 1
    r.greedy(3, state)
    assert len(waits) == 2


def test_the_peak_is_what_the_device_handed_out(dense):
    engine = dense["q8_0"]
    device = Metered()
    r, state = resident(engine, device), fresh(engine)
    for tokens in (20, 300, 100):
        r.prefill(ids_for(engine, tokens), state)
        assert r.ledger.used == device.total_bytes - device.free_bytes
    assert r.ledger.peak == device.most
    r.close()
    assert device.free_bytes == device.total_bytes


def test_the_cache_grows_and_changes_no_bit(dense):
    engine = dense["q8_0"]
    ids = ids_for(engine, CAPACITY_STEP + 10)
    calls = [("prefill", ids[:-12]), *(("decode", int(token)) for token in ids[-12:])]
    grown, at_once = resident(engine), resident(engine)
    state, other = fresh(engine), fresh(engine)
    at_once.admit(other, 2 * CAPACITY_STEP, False)
    got, right = (np.stack(drive(r, s, calls)) for r, s in ((grown, state), (at_once, other)))
    assert np.array_equal(got, right)
    assert everything(grown, state) == everything(at_once, other)


def test_what_does_not_fit_is_refused_in_one_line(dense):
    engine, device = dense["q8_0"], EmulatedDevice()
    with pytest.raises(DeviceMemoryError, match=r"take \d+ bytes .* allowed are left: raise --vram, or run with --decode cpu"):
        resident(engine, device, vram=100_000)
    assert device.free_bytes == device.total_bytes
    r, state = resident(engine, device), fresh(engine)
    r.decode(1, state)
    tight = resident(engine, device, vram=r.ledger.used + 100_000)
    other = fresh(engine)
    tight.decode(1, other)
    for tokens in (3000, 2):
        with pytest.raises(DeviceMemoryError, match="raise --vram, or run with --decode cpu"):
            tight.prefill(ids_for(engine, tokens), other)
        assert tight.position(other) == 1
    assert np.array_equal(tight.decode(2, other), r.decode(2, state))


@pytest.mark.parametrize(("kind", "nth"), [("alloc", 3), ("alloc", 8), ("alloc", 9), ("copy", 5), ("copy", 66), ("launch", 1),
                                           ("launch", 100), ("launch", 150)])
def test_a_failure_is_one_line_and_the_device_goes_on(dense, kind, nth):
    engine, device = dense["q8_0"], EmulatedDevice()
    device.faults.fail(kind, nth)
    calls = [("prefill", ids_for(engine, 20)), ("decode", 4), ("decode", 5), ("decode", 6)]
    states = [fresh(engine), fresh(engine)]
    made: list[Resident] = []

    def run(state: HybridState) -> list[np.ndarray]:
        if not made:
            made.append(resident(engine, device))
        return drive(made[0], state, calls)

    with pytest.raises(DeviceError, match="injected") as caught:
        run(states[0])
    assert "\n" not in str(caught.value)
    assert states[0].position == 0
    right = drive(resident(engine), fresh(engine), calls)
    assert all(np.array_equal(a, b) for a, b in zip(run(states[1]), right, strict=True))
    assert made[0].ledger.used == device.total_bytes - device.free_bytes


def test_an_interrupt_leaves_the_device_usable(dense):
    engine, device = dense["q8_0"], EmulatedDevice(seed=3)
    r, state, ids = resident(engine, device, token_block=64), fresh(engine), ids_for(engine, 200)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        r.prefill(ids, state, stop)
    assert r.position(state) == 0
    assert np.array_equal(r.prefill(ids, state), resident(engine).prefill(ids, fresh(engine)))


@pytest.mark.parametrize(("changes", "reason"), [
    ({"family": "moe"}, "it has 16 experts a layer"),
    ({"key_dim": 16}, "delta rule heads of 16"),
    ({"head_dim": 512}, "heads of 512, at most 256"),
    ({"intermediate": 9000 // 32 * 32}, "rows of 8992 weights, at most 8192"),
])
def test_models_that_do_not_run_say_why(tmp_path, changes, reason):
    from fermi_engine import Engine, EngineConfig
    from fermi_engine.convert import convert
    from tools.make_checkpoint import make_checkpoint

    checkpoint = make_checkpoint(tmp_path / "model", **{"layers": 4, "family": "dense", "key_dim": 32, **changes})
    engine = Engine.load(convert(checkpoint, tmp_path / "p.pack", format="q8_0"), config=EngineConfig(threads=1))
    with pytest.raises(DeviceError, match=f"the model cannot live on the GPU: {reason}.*; run with --decode cpu"):
        resident(engine)


def test_a_refused_prompt_costs_later_ones_nothing(dense):
    """A cache that has grown for a prompt which is then refused gives its memory up again."""
    engine, ids = dense["q8_0"], ids_for(dense["q8_0"], 3000)
    free, state = resident(engine), fresh(engine)
    right = [free.prefill(ids[:200], state), free.prefill(ids[:3], state)]
    tight, other = resident(engine, vram=free.ledger.peak), fresh(engine)
    assert np.array_equal(tight.prefill(ids[:200], other), right[0])
    kept = []
    for tokens in range(20_000, 1200, -400):  # nothing of those fits, then their cache, then all
        try:
            tight.admit(other, tokens, True)
        except DeviceMemoryError:
            kept.append(tight._capacity)
    assert max(kept) > 1024
    assert kept[0] == 0
    assert len(kept) < 40
    assert np.array_equal(tight.prefill(ids[:3], other), right[1])
    assert np.array_equal(tight.prefill(ids[:200], fresh(engine)), right[0])
