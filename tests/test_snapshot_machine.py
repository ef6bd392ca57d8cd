"""Whatever requests, aborts, forks and evictions come in whatever order: no logits but those of an uninterrupted run, and never a
byte more than the budget."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fermi_engine.session import Session
from fermi_engine.snapshots.cache import Snapshot
from fermi_engine.stages.runs import ArrayModel
from tests import snapshot_cases as cases
from tests.conftest import SOAK
from tests.snapshot_cases import Tracer, ids_for, outcome, poison, snapshot_bytes

SESSIONS = 3
LONGEST = 150  # tokens of a prompt


class Stop(Exception):
    """A client that goes away."""


class SnapshotMachine(RuleBasedStateMachine):
    """Some sessions over one cache; every prompt goes on from one that was asked before. Others build on this by `make` and by
    rules of their own."""

    def make(self, budget: int) -> ArrayModel:
        """The model whose cache is tried."""
        return cases.engine(budget, token_block=8)

    def right(self, session: Session) -> bytes:
        """The outcome of the calls that brought a session to where it is, uninterrupted."""
        return _cold(session.engine.decoder, session.tokens)

    @initialize(budget=st.floats(1.2, 6))
    def begin(self, budget: float) -> None:
        self.patch = pytest.MonkeyPatch()
        self.model = self.make(int(budget * snapshot_bytes(LONGEST)))
        self.trace = Tracer(self.model, self.patch)
        self.sessions = [Session(self.model) for _ in range(SESSIONS)]
        self.asked: list[list[int]] = [ids_for(80, 1)]
        self.kept: list[Snapshot] = []

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    def prompt(self, source: int, keep: float, tail: int, seed: int) -> list[int]:
        """An earlier prompt, cut somewhere, with something else behind it."""
        old = self.asked[source % len(self.asked)]
        ids = [*old[: int(keep * len(old))], *ids_for(tail, 1000 + seed)][:LONGEST]
        return ids or [1]

    @rule(which=st.integers(0, SESSIONS - 1), source=st.integers(0, 5), keep=st.floats(0, 1), tail=st.integers(0, 30),
          seed=st.integers(0, 3), marks=st.lists(st.integers(0, LONGEST), max_size=3))
    def request(self, which: int, source: int, keep: float, tail: int, seed: int, marks: list[int]) -> None:
        ids, session = self.prompt(source, keep, tail, seed), self.sessions[which]
        logits = session.prompt(ids, marks=marks)
        assert session.tokens == tuple(ids)
        assert outcome(session, logits) == self.right(session)
        self.asked = [*self.asked[-5:], ids]

    @rule(which=st.integers(0, SESSIONS - 1), count=st.integers(1, 4), keeps=st.booleans())
    def answer(self, which: int, count: int, keeps: bool) -> None:
        session = self.sessions[which]
        if session._state is None or not 0 < session.position < LONGEST - count:
            return
        for token in ids_for(count, session.position):
            logits = session.decode(token)
        assert outcome(session, logits) == self.right(session)
        if keeps:
            session.keep()
        self.asked = [*self.asked[-5:], list(session.tokens)]

    @rule(which=st.integers(0, SESSIONS - 1), source=st.integers(0, 5), keep=st.floats(0, 1), tail=st.integers(2, 40),
          after=st.integers(1, 5))
    def abort(self, which: int, source: int, keep: float, tail: int, after: int) -> None:
        ids, blocks = self.prompt(source, keep, tail, after), 0

        def progress(done: int, total: int) -> None:
            nonlocal blocks
            blocks += 1
            if blocks == after:
                raise Stop

        try:
            logits = self.sessions[which].prompt(ids, progress, marks=(len(ids) // 2,))
        except Stop:
            assert self.sessions[which]._state is None
        else:
            assert outcome(self.sessions[which], logits) == self.right(self.sessions[which])

    @rule(which=st.integers(0, SESSIONS - 1), to=st.integers(0, SESSIONS - 1))
    def fork(self, which: int, to: int) -> None:
        if self.sessions[which]._state is not None:
            self.sessions[to] = self.sessions[which].fork()

    @rule(which=st.integers(0, SESSIONS - 1))
    def keep_aside(self, which: int) -> None:
        if self.sessions[which]._state is not None:
            self.kept = [*self.kept[-2:], self.sessions[which].snapshot()]

    @rule(which=st.integers(0, SESSIONS - 1), snapshot=st.integers(0, 2), ruined=st.booleans())
    def go_back(self, which: int, snapshot: int, ruined: bool) -> None:
        """What was there before must not shine through."""
        session = self.sessions[which]
        if not self.kept:
            return
        if ruined and session._state is not None:
            poison(session)
        session.restore(self.kept[snapshot % len(self.kept)])

    @rule(share=st.floats(0.1, 1))
    def evict(self, share: float) -> None:
        nbytes = int(share * self.model.snapshots.holdings.budget)
        if self.model.snapshots.make_room(nbytes):
            self.model.snapshots.holdings.unreserve(nbytes)

    @invariant()
    def stays_in_its_budget(self) -> None:
        if hasattr(self, "trace"):
            holdings = self.model.snapshots.holdings
            assert self.trace.look() == holdings.used
            assert self.trace.peak <= holdings.peak <= holdings.budget


@functools.lru_cache(maxsize=20_000)
def _cold(decoder: object, tokens: tuple[int, ...]) -> bytes:
    return cases.uninterrupted(ArrayModel(decoder, cases.engine(None, token_block=8).options, "same"), tokens)


class GpuSnapshotMachine(SnapshotMachine):
    """The same where the GPU reads prompts: every outcome is that of the same calls, by the way each token went."""

    def make(self, budget: int) -> ArrayModel:
        return cases.gpu_engine(int(budget * cases.snapshot_bytes(LONGEST, cases.gpu_engine) / snapshot_bytes(LONGEST)))

    def right(self, session: Session) -> bytes:
        return _same_calls(session.tokens, session.trail)


@functools.lru_cache(maxsize=20_000)
def _same_calls(tokens: tuple[int, ...], trail: tuple[tuple[int, str], ...]) -> bytes:
    return cases.uninterrupted(cases.gpu_engine(None), tokens, trail)


GPU_SIZE = settings(max_examples=100, stateful_step_count=30) if SOAK else settings(max_examples=6, stateful_step_count=12)
TestGpuSnapshots = GpuSnapshotMachine.TestCase
TestGpuSnapshots.settings = settings(GPU_SIZE, deadline=None)
SIZE = settings(max_examples=300, stateful_step_count=60) if SOAK else settings(max_examples=30, stateful_step_count=25)
TestSnapshots = SnapshotMachine.TestCase
TestSnapshots.settings = settings(SIZE, deadline=None)


def test_the_machine_notices_a_wrong_state():
    """Its own guard: one token too many behind the machine's back."""
    machine = SnapshotMachine()
    machine.begin(3.0)
    try:
        machine.request(0, 0, 1.0, 5, 1, [])
        for snapshot in machine.model.snapshots.entries():
            for layer in snapshot.state.layers:
                if not hasattr(layer, "keys"):
                    layer.recurrent.flags.writeable = True
                    layer.recurrent += np.float32(1e-3)
        with pytest.raises(AssertionError):
            machine.request(1, 1, 1.0, 5, 2, [])
    finally:
        machine.teardown()
