"""Each layer on the GPU, fed the reference's input: output and state within what float32 costs the reference itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fermi_engine.engine import Engine
from fermi_engine.kernels.gpu import Device, open_device
from tests.devices import on_devices
from tests.gpu_cases import engines, packs
from tools import hybrid_layers, oracle
from tools.hybrid_greedy import TINY, chat
from tools.tiny_tasks import Encoder

MODELS = ("trained", "moe", "moe-q8_0", "dense")
TOKENS = 100  # a chunk of the delta rule and an open one
UNDECIDED = 0.05  # of the tokens, at most, may be left out of a layer's output


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_devices(metafunc, "device", ("emulated",))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_device(request.param)
    yield opened
    opened.close()


def inputs(engine: Engine, name: str) -> Iterator[tuple[int, np.ndarray]]:
    """(layer, what the reference in float64 feeds it, rounded to float32 [T, H]); of the trained model a real question."""
    ids = np.random.default_rng(0).integers(0, engine.config.vocab_size, TOKENS)
    if name == "trained":
        ids = np.array(next(chat(Encoder.from_directory(TINY), 4, "short")))
    model = oracle.decoder(engine.pack, "f32", torch.float64)
    seen: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        model.forward(torch.from_numpy(ids), trace=seen.__setitem__)
    for layer in range(engine.config.num_hidden_layers):
        yield layer, seen[f"layers.{layer}.input"].float().numpy()


@pytest.mark.parametrize("name", MODELS)
def test_output_and_state_of_every_layer(engines: dict[str, Engine], device: Device, name: str) -> None:
    engine, kinds = engines[name], set()
    for layer, x in inputs(engine, name):
        truth = hybrid_layers.truth(engine.pack, layer, x)
        assert np.count_nonzero(~truth.decided) <= UNDECIDED * len(x)
        errors = truth.errors(hybrid_layers.on_gpu(engine.pack, engine.kernels, layer, x, device))
        limits = truth.limits()
        over = {part: (error, limits[part]) for part, error in errors.items() if not error <= limits[part]}
        assert not over, f"layer {layer}: {over}"
        kinds |= errors.keys()
    assert kinds == {"output", "conv", "recurrent", "k", "v"}



@pytest.mark.parametrize("part", ["output", "conv", "recurrent", "k", "v"])
def test_an_error_of_a_hundred_thousandth_is_over_the_limit(engines: dict[str, Engine], part: str) -> None:
    engine = engines["trained"]
    layer = 3 if part in "kv" else 0
    x = dict(inputs(engine, "trained"))[layer]
    truth = hybrid_layers.truth(engine.pack, layer, x, draws=4)
    got = hybrid_layers.on_cpu(engine.pack, engine.kernels, layer, x)
    limits = truth.limits()
    assert all(error <= limits[name] for name, error in truth.errors(got).items())
    wrong = {**got, part: got[part] * np.float32(1 + 1e-5)}
    assert truth.errors(wrong)[part] > limits[part]
