"""GPU prefill with the vendor's products: not our bits, but our logits as far as float32 goes, whatever the schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fermi_engine import Engine
from fermi_engine.errors import DeviceError
from fermi_engine.gpu import stream as gpu_stream
from fermi_engine.kernels.device_arrays import DeviceArray, DeviceMatrix
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.kernels.sm20_vendor import VendorKernels
from tests.gpu_cases import NOISE_DRAWS, cpu_run, engines, fresh, hybrid, ids_for, packs, plain, run

PROMPTS = ((70, 1), (100, 2), (150, 0))  # length, seed


def probabilities(engine: Engine, hidden: np.ndarray) -> np.ndarray:
    logits = engine.decoder.logits(hidden)[0].astype(np.float64)
    shifted = np.exp(logits - logits.max())
    return shifted / shifted.sum()


def divergence(right: np.ndarray, found: np.ndarray) -> float:
    """Kullback-Leibler, of distributions."""
    return float(np.sum(right * np.log(right / found)))


@pytest.fixture(scope="module")
def judge(engines) -> Callable[[str, Callable[[np.ndarray], np.ndarray]], None]:
    """Holds prefills of the PROMPTS to the logits row: their mean divergence from the CPU's float32 path is at most twice that
    of this path from itself when each layer's input moves by one unit in the last place."""
    known: dict[str, tuple[list[np.ndarray], float]] = {}

    def learn(name: str) -> tuple[list[np.ndarray], float]:
        engine, rows, noise = engines[name], [], []
        for length, seed in PROMPTS:
            ids = ids_for(engine, length, seed)
            rows.append(probabilities(engine, cpu_run(engine, ids)["hidden"]))
            draws = [probabilities(engine, cpu_run(engine, ids, draw)["hidden"]) for draw in range(NOISE_DRAWS)]
            noise += [divergence(rows[-1], draw) for draw in draws]
        return rows, float(np.mean(noise))

    def judged(name: str, prefill: Callable[[np.ndarray], np.ndarray]) -> None:
        if name not in known:
            known[name] = learn(name)
        rows, noise = known[name]
        engine = engines[name]
        found = [divergence(right, probabilities(engine, prefill(ids_for(engine, *prompt))))
                 for right, prompt in zip(rows, PROMPTS, strict=True)]
        assert 0 < np.mean(found) <= 2 * noise

    return judged


@pytest.mark.parametrize(("slots", "token_block"), [*itertools.product([1, 2, 3], [None, 64, 256])])
def test_slots_and_blocks_leave_the_logits(engines, judge, slots, token_block):
    prefill = hybrid(engines["moe"], slots=slots, token_block=token_block, gemm="vendor")
    judge("moe", lambda ids: prefill.run(ids, fresh(engines["moe"])))
    assert prefill.last.gemm.startswith("NumPy")
    assert "products by NumPy" in prefill.last.line()


@pytest.mark.parametrize("name", ["dense", "moe-q8_0"])
def test_other_formats_and_families_leave_the_logits(engines, judge, name):
    prefill = hybrid(engines[name], gemm="vendor")
    judge(name, lambda ids: prefill.run(ids, fresh(engines[name])))


@pytest.mark.parametrize("failing", [1, 2, 5])
def test_refused_page_locks_leave_the_logits(engines, judge, monkeypatch, failing):
    monkeypatch.setattr(gpu_stream, "RING_BYTES", 10_000)
    engine, notes = engines["moe"], []
    device = EmulatedDevice(seed=failing)
    device.faults.fail("pinned", failing)
    vram = hybrid(engine, gemm="vendor").plan(0, 70).total - 1
    prefill = hybrid(engine, device, notes, vram=vram, gemm="vendor")
    judge("moe", lambda ids: prefill.run(ids, fresh(engine)))
    assert len(notes) == 1
    assert prefill.ledger.peak <= vram


def test_the_bits_are_not_promised(engines, plain):
    """Else nothing here would tell the two apart."""
    assert run(engines["moe"], ids_for(engines["moe"]), gemm="vendor") != plain["moe"]


def test_the_ledger_plans_for_the_expanded_matrix(engines):
    engine, device = engines["moe"], EmulatedDevice()
    prefill = hybrid(engine, device, gemm="vendor")
    prefill.run(ids_for(engine, 20), fresh(engine))
    sizes = prefill.last.plan.sizes
    largest = max(matrix.rows * matrix.cols for matrix in dense_matrices(engine) if matrix.format != "f32")
    assert sizes["expanded weights"] == 4 * largest
    assert prefill.ledger.used == device.total_bytes - device.free_bytes
    assert "expanded weights" not in hybrid(engine).plan(0, 20).sizes


def dense_matrices(engine: Engine) -> list[Any]:
    parts = [part for layer in engine.decoder.layers for part in (layer.mixer, layer.ffn, layer.ffn.shared_expert)]
    found = [value for part in parts for value in vars(part).values()]
    return [value for value in found if hasattr(value, "cols") and not hasattr(value, "stride")]


def test_a_product_is_the_expanded_matrix_by_the_vendor():
    """Into some columns of a wider result, and gathered rows by the own kernel."""
    device = EmulatedDevice()
    stream, rng = device.stream("test"), np.random.default_rng(0)
    m, n, k = 5, 16, 64
    stored = rng.integers(0, 256, (n // 8, k // 32, 144), np.uint8)
    stored[..., :16] = rng.uniform(0.01, 0.02, (n // 8, k // 32, 8)).astype(np.float16).view(np.uint8)
    x, out = rng.standard_normal((m, k), np.float32), np.full((m, 40), 7, np.float32)
    buffers = {name: device.alloc(array.nbytes, name) for name, array in (("x", x), ("w", stored), ("out", out))}
    for name, array in (("x", x), ("w", stored), ("out", out)):
        device.h2d(buffers[name], array, stream)
    matrix = DeviceMatrix("q4_0", n, k, DeviceArray.within(buffers["w"], (stored.nbytes,), np.uint8))
    scratch = DeviceArray.within(device.alloc(4 * n * k, "scratch"), (n * k,))
    on_device = DeviceArray.within(buffers["x"], x.shape), DeviceArray.within(buffers["out"], out.shape)
    VendorKernels(device, stream, scratch).gemm(on_device[0], matrix, on_device[1], column=8)
    on_device[1].download(device, out, stream)
    floats = np.empty((n, k), np.float32)
    DeviceArray.within(scratch.buffer, (n, k)).download(device, floats, stream)
    right, bound = x.astype(np.float64) @ floats.T, np.abs(x.astype(np.float64)) @ np.abs(floats.T)
    assert (np.abs(out[:, 8 : 8 + n] - right) <= 1.01 * k * 2.0**-24 * bound).all()
    assert (np.delete(out, np.s_[8 : 8 + n], axis=1) == 7).all()
    with pytest.raises(ValueError, match=r"the scratch is too small for a q4_0 matrix \[16, 64\]"):
        VendorKernels(device, stream, scratch.rows(0, n * k - 1)).gemm(on_device[0], matrix, on_device[1])


def test_without_the_vendors_library_nothing_is_begun(engines, monkeypatch):
    device = EmulatedDevice()

    def none() -> str:
        raise DeviceError("the vendor's sgemm is not available")

    monkeypatch.setattr(device, "vendor", none)
    with pytest.raises(DeviceError, match="not available"):
        hybrid(engines["moe"], device, gemm="vendor")
    assert device.faults.calls["alloc"] == device.faults.calls["copy"] == 0
    hybrid(engines["moe"], device)  # the own products ask for none
