"""What snapshots cost: bytes that are held, seconds that were measured, and counts of what happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fermi_engine.snapshots import boundaries


class Holdings:
    """Bytes that are held, each piece of memory once however many hold it, and those reserved for more; never over `budget`."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = self.peak = 0
        self._holders: Counter[int] = Counter()

    def missing(self, memory: dict[int, int]) -> int:
        """Bytes of it that are not held yet."""
        return sum(nbytes for which, nbytes in memory.items() if which not in self._holders)

    def only(self, memory: dict[int, int]) -> int:
        """Bytes of it, all of it held, that have no second holder."""
        return sum(nbytes for which, nbytes in memory.items() if self._holders[which] == 1)

    def reserve(self, nbytes: int) -> bool:
        """Set bytes aside before they are allocated, if they fit."""
        if self.used + nbytes > self.budget:
            return False
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        return True

    def unreserve(self, nbytes: int) -> None:
        """Give reserved bytes back."""
        self.used -= nbytes

    def hold(self, memory: dict[int, int], reserved: int) -> None:
        """Count memory that `reserved` bytes were set aside for; ValueError where it takes more."""
        if self.missing(memory) > reserved:
            raise ValueError(f"{self.missing(memory)} bytes held where {reserved} were reserved")
        self.used += self.missing(memory) - reserved
        self._holders.update(memory.keys())

    def release(self, memory: dict[int, int]) -> None:
        """One holder fewer."""
        for which, nbytes in memory.items():
            self._holders[which] -= 1
            if not self._holders[which]:
                del self._holders[which]
                self.used -= nbytes


@dataclass
class Costs:
    """Seconds for saving a snapshot and for evaluating a token, as last measured; None before. `frozen` ones stay as they are."""

    save_s: float | None = None
    token_s: float | None = None
    frozen: bool = False

    def measured(self, save_s: float | None = None, token_s: float | None = None) -> None:
        """Take a measurement."""
        if not self.frozen:
            self.save_s, self.token_s = save_s or self.save_s, token_s or self.token_s

    def spacing(self, tokens: int) -> int:
        """Tokens between boundaries of a prompt of so many."""
        if self.save_s is None or self.token_s is None:
            return boundaries.BLOCK
        return boundaries.spacing(self.save_s, self.token_s, tokens)


@dataclass
class Stats:
    """What happened: requests, those that had something at hand, tokens that they did not evaluate; snapshots taken, evicted, and
    not taken for want of room; seconds for saving and restoring."""

    requests: int = 0
    hits: int = 0
    cached_tokens: int = 0
    saved: int = 0
    evicted: int = 0
    declined: int = 0
    save_s: float = 0.0
    restored: int = 0
    restore_s: float = 0.0

    def found(self, tokens: int) -> None:
        """A request that had so many tokens at hand, of its session or of a snapshot."""
        self.requests += 1
        self.hits += tokens > 0
        self.cached_tokens += tokens

    def restored_in(self, seconds: float) -> None:
        """A snapshot was restored."""
        self.restored += 1
        self.restore_s += seconds
