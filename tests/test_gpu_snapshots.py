"""Snapshots of the (emulated) GPU path: to go on from one equals never having stopped, to the bit."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from fermi_engine import kept_memory
from fermi_engine.errors import DeviceError
from fermi_engine.gpu import prefill as gpu_prefill
from fermi_engine.gpu.boundaries import BUFFER, Boundaries
from fermi_engine.gpu.prefill import HybridPrefill
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.kernels.schedule import EmulatedStream
from fermi_engine.session import Session
from fermi_engine.snapshots.cache import Snapshot
from fermi_engine.snapshots.prefix import Prefix
from fermi_engine.stages.runs import ArrayModel
from fermi_engine.state import HybridState
from tests import snapshot_cases as cases
from tests.conftest import SOAK
from tests.snapshot_cases import DETOURS, chunks_of, gpu_engine, ids_for, outcome, poison, uninterrupted

LENGTH = 200


class Wanted:
    """Asks for the states at some positions, and keeps them."""

    def __init__(self, positions: list[int], most: int | None = None) -> None:
        self.positions, self.most, self.states, self.own = positions, most, {}, {}

    def wanted(self) -> list[int]:
        return self.positions

    def reserve(self, own: dict[int, int], state: HybridState) -> list[int]:
        self.own = own
        return sorted(own)[: self.most]

    def made(self, states: list[HybridState], seconds: float) -> None:
        assert seconds >= 0
        self.states = {state.position: state for state in states}


def fresh(model: ArrayModel) -> HybridState:
    return Session(model).state


def bits(state: HybridState) -> dict[str, bytes]:
    return {**{name: array.tobytes() for name, array in state.arrays().items()}, "chunks": chunks_of(state)}


@pytest.fixture(scope="module")
def step_by_step() -> dict[int, dict[str, bytes]]:
    """The state after each token of a prompt whose tokens go through the GPU one at a time."""
    model, found = gpu_engine(None), {}
    state = fresh(model)
    for position, token in enumerate(ids_for(LENGTH), 1):
        model.gpu.hidden(np.array([token], np.int32), state, is_rest=True)
        found[position] = bits(state)
    return found


@pytest.mark.parametrize(("start", "token_block"), [(0, None), (0, 64), (1, 128), (70, None), (70, 64)])
def test_one_pass_leaves_the_state_at_every_position(step_by_step, start, token_block):
    model, ids = gpu_engine(None), np.array(ids_for(LENGTH), np.int32)
    prefill = HybridPrefill(cases.emulated(), cases.weights("lfl", experts=0), model.decoder, token_block=token_block)
    state, stops = fresh(model), Wanted(list(range(start + 1, LENGTH)))
    if start:
        prefill.run(ids[:start], state)
        state = state.copy()
    prefill.run(ids[start:], state, stops=stops)
    assert len(prefill.last.plan.blocks) == (1 if token_block is None else -(-LENGTH // token_block) - start // token_block)
    assert bits(state) == step_by_step[LENGTH]
    assert sorted(stops.states) == list(range(start + 1, LENGTH))
    for position, found in stops.states.items():
        assert bits(found) == step_by_step[position], position
        assert (found.open_chunks is None) == (position % 64 == 0)
        assert stops.own[position] == recurrent_bytes(found)
    prefill.close()


def recurrent_bytes(state: HybridState) -> int:
    memory, pages = state.memory(), {}
    for layer in state.layers:
        if hasattr(layer, "keys"):
            pages |= {id(array): array.nbytes for array in layer.arrays()}
    return sum(nbytes for which, nbytes in memory.items() if which not in pages)


CUTS = [1, 2, 3, 24, 25, 47, 62, 63, 64, 65, 66, 111, 127, 128, 129, 191, 192, 193, 197, 198, 199]


@pytest.mark.parametrize("detour", DETOURS)
def test_every_cut_resumes_to_the_bit(detour):
    """In CI the cuts around chunks, pages and ends; in a soak all of them. The test above has seen all states."""
    model, ids = gpu_engine(None), ids_for(LENGTH)
    right, stops = uninterrupted(model, ids), Wanted(list(range(1, LENGTH) if SOAK else CUTS))
    model.gpu.hidden(np.array(ids, np.int32), fresh(model), stops=stops)
    other = cases.poisoned(model)
    for cut in stops.positions:
        snapshot = Snapshot(Prefix(ids[:cut], other.path), stops.states[cut], trail=((cut, "gpu"),))
        other.restore(DETOURS[detour](model, snapshot))
        assert outcome(other, rest(other, ids)) == right, cut
        poison(other)


def rest(session: Session, ids: list[int]) -> np.ndarray:
    """The logits of the tokens that a session has not seen, which go through the GPU."""
    return session._append(np.array(ids[session.position :], np.int32), None, None, is_prompt=True)


def check(model: ArrayModel, ids: list[int], session: Session | None = None, marks: tuple[int, ...] = ()) -> int:
    """Ask for a whole prompt, in a ruined session if in none; the outcome is that of the same calls uninterrupted, and where the
    GPU has done all of them that of a cold run. Tokens that were cached."""
    session = session or cases.poisoned(model)
    found = outcome(session, session.prompt(ids, marks=marks))
    assert found == uninterrupted(model, ids, session.trail)
    if len(session.trail) == 1 and len(ids) > 1:
        assert session.trail == ((len(ids), "gpu"),)
        assert found == uninterrupted(model, ids)
    return session.cached_tokens


@pytest.mark.parametrize("tail", [1, 2, 3])
def test_short_tails_after_a_hit_go_the_same_way(tail):
    model = gpu_engine()
    for length in (63, 64, 65):
        ids, session = ids_for(length + tail, seed=length), cases.poisoned(model)
        check(model, ids[:length])
        assert check(model, ids, session) == length
        assert session.trail == ((length + tail, "gpu"),)
        assert check(model, ids) == length + tail


def test_prompts_shorter_than_the_convolution():
    model = gpu_engine()
    for length in (1, 2, 3, 4):
        ids = ids_for(length, seed=length)
        check(model, ids)
        assert check(model, ids) == length
        assert check(model, [*ids, 1, 2]) == length


def test_a_chat_by_turns():
    """The CPU decodes between prompts, so chunks begin where answers end; an edited message and one without its reasoning."""
    model, system = gpu_engine(), ids_for(70, 1)
    history = [*system, *ids_for(60, 2)]
    for turn in range(3):
        marks, session = (70, len(history) - 9), cases.poisoned(model)
        check(model, history, session, marks)
        answer = ids_for(11, 20 + turn)
        for token in answer:
            logits = session.decode(token)
        assert outcome(session, logits) == uninterrupted(model, [*history, *answer], session.trail)
        session.keep()
        question = ids_for(67, 40 + turn)
        assert check(model, [*history, *answer, *question], None, marks) == len(history) + 11
        assert check(model, [*history[:-4], *ids_for(9, 30 + turn)], None, marks) == marks[1]
        history = [*history, *answer[6:], *question]  # the first six were reasoning
        assert check(model, history, None, (70, len(history) - 9)) == len(history) - 67 - 5


def test_an_edit_costs_what_is_promised_after_a_chat_too():
    """Boundaries lie where the GPU's chunks end, also where those began in the middle of nowhere."""
    model = gpu_engine()
    session, ids = Session(model), ids_for(30)
    session.prompt(ids)
    session.decode(5)
    session.keep()
    ids = [*ids, 5, *ids_for(260, 1)]
    check(model, ids, session)
    blocks = [snapshot for snapshot in model.snapshots.entries() if snapshot.kind == "block"]
    assert [snapshot.position for snapshot in sorted(blocks, key=lambda s: s.position)] == [95, 159, 223, 287]
    assert all(snapshot.state.open_chunks is None for snapshot in blocks)
    edited = [*ids[:200], *ids_for(20, 2)]
    assert check(model, edited) == 159


