"""Snapshots within their bytes: nothing is allocated before there is room, every page counts once, what is worth most stays."""

from __future__ import annotations

import re
import weakref
from dataclasses import replace

import numpy as np
import pytest

from fermi_engine import kept_memory
from fermi_engine.session import Session
from fermi_engine.snapshots.budget import Costs, Holdings
from fermi_engine.snapshots.cache import Snapshot, SnapshotCache, Stored
from fermi_engine.snapshots.prefix import NumericPath, Prefix
from fermi_engine.snapshots.taking import Taking
from fermi_engine.stages.runs import ArrayModel
from tests import snapshot_cases as cases
from tests.snapshot_cases import Tracer, engine, ids_for, outcome, poisoned, snapshot_bytes, uninterrupted
from tools.lab import snapshot_policy


def test_memory_counts_once_however_many_hold_it():
    holdings = Holdings(100)
    assert holdings.reserve(60)
    assert not holdings.reserve(41)
    holdings.hold({1: 30, 2: 30}, 60)
    assert holdings.missing({2: 30, 3: 20}) == 20
    assert holdings.reserve(20)
    holdings.hold({2: 30, 3: 20}, 20)
    assert (holdings.used, holdings.only({1: 30, 2: 30})) == (80, 30)
    holdings.release({1: 30, 2: 30})
    assert holdings.used == 50
    with pytest.raises(ValueError, match="60 bytes held where 50 were reserved"):
        holdings.hold({4: 60}, 50)
    holdings.release({2: 30, 3: 20})
    assert (holdings.used, holdings.peak) == (0, 80)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("count", [3, kept_memory.LARGE_BYTES // 4])
def test_views_are_the_memory_they_lie_in(count, at_once):
    """Small and large pieces, which come from the system in different ways; both can be written and go when nobody holds them."""
    memory = kept_memory.allocate((2, count), np.float32, at_once)
    memory[...] = 7
    views = [memory, memory[1], memory[0, 1:].view(np.uint8), memory.reshape(-1)[2:]]
    assert list(kept_memory.memory_of(views).values()) == [8 * count]
    assert kept_memory.memory_of([kept_memory.copied(memory), memory]).keys() > kept_memory.memory_of(views).keys()
    gone = weakref.ref(memory)
    del memory, views
    assert gone() is None


def test_copies_by_several_threads_are_copies():
    rng = np.random.default_rng(0)
    sources = [rng.random((kept_memory.COPY_BYTES // 16, 1)).astype(np.float32) for _ in range(9)]
    targets = [np.zeros_like(source) for source in sources]
    kept_memory.copy_arrays(zip(targets, sources, strict=True))
    assert all(np.array_equal(*pair) for pair in zip(targets, sources, strict=True))


def test_pages_cost_once_and_states_each_time():
    model = engine(kv_block=16)
    session = Session(model)
    session.prompt(ids_for(160), marks=(32, 96))
    state, pages = session.state.size_at(160)
    entries = model.snapshots.entries()
    assert sorted(snapshot.position for snapshot in entries) == [32, 64, 96, 128, 160]
    tables = sum(2 * 8 * (10 - snapshot.position // 16) for snapshot in entries)
    rest = 4 * 160 + 4 * cases.VOCAB  # ids and logits
    assert model.snapshots.holdings.used == 5 * state - tables + pages + rest


@pytest.mark.parametrize("budget", [1.4, 2, 3.5, 9])
def test_500_random_prompts_stay_in_their_budget(budget, monkeypatch):
    """At every allocation, what is really held is within the budget; hits are right."""
    count = 500 if budget == 3.5 else 60
    model = engine(int(budget * snapshot_bytes(64)))
    trace, rng = Tracer(model, monkeypatch), np.random.default_rng(0)
    roots = [ids_for(int(rng.integers(1, 60)), i) for i in range(6)]
    session = Session(model)
    for number in range(count):
        root = roots[int(rng.integers(6))]
        if rng.random() < 0.3:
            root = root[: int(rng.integers(1, len(root) + 1))]
        ids = [*root, *ids_for(int(rng.integers(1, 25)), int(rng.integers(4)))]
        logits = session.prompt(ids, marks=(len(root),))
        if number % 10 == 0:
            assert outcome(session, logits) == uninterrupted(model, ids)
        assert trace.look() == model.snapshots.holdings.used
    assert 0 < trace.peak <= model.snapshots.holdings.peak <= model.snapshots.holdings.budget
    assert model.snapshots.stats.evicted > 0
    assert model.snapshots.stats.hits > (count // 10 if budget > 3 else 0)


def test_nothing_is_taken_where_nothing_fits():
    model = engine(snapshot_bytes(100) - 1)
    session, ids = Session(model), ids_for(100)
    assert outcome(session, session.prompt(ids)) == uninterrupted(model, ids)
    assert len(model.snapshots) == model.snapshots.holdings.used == 0
    assert model.snapshots.stats.declined > 0


def test_a_smaller_budget_promises_less():
    plan = {}
    state, pages = Session(engine(None)).state.size_at(1500)
    for snapshots in (200, 40, 30, 12, 6, 2):
        model = engine(snapshots * state + pages)
        taking = Taking.plan(model.snapshots, Prefix(ids_for(1500), NumericPath("a", "b", "c")), Session(model).state, (70, 800))
        plan[snapshots] = len(taking.stops), taking.promise()
    assert plan[200] == (20, None)
    assert [plan[n][0] for n in (30, 12, 6, 2)] == sorted((plan[n][0] for n in (30, 12, 6, 2)), reverse=True)
    told = re.compile(r"an edit recomputes up to ([\d.]+) times the tokens after it")
    ratio = {n: float(told.fullmatch(plan[n][1])[1]) for n in (40, 30)}
    assert 1.15 < ratio[40] < ratio[30]
    assert plan[2] == (1, "an edit recomputes up to 800 tokens more than it changes")
    session = Session(engine(12 * state + pages))
    cases.NOTES.clear()
    session.prompt(ids_for(1500))
    said = f"snapshots: {session.promise}; --snapshot-ram above "
    session.prompt(ids_for(1400, 1))
    assert [note[: len(said)] for note in cases.NOTES] == [said]
    assert session.promise in session.engine.snapshots.line(session.promise)


def test_roots_and_recent_ends_stay():
    """Twelve chats over one system prompt in room for six: its end stays, and so do the last chats'."""
    model = engine(int(6.5 * snapshot_bytes(64)))
    system = ids_for(40, 1)
    chats = [[*system, *ids_for(30, 10 + chat)] for chat in range(12)]
    for ids in chats:
        Session(model).prompt(ids, marks=(40,))
    kept = {(snapshot.kind, snapshot.position) for snapshot in model.snapshots.entries()}
    assert ("root", 40) in kept
    held = [model.snapshots.lookup(Prefix([*ids, 1], Session(model).path)).position for ids in chats]
    assert held[-3:] == [70, 70, 70]
    assert set(held) == {40, 70}


@pytest.mark.parametrize("snapshots", [3.5, 16])
def test_eviction_by_worth_is_no_worse_than_lru(snapshots):
    shares = snapshot_policy.compare(80, range(4), snapshots)
    assert shares["worth"] >= shares["lru"]
    assert shares["worth"] > 0.1


def test_costs_are_measured_once_a_prompt_is_long_enough():
    model = engine(frozen=False)
    Session(model).prompt(ids_for(20))
    assert model.snapshots.costs.token_s is None
    Session(model).prompt(ids_for(150, 1))
    costs = model.snapshots.costs
    assert 0 < costs.token_s < 1
    assert 0 < costs.save_s < 1
    assert costs.spacing(1500) % 64 == 0
    assert Costs().spacing(1500) == 64
    assert Costs(0.015, 0.02).spacing(1500) == 64
    assert Costs(0.010, 0.0003).spacing(1500) == 256


# images


def test_the_same_tokens_with_another_picture_are_another_prefix():
    model, ids = engine(), ids_for(60)
    session = Session(model)
    session.prefill(ids)
    for picture in (1, 2):
        prefix = Prefix(ids, session.path, cases.pictures(picture))
        assert model.snapshots.lookup(prefix) is None
        model.snapshots.add(Snapshot(prefix, session.state.copy(), np.full(cases.VOCAB, picture, np.float32)))
    for picture in (1, 2):
        found = model.snapshots.lookup(Prefix(ids, session.path, cases.pictures(picture)))
        assert found.logits[0] == picture
        longer = Prefix([*ids, 1, 2], session.path, cases.pictures(picture))
        assert model.snapshots.lookup(longer).logits[0] == picture
    assert model.snapshots.lookup(Prefix(ids, session.path)) is None
    assert model.snapshots.lookup(Prefix(ids, session.path, cases.pictures(3))) is None


# the tier


class Shelf:
    """A tier in memory that lets go of what it is given when it is told to."""

    def __init__(self) -> None:
        self.kept: dict[bytes, Snapshot] = {}
        self.releases: list = []
        self.broken = False

    def longest(self, prefix: Prefix) -> Stored | None:
        usable = [s for s in self.kept.values() if s.prefix.agrees(prefix, min(s.position, len(prefix)))
                  and (s.position < len(prefix) or (s.position == len(prefix) and s.logits is not None))]
        best = max(usable, key=lambda s: s.position, default=None)
        return best and Stored(best.position, sum(best.memory().values()), best)

    def load(self, stored: Stored) -> Snapshot | None:
        s = stored.handle
        return None if self.broken else replace(s, prefix=Prefix(s.prefix.ids, s.prefix.path), state=deep(s))

    def put(self, snapshot: Snapshot, release: object) -> None:
        self.kept[snapshot.prefix.digest()] = replace(snapshot, state=deep(snapshot))
        self.releases.append(release)

    def let_go(self) -> None:
        while self.releases:
            self.releases.pop()()


def deep(snapshot: Snapshot) -> object:
    state = snapshot.state.copy()
    state.position = 0
    state.reserve(snapshot.position)  # pages of its own
    state.position = snapshot.position
    return state


def tiered(budget: int) -> tuple[ArrayModel, Shelf]:
    model, shelf = engine(budget), Shelf()
    model.snapshots.tier = shelf
    return model, shelf


def test_what_memory_lost_comes_back_from_the_tier(monkeypatch):
    model, shelf = tiered(int(2.5 * snapshot_bytes(70)))
    trace = Tracer(model, monkeypatch)
    prompts = [ids_for(70, seed) for seed in range(5)]
    for _ in range(2):
        for ids in prompts:
            session = poisoned(model)
            assert outcome(session, session.prompt(ids)) == uninterrupted(model, ids)
            shelf.let_go()
    assert session.cached_tokens == 70
    assert trace.peak <= model.snapshots.holdings.budget


def test_memory_that_the_tier_still_reads_is_not_given_away(monkeypatch):
    model, shelf = tiered(int(2.5 * snapshot_bytes(70)))
    trace = Tracer(model, monkeypatch)
    for seed in range(4):
        Session(model).prompt(ids_for(70, seed))
        assert trace.look() == model.snapshots.holdings.used <= model.snapshots.holdings.budget
    assert model.snapshots.stats.evicted == 0
    assert model.snapshots.stats.declined > 0
    shelf.let_go()
    Session(model).prompt(ids_for(70, 9))
    assert model.snapshots.stats.evicted > 0
    shelf.let_go()
    assert trace.look() == model.snapshots.holdings.used


def test_a_tier_that_cannot_read_what_it_has_costs_nothing():
    model, shelf = tiered(int(1.5 * snapshot_bytes(70)))
    for seed in (1, 2):
        Session(model).prompt(ids_for(70, seed))
        shelf.let_go()
    shelf.broken = True
    session = poisoned(model)
    assert outcome(session, session.prompt(ids_for(70, 1))) == uninterrupted(model, ids_for(70, 1))
    assert session.cached_tokens == 0
    shelf.let_go()
    assert model.snapshots.holdings.used == sum(sum(s.memory().values()) for s in model.snapshots.entries())


def test_a_cache_serves_threads():
    """Sessions of several threads over one cache: the index and the accounts stay whole."""
    from concurrent.futures import ThreadPoolExecutor

    cache = SnapshotCache(int(4.5 * snapshot_bytes(70)), costs=Costs(0.01, 0.01, frozen=True))

    def serve(seed: int) -> bool:
        model = engine(None)
        mine = ArrayModel(model.decoder, model.options, model.pack_hash, snapshots=cache)
        session, right = Session(mine), True
        for turn in range(8):
            ids = [*ids_for(40, turn % 2), *ids_for(20, seed + turn)]
            right &= outcome(session, session.prompt(ids, marks=(40,))) == uninterrupted(mine, ids)
        return right

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(serve, range(6)))
    memory: dict[int, int] = {}
    for snapshot in cache.entries():
        memory |= snapshot.memory()
    assert cache.holdings.used == sum(memory.values()) <= cache.holdings.peak <= cache.holdings.budget
