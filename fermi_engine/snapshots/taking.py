"""Taking: the snapshots of one prefill. Where they will be is decided before it; they join the cache when it has come through and
leave nothing behind when it has not."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from fermi_engine.snapshots import boundaries
from fermi_engine.snapshots.cache import Snapshot, SnapshotCache
from fermi_engine.snapshots.prefix import Prefix
from fermi_engine.snapshots.prefix_tree import Entry
from fermi_engine.state import HybridState

CLOSE = 8  # tokens: too few between two snapshots
BLOCK_SHARE = 1 / 3  # of the snapshots that there is room for, at most so many are boundaries of one prompt

Trail = tuple[tuple[int, str], ...]


@dataclass
class Taking:
    """Snapshots of a prefill to the end of `prefix`. stops: position -> kind of those before its end, in rising order. ratio: of
    the ladder, see boundaries.py; infinite where none fits, and `widest` tokens lie between two stops then."""

    cache: SnapshotCache
    prefix: Prefix
    stops: dict[int, str]
    ratio: float
    widest: int = 0
    taken: list[Entry] = field(default_factory=list)
    trail: Trail = ()  # up to where the prefill begins
    seconds: float = 0.0  # that taking them took
    _reserved: int = 0

    @classmethod
    def plan(cls, cache: SnapshotCache, prefix: Prefix, state: HybridState, marks: Sequence[int] = (),
             base: int = 0, trail: Trail = ()) -> Taking:
        """For a prefill that goes on from `state`. marks: positions where messages end, the first that of the system prompt;
        those outside of what is evaluated count for nothing. base: a position where a chunk of the GPU's ends."""
        start, end = state.position, len(prefix)
        marks = _apart(marks)
        inside = [at for at in marks if start < at < end]
        kinds = {at: "root" if at == marks[0] else "turn" for at in inside}
        room = _room(cache, state, end)
        # The next prompt shares the last mark, every chat the first.
        by_rank = [*inside[-1:], *inside[:1], *reversed(inside[1:-1])]
        kept = {at: kinds[at] for at in by_rank[: max(0, room - 1)]}
        most = max(0, int(room * BLOCK_SHARE) - len(kept))
        blocks, ratio = boundaries.fitting(start, end, cache.costs.spacing(end), most, base)
        stops = dict(sorted({**dict.fromkeys(blocks, "block"), **kept}.items()))
        return cls(cache, prefix, stops, ratio, max(b - a for a, b in pairwise([start, *stops, end])), trail=trail)

    def take(self, state: HybridState, way: str, logits: np.ndarray | None = None) -> None:
        """A snapshot of the live state, where it is due or, with logits, at the end. way: 'cpu' or 'gpu', of the tokens since."""
        start = time.perf_counter()
        kind = self.stops.get(state.position, "end")
        trail = extended(self.trail, state.position, way)
        entry = self.cache.save(state, self.prefix.head(state.position), kind, trail, logits)
        if entry is not None:
            self.taken.append(entry)
        self.seconds += time.perf_counter() - start

    def wanted(self) -> list[int]:
        """Its stops for a GPU, which leaves them all in one pass: marks before boundaries, late ones before early ones."""
        return sorted(self.stops, key=lambda at: (self.stops[at] == "block", -at))

    def reserve(self, own: dict[int, int], state: HybridState) -> list[int]:
        """Make room for the states at stops, before a pass from `state` on allocates them; those for which there is room, in
        rising order. own: bytes of each beside its pages and their tables."""
        places = [at for at in self.wanted() if at in own]
        while places:
            sizes = {at: state.size_at(at) for at in places}
            tables = sum(size - state.size_at(0)[0] for size, _ in sizes.values())
            need = sum(own[at] for at in places) + tables + max(pages for _, pages in sizes.values()) + self.prefix.ids.nbytes
            if self.cache.make_room(need):
                self._reserved = need
                break
            self.cache.stats.declined += len(places)
            places = places[: len(places) // 2]
        return sorted(places)

    def made(self, states: Sequence[HybridState], seconds: float) -> None:
        """The states that room was made for, and how long the host was busy with them."""
        start = time.perf_counter()
        for state in states:
            snapshot = Snapshot(self.prefix.head(state.position), state, None, self.stops[state.position],
                                extended(self.trail, state.position, "gpu"))
            entry, self._reserved = self.cache.hold_of(snapshot, self._reserved)
            if entry is not None:
                self.taken.append(entry)
        self.give_back()
        if states:
            self.cache.count_saved(len(states), seconds + time.perf_counter() - start)

    def give_back(self) -> None:
        """Room that was made and not used."""
        self.cache.holdings.unreserve(self._reserved)
        self._reserved = 0

    def commit(self) -> None:
        """The prefill has come through."""
        self.give_back()
        self.cache.publish(self.taken)
        self.taken = []

    def drop(self) -> None:
        """It has not."""
        self.give_back()
        self.cache.discard(self.taken)
        self.taken = []

    def promise(self) -> str | None:
        """What an edit costs, in words, where room has made the ladder wider than it should be."""
        if self.ratio <= boundaries.RATIO:
            return None
        if math.isinf(self.ratio):
            return f"an edit recomputes up to {self.widest} tokens more than it changes"
        return f"an edit recomputes up to {self.ratio:.2f} times the tokens after it"


def extended(trail: Trail, end: int, way: str) -> Trail:
    """A trail whose last stretch goes `way` up to `end`."""
    return (*(trail[:-1] if trail and trail[-1][1] == way else trail), (end, way))


def _apart(marks: Sequence[int]) -> list[int]:
    """In rising order, without those that a later one is close to."""
    marks = sorted(set(marks))
    return [at for i, at in enumerate(marks) if marks[i + 1 : i + 2] == [] or marks[i + 1] - at >= CLOSE]


def _room(cache: SnapshotCache, state: HybridState, end: int) -> int:
    """How many snapshots the budget holds beside the keys and values up to `end`."""
    own, pages = state.size_at(end)
    return max(0, (cache.holdings.budget - pages) // own)
