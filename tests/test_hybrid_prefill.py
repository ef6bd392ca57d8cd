"""Whole prefills on the GPU against the reference: what they leave behind errs as float32 does, decoding in between or not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fermi_engine import Engine
from fermi_engine.errors import DeviceError
from fermi_engine.gpu.prefill import HybridPrefill
from fermi_engine.kernels.gpu import Device, open_device
from fermi_engine.model.decoder import Decoder
from fermi_engine.state import HybridState, KVPages
from reference import decoder as reference
from tests.devices import on_devices
from tests.gpu_cases import engines, fresh, ids_for, packs
from tools import oracle
from tools.noise import nudge, one_ulp

MODELS = ("trained", "moe", "moe-q8_0", "dense")
DRAWS = 8
Arrays = dict[str, np.ndarray]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_devices(metafunc, "device", ("emulated",))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_device(request.param)
    yield opened
    opened.close()


def by_reference(model: reference.Decoder, ids: np.ndarray, seed: int | None = None) -> Arrays:
    """Last hidden row and state; with a seed every layer's input is moved by one unit in the last place."""
    generator = np.random.default_rng(seed)
    found: Arrays = {}
    with torch.no_grad():
        x, tables = model.embed(torch.from_numpy(ids)), model.rope_tables(torch.arange(len(ids)).expand(3, -1))
        for i, state in enumerate(model.initial_state()):
            x = x if seed is None else torch.from_numpy(one_ulp(x.numpy(), generator))
            x, state = model.forward_layer(i, x, state, *tables)
            found |= {f"{i}.{name}": array.numpy() for name, array in state.items()}
    return {"hidden": x[-1:].numpy(), **found}


def left(hidden: np.ndarray, state: HybridState) -> Arrays:
    """The same arrays of an engine's state."""
    found = {"hidden": hidden[-1:]}
    for i, layer in enumerate(state.layers):
        parts = dict(zip("kv", layer.filled(state.position), strict=True)) if isinstance(layer, KVPages) else vars(layer)
        found |= {f"{i}.{name}": array for name, array in parts.items()}
    return found


def on_cpu(engine: Engine, ids: np.ndarray, kv_format: str, seed: int | None = None) -> Arrays:
    """By the CPU's float32 path; with a seed every layer's input is moved by one unit in the last place."""
    decoder, state = Decoder(engine.pack, engine.kernels, "f32"), fresh(engine, kv_format)
    return left((decoder if seed is None else nudge(decoder, seed)).hidden(ids, state), state)


def on_gpu(engine: Engine, ids: np.ndarray, kv_format: str, device: Device, cuts: Sequence[int], gemm: str) -> Arrays:
    """By GPU prefill up to each of `cuts` and to the end; after each a token by the CPU."""
    prefill = HybridPrefill(device, engine.pack, engine.decoder, note=lambda _: None, gemm=gemm)
    state, begin = fresh(engine, kv_format), 0
    for cut in cuts:
        prefill.run(ids[begin:cut], state)
        engine.decoder.hidden(ids[cut : cut + 1], state)
        assert state.open_chunks.position != state.position
        begin = cut + 1
    hidden = prefill.run(ids[begin:], state)
    prefill.close()
    return left(hidden, state)


def assert_errs_as_float32(engine: Engine, device: Device, kv_format: str = "f32", cuts: Sequence[int] = (),
                           gemm: str = "own") -> None:
    """From the float64 reference the GPU may be twice as far as the worst of other float32 runs: the reference and the CPU
    path, each as it is and with layer inputs moved by one unit in the last place. The reference counts because it too adds
    long sums in order, as the CPU path does not. Keys and values in a shorter format are so on the CPU as well."""
    ids, model = ids_for(engine), oracle.decoder(engine.pack, "f32", torch.float64)
    truth, single = by_reference(model, ids), model.to(torch.float32)
    seeds = (None, *range(DRAWS))
    others = [by_reference(single, ids, seed) for seed in seeds] + [on_cpu(engine, ids, kv_format, seed) for seed in seeds]
    errors = [distances(other, truth) for other in others]
    found = distances(on_gpu(engine, ids, kv_format, device, cuts, gemm), truth)
    assert found.keys() == truth.keys()
    limits = {part: 2 * max(error[part] for error in errors) for part in truth}
    over = {part: (error, limits[part]) for part, error in found.items() if not error <= limits[part]}
    assert not over


def distances(got: Arrays, truth: Arrays) -> dict[str, float]:
    return {part: float(np.abs(got[part] - right).max(initial=0.0)) for part, right in truth.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_prefill(engines: dict[str, Engine], device: Device, name: str) -> None:
    assert_errs_as_float32(engines[name], device)


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_a_whole_prefill_with_the_vendors_products(engines: dict[str, Engine], device: Device, name: str) -> None:
    try:
        device.vendor()
    except DeviceError as err:
        pytest.skip(str(err))
    assert_errs_as_float32(engines[name], device, gemm="vendor")


@pytest.mark.parametrize("kv_format", ["f32", "f16", "q8_0"])
def test_prefill_goes_on_after_cpu_decode(engines: dict[str, Engine], device: Device, kv_format: str) -> None:
    """The CPU's token makes the open chunk stale."""
    assert_errs_as_float32(engines["moe"], device, kv_format, (50, 90))


def everything(engine: Engine, device: Device, **options: Any) -> dict[str, bytes]:
    """All bytes that a prefill in two calls leaves behind."""
    prefill = HybridPrefill(device, engine.pack, engine.decoder, note=lambda _: None, **options)
    ids, state = ids_for(engine), fresh(engine)
    prefill.run(ids[:70], state)
    hidden = prefill.run(ids[70:], state)
    prefill.close()
    chunks = {f"{i}.open.{name}": x for i, layer in state.open_chunks.layers.items() for name, x in layer.items()}
    return {name: array.tobytes() for name, array in {**left(hidden, state), **chunks}.items()}


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_slots_and_blocks_change_no_bit(engines: dict[str, Engine], device: Device, name: str) -> None:
    plain = everything(engines[name], device)
    for slots, token_block in itertools.product((1, 3), (64, 256)):
        assert everything(engines[name], device, slots=slots, token_block=token_block) == plain
