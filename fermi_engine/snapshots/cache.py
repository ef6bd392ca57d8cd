"""Snapshots: states of sequences that are kept to go on from, by position, within a budget of bytes.

A recurrent state cannot be rewound, so a prompt that shares its beginning with an earlier one can go on only from where a state
was kept. Which prompt may go on from which snapshot is a matter of prefix.py, where they are left one of boundaries.py.

Eviction: the snapshot of least worth goes first (prefix_tree.py), and what was used lately has a head start over what was not,
the worth of the last one that went: GreedyDual-Size (P. Cao and S. Irani, "Cost-aware WWW proxy caching algorithms", 1997) with
tokens as the cost. Ends of sequences are likely to be gone on from; so are places where sequences have parted, such as the end
of a system prompt, the more of them the more; what lies between is there for edits. So roots and recent ends stay, and old
turns of a long chat go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import RLock
from typing import Any, Protocol

import numpy as np

from fermi_engine import report
from fermi_engine.kept_memory import copied, memory_of
from fermi_engine.snapshots import boundaries
from fermi_engine.snapshots.budget import Costs, Holdings, Stats
from fermi_engine.snapshots.prefix import Prefix
from fermi_engine.snapshots.prefix_tree import Entry, PrefixTree, longest
from fermi_engine.state import HybridState

KINDS = ("root", "turn", "end", "answer", "block")
TRIES = 4  # snapshots of a tier that may be unusable before it is given up for a prompt


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The whole state after the tokens of `prefix`; never written after it was made, so that any number of sessions may share it.

    prefix: tokens, images and the numeric path. state: at position len(prefix). logits: float32 [vocab] of the last token where
    they are kept, else None. kind: 'root' (end of the system prompt), 'turn' (end of another message), 'end' (of a prompt),
    'answer' (of what was generated), 'block' (a boundary in between). trail: which path each stretch of tokens took, as
    (end position, 'cpu', 'gpu' or 'gpu token') in order; neighbours differ. shift: how far positions are ahead of counts of
    tokens, where images have moved them and whoever goes on does not know the images (Session.restore).
    """

    prefix: Prefix
    state: HybridState
    logits: np.ndarray | None = None
    kind: str = "end"
    trail: tuple[tuple[int, str], ...] = ()
    shift: int = 0

    def __post_init__(self) -> None:
        self.state.freeze()

    @property
    def position(self) -> int:
        """How many tokens it stands after."""
        return len(self.prefix)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Those tokens."""
        return tuple(self.prefix.ids.tolist())

    @property
    def pack_hash(self) -> str:
        """Seal of the pack it belongs to."""
        return self.prefix.path.pack_hash

    def memory(self) -> dict[int, int]:
        """Bytes of every piece of memory that it holds, by identity; what snapshots share has the same."""
        rest = [self.prefix.ids] if self.logits is None else [self.prefix.ids, self.logits]
        return {**self.state.memory(), **memory_of(rest)}


@dataclass(frozen=True)
class Stored:
    """A snapshot that a tier has: at which position, how many bytes of memory it takes once loaded, and the tier's own name."""

    position: int
    nbytes: int
    handle: Any


class Tier(Protocol):
    """Where snapshots go that memory does not keep. SnapshotCache calls it; `put` must return at once."""

    def longest(self, prefix: Prefix) -> Stored | None:
        """The longest snapshot that `prefix` can go on from: of fewer tokens, or of all of them with logits. No loading."""

    def load(self, stored: Stored) -> Snapshot | None:
        """Read it; None where it turns out to be unusable, and `longest` is to give another then. The room for `nbytes` has been
        made."""

    def put(self, snapshot: Snapshot, release: Callable[[], None]) -> None:
        """Keep it, in the background; a tier may decline. `release` is called once, from any thread, when its memory is no longer
        used: until then it counts against the budget."""


