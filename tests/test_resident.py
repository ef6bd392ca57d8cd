"""A dense model resident on the (emulated) GPU: against the CPU's float32 path; the same bits in any cut, order and company."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from fermi_engine import Engine
from fermi_engine.gpu.resident import Resident
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.kernels.gpu import Device, open_device
from fermi_engine.kernels.schedule import EmulatedStream
from fermi_engine.state import HybridState
from tests.resident_cases import Call, dense, drive, everything, fresh, ids_for, resident
from tests.test_device import no_cuda

NOISE_DRAWS = 4
LENGTH, DECODED = 150, 6  # two chunks of the delta rule and an open one, two blocks of attention
NAMES = ["q8_0", "q4_0", "f32"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """On `cuda` too where there is a card, and where `-m gpu` demands one."""
    if "device" in metafunc.fixturenames:
        wanted = "gpu" in metafunc.config.getoption("-m") or no_cuda() is None
        card = [pytest.param("cuda", marks=pytest.mark.gpu)] if wanted else []
        metafunc.parametrize("device", ["emulated", *card], indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_device(request.param)
    yield opened
    opened.close()


def talk(engine: Engine, seed: int = 0, length: int = LENGTH) -> list[Call]:
    """A prompt and tokens after it."""
    ids = ids_for(engine, length + DECODED, seed)
    return [("prefill", ids[:length]), *(("decode", int(token)) for token in ids[length:])]


# against the CPU


@contextmanager
def shaken(engine: Engine, seed: int | None) -> Iterator[None]:
    """Each layer's input is moved by one unit in the last place, unless the seed is None."""
    generator, layers = np.random.default_rng(seed), engine.decoder.layers

    def moved(forward: Any) -> Any:
        def call(k: Any, x: np.ndarray, *rest: Any) -> np.ndarray:
            step = generator.integers(-1, 2, x.shape)
            towards = np.where(step == 0, x, np.where(step > 0, np.float32(np.inf), np.float32(-np.inf)))
            return forward(k, np.nextafter(x, towards), *rest)
        return call

    for layer in layers if seed is not None else ():
        layer.forward = moved(layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def cpu_talk(engine: Engine, calls: list[Call], seed: int | None = None) -> dict[str, np.ndarray]:
    """Logits of each call, and the state at the end."""
    state = fresh(engine)
    with shaken(engine, seed):
        rows = [engine.decoder.logits(engine.decoder.hidden(np.atleast_1d(what).astype(np.int32), state)[-1:])[0]
                for _, what in calls]
    return {"logits": np.stack(rows), **state.arrays()}


@pytest.mark.parametrize("gemm", ["own", "vendor"])
@pytest.mark.parametrize("name", NAMES)
def test_prefill_and_decode_are_the_cpus_within_its_noise(dense, device, name, gemm):
    """Both are float32 with other orders of sums. Twice the largest of the CPU's own answers to one unit in the last place in
    every layer's input, for the GPU errs as such a draw and so does the CPU it is compared with; and a unit in the last place
    of the largest element, which a single rounding can cost."""
    engine = dense[name]
    calls = [*talk(engine), ("prefill", ids_for(engine, 20, 9))]  # chunks begin anew behind decoded tokens
    state, r = fresh(engine), resident(engine, device, gemm=gemm)
    logits = np.stack(drive(r, state, calls))
    r.fetch(state)
    got = {"logits": logits, **state.arrays()}
    want = cpu_talk(engine, calls)
    draws = [cpu_talk(engine, calls, seed) for seed in range(NOISE_DRAWS)]
    for part, right in want.items():
        noise = max(np.abs(draw[part] - right).max() for draw in draws)
        limit = 2 * noise + np.spacing(np.abs(right).max(), dtype=np.float32) if right.dtype == np.float32 else 0
        assert np.abs(got[part] - right).max() <= limit, part


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_the_cpu_up_to_its_noise(dense, device, name):
    """Until the CPU's own noise reaches half the margin of its best token over the second."""
    engine, compared = dense[name], 0
    for seed in range(5):
        r, state = resident(engine, device), fresh(engine)
        ids = ids_for(engine, 40, seed)
        token = int(r.prefill(ids, state).argmax())
        calls: list[Call] = [("prefill", ids)]
        for _ in range(5):
            rows = cpu_talk(engine, calls)["logits"]
            noise = max(np.abs(cpu_talk(engine, calls, draw)["logits"][-1] - rows[-1]).max() for draw in range(2))
            best, second = np.sort(rows[-1])[[-1, -2]]
            if best - second <= 4 * noise:
                break
            assert token == int(rows[-1].argmax())
            calls.append(("decode", token))
            token, compared = r.greedy(token, state), compared + 1
        r.close()
    assert compared >= 20


# the same bits


def whole(engine: Engine, calls: list[Call], **options: Any) -> tuple[list[bytes], dict[str, bytes]]:
    r, state = resident(engine, **options), fresh(engine)
    logits = [row.tobytes() for row in drive(r, state, calls)]
    return logits, everything(r, state)


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_any_cut_of_a_prompt_gives_the_same_bits(dense, name):
    engine = dense[name]
    calls = talk(engine)
    ids, right = calls[0][1], whole(engine, calls)
    for cut in ((1,), (64,), (63, 64, 65), (1, 2, 3, 70), (100, 149)):
        pieces: list[Call] = [("prefill", piece) for piece in np.split(ids, cut)]
        logits, state = whole(engine, [*pieces, *calls[1:]])
        assert logits[len(cut) :] == right[0], cut
        assert state == right[1], cut


def test_blocks_of_a_prefill_and_little_memory_change_no_bit(dense):
    engine = dense["q8_0"]
    calls = talk(engine)
    right = whole(engine, calls)
    for size in (64, 128):
        assert whole(engine, calls, token_block=size) == right
    r, state = resident(engine), fresh(engine)
    r.prefill(calls[0][1][:64], state)
    logits, found = whole(engine, calls, vram=r.ledger.peak + 300_000)
    assert (logits, found) == right


@pytest.mark.parametrize("gemm", ["own", "vendor"])
def test_a_restored_state_goes_on_as_if_nothing_had_been(dense, gemm):
    """Fetched at every point of a talk with prefills inside a chunk and after decoding, and taken up by another device."""
    engine = dense["q4_0"]
    ids = ids_for(engine, 180)
    calls: list[Call] = [("prefill", ids[:70]), ("decode", 3), ("prefill", ids[70:150]), ("prefill", ids[150:160]),
                         ("decode", 9), ("prefill", ids[160:161]), ("prefill", ids[161:])]
    logits, right = whole(engine, calls, gemm=gemm)
    for point in range(1, len(calls)) if gemm == "own" else (2, 4):
        first, state = resident(engine, gemm=gemm), fresh(engine)
        drive(first, state, calls[:point])
        first.fetch(state)
        second, other = resident(engine, gemm=gemm), state.copy()
        rest = [row.tobytes() for row in drive(second, other, calls[point:])]
        assert rest == logits[point:], point
        assert everything(second, other) == right, point
        assert [row.tobytes() for row in drive(first, state, calls[point:])] == logits[point:], point


def test_states_take_turns_on_the_device(dense):
    engine = dense["q8_0"]
    talks = [talk(engine, seed, 70 + seed) for seed in range(3)]
    right = [whole(engine, calls) for calls in talks]
    r, states = resident(engine), [fresh(engine) for _ in talks]
    got: list[list[bytes]] = [[] for _ in talks]
    for step in range(DECODED + 1):
        for which, (calls, state) in enumerate(zip(talks, states, strict=True)):
            got[which] += [row.tobytes() for row in drive(r, state, calls[step : step + 1])]
    assert [(row, everything(r, state)) for row, state in zip(got, states, strict=True)] == right


def test_a_host_that_has_moved_on_is_taken_up(dense):
    """The CPU evaluates in between: its state counts, not what the device remembers."""
    engine = dense["q8_0"]
    r, state = resident(engine), fresh(engine)
    r.prefill(ids_for(engine, 20), state)
    r.fetch(state)
    engine.decoder.hidden(ids_for(engine, 5, 1), state)
    other, copy = resident(engine), state.copy()
    assert r.position(state) == 25
    assert np.array_equal(r.decode(7, state), other.decode(7, copy))


def test_every_schedule_gives_the_same_bits(dense):
    engine = dense["q8_0"]
    calls = talk(engine, 0, 6)[:3]
    right = whole(engine, calls)
    for seed in range(20):
        assert whole(engine, calls, device=EmulatedDevice(seed=seed)) == right, seed


def test_what_was_restored_is_not_what_the_device_remembers(dense):
    """The same object with another content at the same position, told by `forget`."""
    engine = dense["q8_0"]
    r, state = resident(engine), fresh(engine)
    r.prefill(ids_for(engine, 20), state)
    r.fetch(state)
    for layer in state.layers:
        if hasattr(layer, "recurrent"):
            layer.recurrent[...] = 0
    r.forget(state)
    other: Resident = resident(engine)
    copy: HybridState = state.copy()
    copy.open_chunks = state.open_chunks = None
    assert np.array_equal(r.decode(7, state), other.decode(7, copy))