def test_evicted_and_made_again():
    model = gpu_engine(int(2.5 * cases.snapshot_bytes(90, gpu_engine)))
    prompts = [ids_for(70 + 11 * i, i) for i in range(3)]
    for i in (0, 1, 2, 0, 2, 2, 1):
        check(model, prompts[i], None, (30,))
    assert model.snapshots.stats.evicted > 0
    assert model.snapshots.stats.hits > 0


@pytest.mark.parametrize("seed", range(20 if SOAK else 6))
def test_an_abort_leaves_nothing_behind(seed):
    rng, model = np.random.default_rng(seed), gpu_engine(layers="lflf")
    session, ids = cases.poisoned(model), ids_for(150, seed)
    check(model, ids[:70], session, (30,))
    before = {snapshot.prefix.digest() for snapshot in model.snapshots.entries()}
    used, calls, stop = model.snapshots.holdings.used, 0, int(rng.integers(1, 3))

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.prompt([*ids[:60], *ids_for(90, 50 + seed)], progress, marks=(30, 61, 140))
    assert {snapshot.prefix.digest() for snapshot in model.snapshots.entries()} == before
    assert model.snapshots.holdings.used == used
    assert check(model, ids[: 75 + seed], session, (30,)) == 70


@pytest.mark.parametrize(("kind", "nth"), [("copy", 30), ("launch", 20), ("launch", 60)])
def test_a_device_that_fails_leaves_nothing_behind(kind, nth):
    device = EmulatedDevice()
    model, ids = gpu_engine(device=device), ids_for(150)
    session = Session(model)
    session.prompt(ids[:20])
    used = model.snapshots.holdings.used
    device.faults.fail(kind, nth)
    with pytest.raises(DeviceError, match="injected"):
        session.prompt(ids)
    assert model.snapshots.holdings.used == used
    assert session.tokens == tuple(ids[:20])
    assert check(model, ids, session) == 20


