"""The index of snapshots: which are beginnings of which, the longest for a prompt, and what each is worth.

A snapshot's worth is the tokens that a request would have to evaluate again without it, times how likely one comes, over the
bytes that would become free. Tokens count back to the nearest other snapshot that the request could go on from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fermi_engine.snapshots.prefix import Prefix

if TYPE_CHECKING:
    from fermi_engine.snapshots.cache import Snapshot

# How likely a request goes on from inside of a sequence, where 1 stands for its end: behind a message, and anywhere else. From
# tools/lab/snapshot_policy.py, where halving or doubling them changes little.
BETWEEN, BOUNDARY = 0.4, 0.1


@dataclass(eq=False)
class Entry:
    """A snapshot in the index. parent: the longest other one that is a beginning of it. start: the head start in worth that it
    has over what was not used since. busy: someone reads its memory; is_gone: it left the index meanwhile."""

    snapshot: Snapshot
    memory: dict[int, int] = field(repr=False)
    start: float = 0.0
    busy: bool = False
    is_gone: bool = False
    parent: Entry | None = field(default=None, repr=False)
    children: set[Entry] = field(default_factory=set, repr=False)

    @property
    def position(self) -> int:
        """Tokens that it stands after."""
        return self.snapshot.position

    @property
    def gain(self) -> int:
        """Tokens to evaluate again without it."""
        return self.position - (self.parent.position if self.parent else 0)

    @property
    def likelihood(self) -> float:
        """How likely a request goes on from here: 1 for the end of a sequence, and for each that parts with others here."""
        if self.snapshot.kind == "block":
            return max(BOUNDARY, len(self.children) - 1.0)
        return max(BETWEEN, len(self.children) - 1.0) if self.children else 1.0

    def nearest_end(self) -> int:
        """Position of the nearest end of a sequence that it is a beginning of."""
        return min((child.nearest_end() for child in self.children), default=self.position)


class PrefixTree:
    """Entries by the digest of their prefix."""

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._positions: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self):
        return iter(self._entries.values())

    def path(self, prefix: Prefix) -> list[Entry]:
        """All that are beginnings of `prefix`, itself among them, by rising position."""
        digests = prefix.digests(position for position in self._positions if position <= len(prefix))
        found = (self._entries.get(digests[position]) for position in sorted(digests))
        return [entry for entry in found if entry is not None]

    def at(self, prefix: Prefix) -> Entry | None:
        """The one of exactly this prefix."""
        return self._entries.get(prefix.digest())

    def insert(self, entry: Entry) -> None:
        """Add one whose prefix has none yet."""
        prefix = entry.snapshot.prefix
        above = [other for other in self.path(prefix) if other.position < entry.position]
        entry.parent = above[-1] if above else None
        for other in list(entry.parent.children) if entry.parent else [e for e in self if e.parent is None]:
            if other.position > entry.position and other.snapshot.prefix.digest(entry.position) == prefix.digest():
                self._move(other, entry)
        if entry.parent:
            entry.parent.children.add(entry)
        self._entries[prefix.digest()] = entry
        self._positions[entry.position] += 1

    def remove(self, entry: Entry) -> None:
        """Take one out; what goes on from it goes on from its parent."""
        for child in list(entry.children):
            self._move(child, entry.parent)
        if entry.parent:
            entry.parent.children.discard(entry)
        del self._entries[entry.snapshot.prefix.digest()]
        self._positions[entry.position] -= 1
        if not self._positions[entry.position]:
            del self._positions[entry.position]

    def _move(self, child: Entry, parent: Entry | None) -> None:
        if child.parent:
            child.parent.children.discard(child)
        child.parent = parent
        if parent:
            parent.children.add(child)


def longest(path: list[Entry], usable: Callable[[Entry], bool]) -> Entry | None:
    """The last of a path that is usable."""
    return next((entry for entry in reversed(path) if usable(entry)), None)
