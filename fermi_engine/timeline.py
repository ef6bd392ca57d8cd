"""Timeline: one session under prompts that are given whole, as a chat gives them turn by turn."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from fermi_engine import report

if TYPE_CHECKING:
    from fermi_engine.engine import Engine
    from fermi_engine.session import Snapshot

LONG_PREFILL = 512  # tokens from which on progress is worth showing


class Timeline:
    """A session that is given whole prompts and evaluates only what it does not hold yet.

    It reuses its session where the prompt continues it, else the snapshot taken at the last `mark`, else it starts
    again: the results are the same, because a session gives the same bits whatever pieces its tokens come in.
    """

    position = 0  # every prompt counts from the first token

    def __init__(self, engine: Engine) -> None:
        self.engine, self.vocab_size = engine, engine.config.vocab_size
        self.mark: int | None = None  # how much of the next prompt the one after it will share
        self._session = engine.session()
        self._snapshot: Snapshot | None = None
        self.begin()

    def begin(self) -> None:
        """Set the counts of the next prompt to zero: `evaluated` and `decoded` tokens, `prefill_s` seconds."""
        self.evaluated = self.decoded = 0  # tokens
        self.prefill_s = 0.0

    def prefill(self, ids: Sequence[int]) -> Any:
        """Logits after `ids`, which count from the first token."""
        start = time.perf_counter()
        reused = self._resume(tuple(ids))
        self.evaluated = len(ids) - reused
        shown = self.evaluated >= LONG_PREFILL and sys.stderr.isatty()
        with report.progress("reading", "tokens") if shown else nullcontext() as show:
            if self.mark is not None and reused < self.mark < len(ids):
                self._feed(ids[reused : self.mark], reused, len(ids), show)
                self._snapshot, reused = self._session.snapshot(), self.mark
            logits = self._feed(ids[reused:], reused, len(ids), show)
        self.prefill_s = time.perf_counter() - start
        return logits

    def decode(self, token: int) -> Any:
        """Logits after one more token."""
        self.decoded += 1
        return self._session.decode(token)

    def _feed(self, ids: Sequence[int], before: int, total: int, show: Any) -> Any:
        return self._session.prefill(ids, show and (lambda done, _: show(before + done, total, "")))

    def _resume(self, ids: tuple[int, ...]) -> int:
        """Put the session at the longest beginning of `ids` at hand and return its length."""
        position = self._session.position
        if position < len(ids) and self._session.tokens == ids[:position]:
            return position
        self._session = self.engine.session()
        if self._snapshot and len(self._snapshot.tokens) < len(ids) \
                and self._snapshot.tokens == ids[: len(self._snapshot.tokens)]:
            self._session.restore(self._snapshot)
        return self._session.position