def test_a_device_that_is_given_up_leaves_the_rest_to_the_cpu():
    """Under `auto`; the room that was made for its states is given back."""
    device = EmulatedDevice()
    model, ids = gpu_engine(device=device, prefill="auto"), ids_for(150)
    model.gpu.cost = AlwaysGpu()
    model.gpu._note = lambda text: None
    device.faults.fail("launch", 40)
    session = Session(model)
    logits = session.prompt(ids)
    assert session.trail == ((150, "cpu"),)
    assert outcome(session, logits) == uninterrupted(model, ids, session.trail)
    assert model.snapshots.holdings.used == cases.held_memory(model)
    assert {snapshot.position for snapshot in model.snapshots.entries()} == {64, 128, 150}


class AlwaysGpu:
    def favours_gpu(self, tokens: int, streamed: int) -> bool:
        return True


# schedule and memory


def states_of(model: ArrayModel, device: EmulatedDevice, ids: np.ndarray) -> dict[int, dict[str, bytes]]:
    prefill = HybridPrefill(device, cases.weights("lflll", experts=0), model.decoder)
    stops = Wanted([1, 2, 3, 5])
    prefill.run(ids, fresh(model), stops=stops)
    return {position: bits(state) for position, state in stops.states.items()}


class Deaf(EmulatedDevice):
    """A device on which the nth wait of stream `results` is lost."""

    def __init__(self, seed: int, nth: int | None) -> None:
        super().__init__(seed=seed)
        self._nth = nth

    def stream(self, name: str) -> EmulatedStream:
        made = super().stream(name)
        if name == "results":
            count, wait = itertools.count(), made.wait
            made.wait = lambda event: None if next(count) == self._nth else wait(event)
        return made


def test_every_schedule_gives_the_same_states_and_a_missing_wait_does_not():
    """More layers than the ring has slots."""
    model, ids = gpu_engine(None, "lflll"), np.array(ids_for(6), np.int32)
    right = states_of(model, EmulatedDevice(), ids)
    assert all(states_of(model, Deaf(seed, None), ids) == right for seed in range(100 if SOAK else 20))
    assert sum(states_of(model, Deaf(seed, 0), ids) != right for seed in range(12)) >= 2


def test_the_states_copies_are_planned_for_and_overlap_what_follows():
    model, ids = gpu_engine(None, "lflf"), np.array(ids_for(150), np.int32)
    held = cases.weights("lflf", experts=0)
    device = EmulatedDevice()
    prefill = HybridPrefill(device, held, model.decoder, timing=True)
    plain, stops = prefill.plan(0, 150), Wanted([40, 64, 128])
    prefill.run(ids, fresh(model), stops=stops)
    plan = prefill.last.plan
    assert plan.sizes[BUFFER] == plan.total - plain.total > 0
    assert prefill.ledger.peak == plan.total
    copies = [span for span in prefill.last.spans if span.label.startswith("boundaries")]
    kernels = [span for span in prefill.last.spans if span.engine == "compute"]
    assert len(copies) == 2
    for copy in copies:
        assert copy.stream == "results"
        assert any(copy.begin_s < span.end_s and span.begin_s < copy.end_s for span in kernels)
    # a byte less: fewer states, those that matter most, and the prefill itself as before
    tight = HybridPrefill(EmulatedDevice(), held, model.decoder, vram=plan.total - 1)
    fewer = Wanted([64, 128, 40])
    tight.run(ids, fresh(model), stops=fewer)
    assert sorted(fewer.states) == [64]
    assert tight.last.plan.resident == plain.resident
    least = HybridPrefill(EmulatedDevice(), held, model.decoder, vram=plain.total)
    none = Wanted([64, 128, 40])
    least.run(ids, fresh(model), stops=none)
    assert not none.states
    assert least.last.plan == dataclasses.replace(plain, limit=least.last.plan.limit)
    some = Wanted([64, 128], most=1)
    prefill.run(ids, fresh(model), stops=some)
    assert sorted(some.states) == [64]


def test_room_is_made_before_states_are_allocated(monkeypatch):
    """Whenever memory for a state is allocated, that much is reserved beside what is held."""
    budget = int(3.5 * cases.snapshot_bytes(120, gpu_engine))
    model = gpu_engine(budget)
    allocate, allocated = kept_memory.allocate, []

    def watched(*args: Any) -> np.ndarray:
        array = allocate(*args)
        allocated.append(array.nbytes)
        return array

    class Watching(Boundaries):
        def __init__(self, *args: Any) -> None:
            used = model.snapshots.holdings.used
            allocated.clear()
            super().__init__(*args)
            assert sum(allocated) <= used - cases.held_memory(model)
            reserved.append(sum(allocated))

    reserved: list[int] = []
    monkeypatch.setattr(kept_memory, "allocate", watched)
    monkeypatch.setattr(gpu_prefill, "Boundaries", Watching)
    for seed in range(5):
        check(model, ids_for(120, seed), None, (30,))
        assert model.snapshots.holdings.used == cases.held_memory(model) <= model.snapshots.holdings.peak <= budget
    assert sum(reserved) > 0
    assert model.snapshots.stats.evicted > 0
