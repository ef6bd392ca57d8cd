"""Session: one mutable timeline over an engine: prefill, decode, snapshot, restore."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

from fermi_engine.errors import DeviceError, RequestError
from fermi_engine.model.weights import Trace, silent
from fermi_engine.state import HybridState

if TYPE_CHECKING:
    from fermi_engine.engine import Engine


@dataclass(frozen=True)
class Snapshot:
    """A session's whole state after `tokens`; independent of the session it came from, valid for the same pack only."""

    tokens: tuple[int, ...]
    state: HybridState
    pack_hash: str


class Session:
    """Tokens go in, logits come out; the same tokens give the same bits in whatever pieces they come.

    A call that is interrupted half way (an exception, a KeyboardInterrupt) leaves the session unusable until
    `restore`, because a recurrent state cannot be rewound.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._tokens: list[int] = []
        self._state: HybridState | None = HybridState.fresh(
            engine.config, engine.options.kv_block, engine.options.kv_format
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        """Every token that has gone in."""
        return tuple(self._tokens)

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to below this."""
        return self.engine.config.vocab_size

    @property
    def position(self) -> int:
        """How many tokens have gone in."""
        return len(self._tokens)

    @property
    def state(self) -> HybridState:
        """The live state. Raises RequestError after an interrupted call."""
        if self._state is None:
            raise RequestError("this session was interrupted inside a call; restore a snapshot or start a new session")
        return self._state

    def prefill(self, ids: Sequence[int], progress: Callable[[int, int], None] | None = None) -> np.ndarray:
        """Append ids; logits of the last one, float32 [vocab]. `progress(done, total)` is called after each token block.

        Raises RequestError for no ids, ids outside the vocabulary, or more tokens than the context holds. Raises DeviceError
        when a GPU that has to do it fails; the session is as before then.
        """
        checked = self._checked(ids)
        hidden = self._on_gpu(checked, progress)
        with self._moving():
            logits = self._prefill(checked, progress) if hidden is None else self.engine.decoder.logits(hidden)[0]
        self._tokens.extend(checked.tolist())
        return logits

    def _on_gpu(self, ids: np.ndarray, progress: Callable[[int, int], None] | None) -> np.ndarray | None:
        """The last token's hidden row [1, H] where the GPU does this prefill, else None."""
        if self.engine.gpu is None:
            return None
        state = self.state
        try:
            return self.engine.gpu.hidden(ids, state, progress)
        except DeviceError:
            raise
        except BaseException:
            self._state = None
            raise

    def _prefill(self, ids: np.ndarray, progress: Callable[[int, int], None] | None) -> np.ndarray:
        decoder = self.engine.decoder
        if len(ids) == 1:
            logits = decoder.step(int(ids[0]), self.state)
            if progress is not None:
                progress(1, 1)
            return logits
        for begin, block in self._blocks(ids):
            hidden = decoder.hidden(block, self.state)
            if progress is not None:
                progress(begin + len(block), len(ids))
        return decoder.logits(hidden[-1:])[0]

    def logits(self, ids: Sequence[int], trace: Trace = silent) -> np.ndarray:
        """Append ids; logits after each of them, float32 [T, vocab]. Raises as `prefill`."""
        checked = self._checked(ids)
        with self._moving():
            decoder = self.engine.decoder
            rows = [
                decoder.logits(decoder.hidden(block, self.state, trace), trace) for _, block in self._blocks(checked)
            ]
        self._tokens.extend(checked.tolist())
        return np.concatenate(rows)

    def decode(self, token: int) -> np.ndarray:
        """Append one token; its logits, float32 [vocab]. Raises as `prefill`."""
        return self.prefill([token])

    def snapshot(self) -> Snapshot:
        """A copy of everything, to `restore` here or in another session of the same engine."""
        return Snapshot(self.tokens, self.state.copy(), self.engine.pack_hash)

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot. Raises RequestError when it belongs to another model."""
        if snapshot.pack_hash != self.engine.pack_hash:
            raise RequestError(
                f"snapshot of pack {snapshot.pack_hash[:12]} cannot be restored into a session of pack "
                f"{self.engine.pack_hash[:12]}: states of different models do not mix"
            )
        self._tokens = list(snapshot.tokens)
        self._state = snapshot.state.copy()

    def _checked(self, ids: Sequence[int]) -> np.ndarray:
        array = _whole_numbers(ids, self.vocab_size)
        outside = array[(array < 0) | (array >= self.vocab_size)]
        if outside.size:
            raise RequestError(f"token id {int(outside[0])} is outside the vocabulary of {self.vocab_size}")
        if self.position + array.size > self.engine.context:
            raise RequestError(
                f"{self.position + array.size} tokens exceed the context of {self.engine.context}; "
                "shorten the prompt or raise --ctx-size"
            )
        return array.astype(np.int32)

    def _blocks(self, ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        size = self.engine.options.token_block
        for begin in range(0, len(ids), size):
            yield begin, ids[begin : begin + size]

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Until the call has gone through, the state counts as lost."""
        state = self.state
        try:
            with self.engine.decoder.kernels.held():
                yield
        except BaseException:
            self._state = None
            raise
        assert self._state is state


def _whole_numbers(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """`ids` as a flat array of integers, at least one. Raises RequestError, also for ids that no int64 holds."""
    try:
        array = np.asarray(ids)
    except ValueError:
        raise RequestError("token ids must be one flat list, got lists of different lengths") from None
    if isinstance(ids, (str, bytes)):
        raise RequestError("token ids must be one flat list, got text: engine.tokenizer.encode makes ids of it")
    if array.ndim != 1:
        found = f"shape {list(array.shape)}" if array.ndim else type(ids).__name__
        raise RequestError(f"token ids must be one flat list, got {found}")
    if array.size == 0:
        raise RequestError("no tokens: a prompt needs at least one token id")
    if np.issubdtype(array.dtype, np.integer):
        return array
    wrong = [item for item in ids if not isinstance(item, Integral) or isinstance(item, bool)]
    if wrong:
        raise RequestError(f"token ids must be whole numbers, got {type(wrong[0]).__name__}")
    huge = [int(item) for item in ids if not 0 <= item < vocab_size]
    if huge:
        name = str(huge[0]) if huge[0].bit_length() <= 128 else f"of {huge[0].bit_length()} bits"
        raise RequestError(f"token id {name} is outside the vocabulary of {vocab_size}")
    return np.asarray([int(item) for item in ids])
