"""Timeline: one session under prompts that are given whole, as a chat gives them turn by turn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from fermi_engine import report

if TYPE_CHECKING:
    from fermi_engine.engine import Engine
    from fermi_engine.session import Session
    from fermi_engine.vision.patches import PreparedImage

LONG_PREFILL = 512  # tokens from which on progress is worth showing


class Timeline:
    """What the token loop drives: prompts count from the first token, and only what neither the session nor the engine's
    snapshots hold is evaluated. See Session.prompt.
    """

    position = 0  # every prompt counts from the first token

    def __init__(self, engine: Engine, is_once: bool = False) -> None:
        """is_once: no prompt will follow here, so that its answer is left as a snapshot."""
        self.engine, self.vocab_size = engine, engine.config.vocab_size
        self.mark: int | None = None  # how much of the next prompt the one after it will share
        self.images: tuple[PreparedImage, ...] = ()  # of all prompts from the next one on
        self.session = engine.session()
        self.logits: Any = None  # of the last token that went in
        self._is_once = is_once
        self.begin()

    def begin(self) -> None:
        """Set the counts of the next prompt to zero: `evaluated` and `decoded` tokens, `prefill_s` seconds."""
        self.evaluated = self.decoded = 0  # tokens
        self.prefill_s = 0.0

    @property
    def cached_tokens(self) -> int:
        """Of the last prompt, how many tokens were not evaluated."""
        return self.session.cached_tokens

    def prefill(self, ids: Sequence[int]) -> Any:
        """Logits after `ids`, which count from the first token."""
        start = time.perf_counter()
        marks = [*turn_ends(ids, self.engine.eos_ids), *([self.mark] if self.mark else [])]
        shown = len(ids) >= LONG_PREFILL and sys.stderr is not None and sys.stderr.isatty()
        with report.progress("reading", "tokens") if shown else nullcontext() as show:
            self.logits = self.session.prompt(ids, show and self._progress(len(ids), show), marks, self.images)
        self.evaluated = len(ids) - self.cached_tokens
        self.prefill_s = time.perf_counter() - start
        return self.logits

    @property
    def promise(self) -> str | None:
        """What an edit of the last prompt costs, where snapshots are further apart than they should be."""
        return self.session.promise

    def _progress(self, total: int, show: Any) -> Callable[[int, int], None]:
        def of_all(done: int, rest: int) -> None:
            if rest >= LONG_PREFILL:
                show(total - rest + done, total, "")

        return of_all

    def decode(self, token: int) -> Any:
        """Logits after one more token."""
        self.decoded += 1
        self.logits = self.session.decode(token)
        return self.logits

    def finished(self) -> None:
        """The answer is complete."""
        if self._is_once:
            self.session.keep()


def turn_ends(ids: Sequence[int], ends: frozenset[int]) -> list[int]:
    """Positions after each token that ends a message."""
    return [position + 1 for position, token in enumerate(ids) if token in ends]


class Pictured:
    """A session whose next prompt comes with images."""

    def __init__(self, session: Session, images: Sequence[PreparedImage]) -> None:
        self.session, self.images = session, images
        self.vocab_size = session.vocab_size

    def prefill(self, ids: Sequence[int]) -> Any:
        """Logits after `ids`, appended with the images."""
        return self.session.prefill(ids, images=self.images)

    def decode(self, token: int) -> Any:
        """Logits after one more token."""
        return self.session.decode(token)
