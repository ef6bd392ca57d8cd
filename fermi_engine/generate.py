"""The token loop: logits to token to text, with stop strings, reasoning and cancellation, over a Session."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Protocol

import numpy as np

from fermi_engine.chat import THINK_CLOSE, THINK_OPEN, ReasoningSplitter
from fermi_engine.errors import RequestError, TokenizerError
from fermi_engine.sampling import Exp, Sampler, SamplingParams, checked_stops
from fermi_engine.tokenizer import IncrementalDecoder, Tokenizer, check_ids

_TAGS = (THINK_OPEN, THINK_CLOSE, "<tool_call>", "</tool_call>")


class SessionLike(Protocol):
    """What the loop drives. Attributes that it may have: `vocab_size`, by which ids are checked before any work; `cached_tokens`
    of the prompt, which were not evaluated; `finished()`, called when an answer has come to its end."""

    def prefill(self, ids: list[int]) -> np.ndarray:
        """Logits (float32 [vocab]) after the last of `ids`."""

    def decode(self, token_id: int) -> np.ndarray:
        """Logits (float32 [vocab]) after one more token."""


@dataclass(frozen=True)
class Piece:
    """One step of the stream: a token and the text it completed, of the answer and of the reasoning.

    `id` is None for text that was held back until the end. Text may be empty; without a tokenizer it always is.
    """

    id: int | None
    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class Finish:
    """Why a stream ended: 'stop' (a stop string), 'eos', 'length' (max_tokens), 'context' (full) or 'cancelled'.

    `completion_tokens` counts the tokens streamed; the end-of-turn token is not streamed. `cached_tokens` of the prompt were not
    evaluated, because a snapshot or the session held them.
    """

    reason: str
    prompt_tokens: int
    completion_tokens: int
    stop_string: str | None = None
    cached_tokens: int = 0


class Stream:
    """Iterator over the pieces of one generation; `finish` is set once it is exhausted (and is its return value)."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self.finish: Finish | None = None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self.finish = self.finish or end.value
            raise StopIteration(self.finish) from None


class StopBuffer:
    """Holds back text that may be the start of a stop string.

    The match that ends first wins and, of those that end at the same place, the one that starts first; the text is
    cut before it. The outcome does not depend on how the text is cut into pieces. Each character costs amortised
    constant time per stop string (Knuth, Morris, Pratt 1977).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = checked_stops(stops)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text now certain, None), or (text before the stop string, that string) at a hit, which drops the rest."""
        for place, character in enumerate(text):
            hit = self._advance(character)
            if hit is not None:
                ready = (self._held + text[:place + 1])[:-len(hit)]
                self._reset()
                return ready, hit
        ready = self._held + text
        cut = len(ready) - max(self._matched, default=0)
        self._held = ready[cut:]
        return ready[:cut], None

    def flush(self) -> str:
        """Text held back, at the end of the stream: no stop string was completed."""
        held = self._held
        self._reset()
        return held

    def _advance(self, character: str) -> str | None:
        for i, stop in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = self._borders[i][matched - 1]
            self._matched[i] = matched + (stop[matched] == character)
        complete = [stop for stop, matched in zip(self._stops, self._matched, strict=True) if matched == len(stop)]
        return max(complete, key=len, default=None)

    def _reset(self) -> None:
        self._held = ""
        self._matched = [0] * len(self._stops)


def stream(session: SessionLike, prompt_ids: Sequence[int], params: SamplingParams, *, eos_ids: frozenset[int],
           context: int, tokenizer: Tokenizer | None = None, stop: Sequence[str] = (), reasoning_open: bool = False,
           cancelled: Callable[[], bool] | None = None, exp: Exp | None = None,
           history: Sequence[int] = ()) -> Stream:
    """Generate after `prompt_ids`: a Stream of one Piece per token, and one without id for text held to the end.

    context: most tokens of prompt and completion together. eos_ids: end-of-turn ids. stop: strings beside
    `params.stop`. reasoning_open: the prompt ended inside `<think>`; text is split only when the tokenizer knows the
    think tags. cancelled: asked before each prefill or decode. exp: see Sampler. history: what the session holds
    already; penalties count it as prompt. A budget of no tokens
    (max_tokens 0, or a prompt that fills the context) evaluates nothing.
    Raises, before any work, RequestError for an empty or too long prompt or ids outside the vocabulary, and
    TokenizerError for stop strings without a tokenizer.
    """
    vocab_size = _vocab_size(session, tokenizer)
    ids = _checked_prompt(prompt_ids, context, vocab_size)
    stops = tuple(dict.fromkeys(params.stop + checked_stops(stop)))
    if stops and tokenizer is None:
        raise TokenizerError("stop strings need text and the model carries no tokenizer.json; add the file to the "
                             "checkpoint and convert again, or drop the stop strings")
    sampler = None if vocab_size is None else Sampler(params, vocab_size, [*history, *ids], exp)
    text = _TextStages(tokenizer, stops, reasoning_open)
    ends = frozenset() if params.ignore_eos else frozenset(eos_ids)
    loop = _Loop(session, ids, list(history), params, ends, context - len(ids), cancelled or (lambda: False), exp)
    return Stream(loop.run(text, sampler))