class SnapshotCache:
    """Snapshots within `budget` bytes, which nothing that it holds or takes ever exceeds, not for an instant.

    tier: where they go beside memory, see Tier; None without one. `stats` counts, `costs` are measured.
    """

    def __init__(self, budget: int, tier: Tier | None = None, costs: Costs | None = None,
                 note: Callable[[str], None] = report.note) -> None:
        self.tier, self.stats, self.costs = tier, Stats(), costs or Costs()
        self.holdings = Holdings(budget)
        self.lock = RLock()
        self._tree = PrefixTree()
        self._floor = 0.0  # worth of the last one evicted
        self._note, self._has_told = note, False

    def __len__(self) -> int:
        return len(self._tree)

    def entries(self) -> list[Snapshot]:
        """All of them, for reports and tests."""
        with self.lock:
            return [entry.snapshot for entry in self._tree]

    def line(self, promise: str | None = None) -> str:
        """What it holds and has done, for a report; promise: see Taking.promise."""
        stats, held = self.stats, self.holdings
        text = (f"snapshots: {len(self)} in {report.size(held.used)} of {report.size(held.budget)}, {stats.cached_tokens} tokens "
                f"of {stats.hits} prompts not evaluated again, {stats.saved} saved in {1e3 * stats.save_s:.1f} ms, "
                f"{stats.restored} restored in {1e3 * stats.restore_s:.1f} ms, {stats.evicted} evicted")
        return text + (f"; {promise}" if promise else "")

    def tell(self, promise: str | None) -> None:
        """Say what an edit costs where room has made boundaries wider than they should be; once is enough."""
        if promise and not self._has_told:
            self._has_told = True
            self._note(f"snapshots: {promise}; --snapshot-ram above {report.size(self.holdings.budget)} leaves more of them")

    def lookup(self, prefix: Prefix) -> Snapshot | None:
        """The longest snapshot that `prefix` can go on from: of fewer tokens, or of all of them with logits."""
        with self.lock:
            found = self._longest(prefix)
            loaded = self._from_tier(prefix, found.position if found else 0)
            if loaded is not None:
                return loaded
            found = found if found is None or self._tree.at(found.snapshot.prefix) is found else self._longest(prefix)
            if found is None:
                return None
            self._touch(found)
            return found.snapshot

    def _longest(self, prefix: Prefix) -> Entry | None:
        def usable(entry: Entry) -> bool:
            return (entry.position < len(prefix) or entry.snapshot.logits is not None) \
                and entry.snapshot.prefix.agrees(prefix, entry.position)

        return longest(self._tree.path(prefix), usable)

    def _from_tier(self, prefix: Prefix, beyond: int) -> Snapshot | None:
        """What the tier has that is longer than `beyond`, now in memory; the next best where it turns out to be unusable."""
        snapshot, tries = None, TRIES
        while snapshot is None:
            stored = None if self.tier is None else self.tier.longest(prefix)
            if stored is None or stored.position <= beyond or not tries or not self.make_room(stored.nbytes):
                return None
            snapshot, tries = self.tier.load(stored), tries - 1
            if snapshot is None:
                self.holdings.unreserve(stored.nbytes)
        entry = self.held(snapshot, stored.nbytes)
        if not prefix.agrees(snapshot.prefix, min(snapshot.position, len(prefix))) or snapshot.position > len(prefix):
            self.discard([entry])
            return None
        self._index(entry)
        return snapshot

    def save(self, state: HybridState, prefix: Prefix, kind: str, trail: tuple[tuple[int, str], ...],
             logits: np.ndarray | None = None) -> Entry | None:
        """A snapshot of a live state, not in the index yet; None where there is no room, which is found out before anything is
        allocated. To be given to `publish` or `discard`."""
        began = time.perf_counter()
        with self.lock:
            rest = memory_of([prefix.ids])
            own, shared = state.copy_cost()
            own += 0 if logits is None else logits.nbytes
            need = self._room_for(own, {**shared, **rest})
            if need is None:
                self.stats.declined += 1
                return None
            snapshot = Snapshot(prefix, state.copy(), None if logits is None else copied(logits), kind, trail)
            entry = self.held(snapshot, need)
            self.count_saved(1, time.perf_counter() - began)
            return entry

    def count_saved(self, count: int, seconds: float) -> None:
        """So many snapshots were taken in that time."""
        self.stats.saved += count
        self.stats.save_s += seconds
        self.costs.measured(save_s=seconds / count)

    def add(self, snapshot: Snapshot) -> bool:
        """Index one that was made elsewhere, such as by Session.snapshot; whether there was room."""
        with self.lock:
            need = self._room_for(0, snapshot.memory())
            if need is None:
                self.stats.declined += 1
                return False
            self.publish([self.held(snapshot, need)])
            return True

    def make_room(self, nbytes: int) -> bool:
        """Reserve bytes of the budget, evicting what is worth least; False where that does not help."""
        with self.lock:
            return self._room_for(nbytes, {}) is not None

    def _room_for(self, nbytes: int, shared: dict[int, int]) -> int | None:
        """Reserve so many bytes and those of `shared` memory that nobody holds, which evictions may make more; how many it was,
        None where there is no room."""
        while not self.holdings.reserve(need := nbytes + self.holdings.missing(shared)):
            free = [entry for entry in self._tree if not entry.busy]
            if not free or need > self.holdings.budget:
                return None
            self._evict(min(free, key=self._worth))
        return need

    def _worth(self, entry: Entry) -> float:
        return entry.start + entry.likelihood * entry.gain / max(1, self.holdings.only(entry.memory))

    def _evict(self, entry: Entry) -> None:
        self._floor = max(self._floor, self._worth(entry))
        self.stats.evicted += 1
        self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        self._tree.remove(entry)
        if entry.busy:
            entry.is_gone = True  # its memory is held until the tier lets go
        else:
            self.holdings.release(entry.memory)

    def held(self, snapshot: Snapshot, reserved: int) -> Entry:
        """An entry whose memory counts, in place of `reserved` bytes; not in the index yet."""
        with self.lock:
            entry = Entry(snapshot, snapshot.memory())
            self.holdings.hold(entry.memory, reserved)
            return entry

    def hold_of(self, snapshot: Snapshot, reserved: int) -> tuple[Entry | None, int]:
        """An entry for a snapshot that more than its own room was reserved for, and how much of that is left; None where it takes
        more, because others have gone that shared with it, and there is no room for that."""
        with self.lock:
            need = self.holdings.missing(snapshot.memory())
            if need > reserved:
                if not self.make_room(need - reserved):
                    return None, reserved
                reserved = need
            return self.held(snapshot, need), reserved - need

    def discard(self, entries: Iterable[Entry]) -> None:
        """Forget snapshots that were not published."""
        with self.lock:
            for entry in entries:
                self.holdings.release(entry.memory)

    def publish(self, entries: Iterable[Entry]) -> None:
        """Let later requests find these, and drop older boundaries that their promise does not need any more."""
        with self.lock:
            fresh = [entry for entry in sorted(entries, key=lambda entry: entry.position) if self._index(entry)]
            for entry in fresh:
                if self.tier is not None:
                    entry.busy = True
                    self.tier.put(entry.snapshot, lambda entry=entry: self._let_go(entry))
            if fresh:
                self._thin(fresh[-1])

    def _index(self, entry: Entry) -> bool:
        """Insert an entry; False where the index has one of that prefix that is as good, which stays."""
        there = self._tree.at(entry.snapshot.prefix)
        if there is not None:
            if there.snapshot.logits is not None or entry.snapshot.logits is None:
                self.holdings.release(entry.memory)
                self._touch(there)
                return False
            self._remove(there)
        self._tree.insert(entry)
        self._touch(entry)
        return True

    def _touch(self, entry: Entry) -> None:
        entry.start = self._floor

    def _let_go(self, entry: Entry) -> None:
        with self.lock:
            entry.busy = False
            if entry.is_gone:
                self.holdings.release(entry.memory)

    def _thin(self, end: Entry) -> None:
        path = self._tree.path(end.snapshot.prefix)[:-1]
        blocks = [entry for entry in path if entry.snapshot.kind == "block" and not entry.busy
                  and entry.nearest_end() == end.position]
        gone = boundaries.superfluous([entry.position for entry in path], [entry.position for entry in blocks], end.position,
                                      self.costs.spacing(end.position))
        for entry in blocks:
            if entry.position in gone:
                self._remove(entry)
