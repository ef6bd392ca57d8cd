"""Snapshots: states of sequences that are kept to go on from, and what a store of them in files has to offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fermi_engine.prefix import Prefix
from fermi_engine.state import HybridState

KINDS = ("root", "turn", "end", "answer", "block")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The whole state after the tokens of `prefix`; never written after it was made, so that any number of sessions may share it.

    prefix: tokens, images and the numeric path. state: at position len(prefix). logits: float32 [vocab] of the last token where
    they are kept, else None. kind: 'root' (end of the system prompt), 'turn' (end of another message), 'end' (of a prompt),
    'answer' (of what was generated), 'block' (a boundary in between). trail: which path each stretch of tokens took, as
    (end position, 'cpu' or 'gpu') in order; neighbours differ.
    """

    prefix: Prefix
    state: HybridState
    logits: np.ndarray | None = None
    kind: str = "end"
    trail: tuple[tuple[int, str], ...] = ()

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
        """Read it; None where it turns out to be unusable. The room for `nbytes` has been made."""

    def put(self, snapshot: Snapshot, release: Callable[[], None]) -> None:
        """Keep it, in the background; a tier may decline. `release` is called once, from any thread, when its memory is no longer
        used: until then it counts against the budget."""
