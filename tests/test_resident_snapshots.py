"""Snapshots of the model that lives on the (emulated) GPU: to go on from one equals never having stopped, to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from fermi_engine import kernels
from fermi_engine.config import EngineConfig
from fermi_engine.errors import RequestError
from fermi_engine.gpu.boundaries import BUFFER
from fermi_engine.gpu.resident import Resident
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.model.decoder import Decoder
from fermi_engine.session import Session
from fermi_engine.snapshots.budget import Costs
from fermi_engine.snapshots.cache import SnapshotCache
from fermi_engine.stages.runs import ArrayModel
from tests import snapshot_cases as cases
from tests.snapshot_cases import ids_for, outcome
from tests.test_gpu_snapshots import Wanted, bits, fresh

LENGTH = 140


def resident_model(budget: int | None = cases.PLENTY, layers: str = "lfl", **options: object) -> ArrayModel:
    """A dense model on an emulated GPU; budget: bytes for snapshots, None for none of them."""
    config = EngineConfig(activations="f32", kv_block=24, decode="gpu", gemm="own", device="emulated")
    held = cases.weights(layers, experts=0)
    decoder = Decoder(held, kernels.get(None, 1), config.activations)
    resident = Resident(EmulatedDevice(), held, decoder, gemm="own", note=lambda text: None, **options)
    cache = None if budget is None else SnapshotCache(budget, costs=Costs(**cases.COSTS, frozen=True))
    return ArrayModel(decoder, config, f"arrays dense {layers}", is_resident=True, snapshots=cache, resident=resident)


def uninterrupted(model: ArrayModel, ids: Sequence[int], trail: Sequence[tuple[int, str]] = ()) -> bytes:
    """The outcome of the same calls without a cache; all at once if no trail is given."""
    plain, begin, logits = Session(dataclasses.replace(model, snapshots=None)), 0, None
    for end, way in trail or [(len(ids), "gpu")]:
        piece = ids[begin:end]
        if way == "gpu token":
            logits = [plain.decode(token) for token in piece][-1]
        else:
            logits = plain._append(np.array(piece, np.int32), None, None, is_prompt=True)
        begin = end
    assert not trail or plain.trail == tuple(trail)
    return outcome(plain, logits)


def check(model: ArrayModel, ids: list[int], session: Session | None = None, marks: tuple[int, ...] = ()) -> int:
    """Ask for a whole prompt, in a new session if in none; the outcome is that of the same calls uninterrupted, and where no
    token was decoded that of a cold run. Tokens that were cached."""
    session = session or Session(model)
    found = outcome(session, session.prompt(ids, marks=marks))
    assert found == uninterrupted(model, ids, session.trail)
    if session.trail == ((len(ids), "gpu"),):
        assert found == uninterrupted(model, ids)
    return session.cached_tokens


@pytest.mark.parametrize(("start", "token_block"), [(0, None), (1, 64), (70, None)])
def test_one_pass_leaves_the_state_at_every_position(start, token_block):
    model, ids = resident_model(None, token_block=token_block), np.array(ids_for(LENGTH), np.int32)
    state, right, stops = fresh(model), {}, Wanted(list(range(start + 1, LENGTH)))
    for position in range(1, LENGTH + 1):
        model.resident.prefill(ids[position - 1 : position], state)
        model.resident.fetch(state)
        right[position] = bits(state)
    state = fresh(model)
    if start:
        model.resident.prefill(ids[:start], state)
    model.resident.prefill(ids[start:], state, stops=stops)
    assert bits(state) == right[LENGTH]
    assert sorted(stops.states) == list(range(start + 1, LENGTH))
    assert [at for at, found in stops.states.items() if bits(found) != right[at]] == []


def test_states_left_behind_decoded_tokens_go_on_as_if_nothing_had_been():
    """Chunks begin where decoding ended."""
    model, ids = resident_model(None), np.array(ids_for(LENGTH), np.int32)
    state, stops = fresh(model), Wanted([31, 50, 85, 120])
    for held, wanted in ((state, stops), (fresh(model), None)):
        model.resident.prefill(ids[:20], held)
        model.resident.decode(int(ids[20]), held)
        logits = model.resident.prefill(ids[21:], held, stops=wanted)
    model.resident.fetch(held)
    assert bits(state) == bits(held)
    for at, found in stops.states.items():
        assert (found.open_chunks is None) == (at == 21 + 64)
        assert np.array_equal(model.resident.prefill(ids[at:], found), logits)
        model.resident.fetch(found)
        assert bits(found) == bits(held), at


def test_a_chat_by_turns():
    model, system = resident_model(), ids_for(70, 1)
    history = [*system, *ids_for(60, 2)]
    for turn in range(2):
        marks, session = (70, len(history) - 9), Session(model)
        check(model, history, session, marks)
        answer = ids_for(7, 20 + turn)
        for token in answer:
            logits = session.decode(token)
        assert session.trail[-1] == (len(history) + 7, "gpu token")
        assert outcome(session, logits) == uninterrupted(model, [*history, *answer], session.trail)
        session.keep()
        question = ids_for(67, 40 + turn)
        assert check(model, [*history, *answer, *question], None, marks) == len(history) + 7
        assert check(model, [*history[:-4], *ids_for(9, 30 + turn)], None, marks) >= marks[1]
        history = [*history, *answer[4:], *question]  # the first four were reasoning
        assert check(model, history, None, (70, len(history) - 9)) == len(history) - 67 - 3


@pytest.mark.parametrize("tail", [1, 2])
def test_short_tails_after_a_hit_go_the_same_way(tail):
    model = resident_model()
    for length in (63, 64, 65):
        ids, session = ids_for(length + tail, seed=length), Session(model)
        check(model, ids[:length])
        assert check(model, ids, session) == length
        assert session.trail == ((length + tail, "gpu"),)
        assert check(model, ids) == length + tail


def test_one_session_changes_its_timeline():
    """What the device has of the old one is not taken for the new one, nor kept for a fork of the old one from being right."""
    model, session = resident_model(), None
    session = Session(model)
    for seed in (1, 2, 1, 3):
        check(model, ids_for(90, seed), session)
        logits = session.decode(4)
        other, right = session.fork(), outcome(session, logits)
        assert np.array_equal(other.decode(5), session.decode(5))
        assert right == uninterrupted(model, [*ids_for(90, seed), 4], [(90, "gpu"), (91, "gpu token")])


def test_an_interrupt_leaves_nothing_behind():
    model = resident_model(token_block=64)
    session, ids = Session(model), ids_for(200)
    check(model, ids[:70], session, (30,))
    before, used = {s.prefix.digest() for s in model.snapshots.entries()}, model.snapshots.holdings.used

    def progress(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.prompt([*ids[:60], *ids_for(140, 50)], progress, marks=(30, 61, 140))
    assert {s.prefix.digest() for s in model.snapshots.entries()} == before
    assert model.snapshots.holdings.used == used
    with pytest.raises(RequestError, match="was interrupted"):
        session.decode(1)
    assert check(model, ids[:75], session, (30,)) == 70


def test_where_memory_is_short_states_are_fewer_and_logits_the_same():
    model, ids = resident_model(None), np.array(ids_for(LENGTH), np.int32)
    stops, ledger, sizes = Wanted([64, 128, 40]), model.resident.ledger, []
    alloc = ledger.alloc
    ledger.alloc = lambda nbytes, name: sizes.append((name, nbytes)) or alloc(nbytes, name)
    right = model.resident.prefill(ids, fresh(model), stops=stops)
    assert sorted(stops.states) == [40, 64, 128]
    (room,) = (nbytes for name, nbytes in sizes if name == BUFFER)
    held = ledger.used
    for spare, expected in ((room, [40, 64, 128]), (room - 1000, [64]), (0, [])):
        ledger.limit, fewer = held + spare, Wanted([64, 128, 40])
        assert np.array_equal(model.resident.prefill(ids, fresh(model), stops=fewer), right)
        assert (sorted(fewer.states), ledger.used) == (expected, held)