def greedy(session: SessionLike, ids: Sequence[int], n: int, eos_ids: frozenset[int] = frozenset()) -> list[int]:
    """The `n` likeliest ids after `ids`, one at a time; fewer when one of `eos_ids` comes, which is left out."""
    params = SamplingParams(max_tokens=n, temperature=0.0)
    return [piece.id for piece in stream(session, ids, params, eos_ids=eos_ids, context=len(ids) + n)]


@dataclass(frozen=True)
class _Loop:
    session: SessionLike
    ids: list[int]
    history: list[int]
    params: SamplingParams
    eos_ids: frozenset[int]
    room: int  # tokens the context has left after the prompt
    cancelled: Callable[[], bool]
    exp: Exp | None

    def run(self, text: _TextStages, sampler: Sampler | None) -> Generator[Piece, None, Finish]:
        budget = min(self.params.max_tokens, self.room)
        reason = "length" if self.params.max_tokens <= self.room else "context"
        made, token_id = 0, None
        while made < budget and text.hit is None:
            if self.cancelled():
                reason = "cancelled"
                break
            logits = self.session.prefill(self.ids) if token_id is None else self.session.decode(token_id)
            sampler = sampler or Sampler(self.params, logits.shape[0], self.history + self.ids, self.exp)
            token_id = sampler.sample(logits)
            if token_id in self.eos_ids:
                reason = "eos"
                break
            sampler.accept(token_id)
            made += 1
            yield text.push(token_id)
        last = text.flush()
        if last.text or last.reasoning:
            yield last
        if reason != "cancelled":
            getattr(self.session, "finished", lambda: None)()
        cached = 0 if token_id is None else getattr(self.session, "cached_tokens", 0)
        return Finish(reason if text.hit is None else "stop", len(self.ids), made, text.hit, cached)


class _TextStages:
    """Ids to pieces: incremental decoding, then stop strings, then the split of reasoning from the answer."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str], reasoning_open: bool) -> None:
        self.hit: str | None = None
        self._stops = StopBuffer(stops)
        self._decoder = self._splitter = None
        if tokenizer is not None:
            tags = {tag: tokenizer.id_of(tag) for tag in _TAGS}
            keep = frozenset(i for i in tags.values() if i is not None)
            self._decoder = IncrementalDecoder(tokenizer, skip_special=True, keep=keep)
            if tags[THINK_OPEN] is not None and tags[THINK_CLOSE] is not None:
                self._splitter = ReasoningSplitter(reasoning_open)

    def push(self, token_id: int) -> Piece:
        if self._decoder is None:
            return Piece(token_id)
        return self._piece(token_id, self._split(self._until_stop(self._decoder.push(token_id))))

    def flush(self) -> Piece:
        """What is held back anywhere; after a stop string that is only text before it."""
        if self._decoder is None:
            return Piece(None)
        tail = "" if self.hit is not None else self._until_stop(self._decoder.flush())
        if self.hit is None:
            tail += self._stops.flush()
        return self._piece(None, self._split(tail) + (self._splitter.flush() if self._splitter else []))

    def _until_stop(self, text: str) -> str:
        ready, self.hit = self._stops.push(text)
        return ready

    def _split(self, text: str) -> list[tuple[str, str]]:
        return self._splitter.push(text) if self._splitter else [("answer", text)]

    def _piece(self, token_id: int | None, events: list[tuple[str, str]]) -> Piece:
        return Piece(token_id, text="".join(text for kind, text in events if kind == "answer"),
                     reasoning="".join(text for kind, text in events if kind == "reasoning"))


def _checked_prompt(prompt_ids: Sequence[int], context: int, vocab_size: int | None) -> list[int]:
    if len(prompt_ids) == 0:
        raise RequestError("the prompt is empty; give at least one token")
    if len(prompt_ids) > context:
        raise RequestError(f"the prompt has {len(prompt_ids)} tokens, the context holds {context}; shorten the prompt "
                           "or raise ctx_size")
    for position, token_id in enumerate(prompt_ids):
        if not isinstance(token_id, Integral) or isinstance(token_id, bool):
            raise RequestError(f"token id {token_id!r} at position {position} is not a whole number")
    check_ids(prompt_ids, vocab_size)
    return [int(token_id) for token_id in prompt_ids]


def _vocab_size(session: SessionLike, tokenizer: Tokenizer | None) -> int | None:
    return getattr(session, "vocab_size", None) or (None if tokenizer is None else tokenizer.vocab_size)


def _borders(pattern: str) -> list[int]:
    """For each beginning of `pattern`, the length of its longest proper beginning that also ends it."""
    borders = [0] * len(pattern)
    for end in range(1, len(pattern)):
        length = borders[end - 1]
        while length and pattern[length] != pattern[end]:
            length = borders[length - 1]
        borders[end] = length + (pattern[length] == pattern[end])
    return borders
