"""Session: one mutable timeline over an engine: prefill, decode, snapshot, restore, fork."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

from fermi_engine.errors import DeviceError, RequestError
from fermi_engine.model.gpu_inputs import Inputs, TextInputs
from fermi_engine.model.weights import Trace, silent
from fermi_engine.snapshots.cache import Snapshot, SnapshotCache
from fermi_engine.snapshots.prefix import NumericPath, Prefix
from fermi_engine.snapshots.taking import Taking, extended
from fermi_engine.state import HybridState
from fermi_engine.vision.encoder import PlacedImages, Seen

if TYPE_CHECKING:
    from fermi_engine.engine import Engine
    from fermi_engine.vision.patches import PreparedImage

__all__ = ["Session", "Snapshot"]

Progress = Callable[[int, int], None]
TIMED_TOKENS = 32  # fewer say little about what a token costs


class Session:
    """Tokens go in, logits come out; the same tokens give the same bits in whatever pieces they come.

    `prefill` and `decode` append and evaluate. `prompt` takes a whole history and evaluates only what neither the session nor the
    engine's snapshots hold; its results are those of a run that was never interrupted, to the bit.

    A call that is interrupted half way (an exception, a KeyboardInterrupt) leaves the session unusable until `restore` or
    `prompt`, because a recurrent state cannot be rewound; the engine's snapshots are as before it.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.path = NumericPath.of(engine.pack_hash, engine.options)
        self.cached_tokens = 0  # of the last `prompt`: how many it did not evaluate
        self.promise: str | None = None  # of the last `prompt`: see Taking.promise
        self._tokens: list[int] = []
        self._seen = Seen()
        self._trail: tuple[tuple[int, str], ...] = ()
        self._saved = 0  # tokens at which the cache has this timeline
        self._state: HybridState | None = HybridState.fresh(
            engine.config, engine.options.kv_block, engine.options.kv_format
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        """Every token that has gone in."""
        return tuple(self._tokens)

    @property
    def trail(self) -> tuple[tuple[int, str], ...]:
        """Which way they went: (end position, 'cpu', 'gpu' or, one by one there, 'gpu token') of each stretch. The same calls
        give the same bits."""
        return self._trail

    @property
    def prefix(self) -> Prefix:
        """What the state depends on."""
        return Prefix(self._tokens, self.path, self._seen.images)

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
        """The live state, up to date. Raises RequestError after an interrupted call, DeviceError when a GPU that has it fails."""
        state = self._live()
        if self.engine.is_resident:
            self.engine.resident.fetch(state)
        return state

    def _live(self) -> HybridState:
        """The live state, of which a GPU may have more than its arrays."""
        if self._state is None:
            raise RequestError("this session was interrupted inside a call; restore a snapshot or start a new session")
        return self._state

    def prefill(self, ids: Sequence[int], progress: Progress | None = None, images: Sequence[PreparedImage] = ()) -> np.ndarray:
        """Append ids; logits of the last one, float32 [vocab]. `progress(done, total)` is called after each token block.

        images: those whose tokens are among `ids` (Vision.expand), in order. Raises RequestError for no ids, ids outside the
        vocabulary, more tokens than the context holds, or images that do not fit them. Raises DeviceError when a GPU that has to
        do it fails; the session is as before then, but for one that had the state, too.
        """
        checked = self._checked(ids, self.position)
        return self._append(checked, progress, None, images=self._placed(checked, images, self.position))

    def decode(self, token: int) -> np.ndarray:
        """Append one token; its logits, float32 [vocab]. Raises as `prefill`."""
        return self.prefill([token])

    def prompt(self, ids: Sequence[int], progress: Progress | None = None, marks: Sequence[int] = (),
               images: Sequence[PreparedImage] = ()) -> np.ndarray:
        """Logits after `ids`, which count from the first token whatever has gone in before; float32 [vocab]. `images` are all of
        theirs.

        Goes on from this session's own tokens or from a snapshot, whichever holds the longest beginning of `ids`, and leaves
        snapshots behind: at boundaries, at the end, and at `marks`, positions where messages end, the first of them the end of
        what many prompts share. `cached_tokens` says how many were not evaluated. Raises as `prefill`: for what is wrong
        with `ids` before anything has happened; where images fail, the session stands at what it would have gone on from.
        """
        checked = self._checked(ids, 0)
        placed = self._placed(checked, images, 0)
        self.promise = None
        prefix = Prefix(checked, self.path, placed.seen().images if placed else ())
        logits = self.resume(prefix)
        if logits is not None:
            self._seen = placed.seen() if placed else Seen()
            return logits
        if placed is not None:  # a cached state does not say how far positions are ahead, and what follows may fail
            self._seen = Seen(self._seen.images, placed.shift_at(self.position))
        cache = self._cache()
        if cache is None:
            return self._append(prefix.ids[self.position :], progress, None, is_prompt=True, images=placed)
        taking = Taking.plan(cache, prefix, self.state, marks, self._base(), self._trail)
        self.promise = taking.promise()
        cache.tell(self.promise)
        try:
            logits = self._append(prefix.ids[self.position :], progress, taking, images=placed)
            taking.take(self.state, self._trail[-1][1], logits)
        except BaseException:
            taking.drop()
            raise
        taking.commit()
        self._saved = self.position
        return logits

    def resume(self, prefix: Prefix) -> np.ndarray | None:
        """Put the session at the longest beginning of `prefix` at hand, all of it only where the logits are at hand, too; those
        are returned then. What it leaves is kept as a snapshot first, if it is longer than what is kept."""
        own = self.position if self._state is not None and self.position < len(prefix) \
            and prefix.agrees(self.prefix, self.position) else 0
        cache = self._cache()
        if cache is not None and not own:
            self.keep()
        found = None if cache is None else cache.lookup(prefix)
        if found is not None and found.position > own:
            self._become(found)
            own = found.position
        elif not own and (self._tokens or self._state is None):
            self._start()
        self.cached_tokens = own
        if cache is not None:
            cache.stats.found(own)
        return found.logits.copy() if found is not None and own == len(prefix) else None

    def keep(self) -> None:
        """Leave a snapshot of the present state in the engine's cache, if it has none of this timeline that is as long."""
        cache = self._cache()
        if cache is not None and self._state is not None and self.position > self._saved:
            entry = cache.save(self.state, self.prefix, "answer", self._trail)
            if entry is not None:
                cache.publish([entry])
                self._saved = self.position

    def snapshot(self) -> Snapshot:
        """A copy of everything, to `restore` here or in another session of the same engine; shares keys and values with it."""
        return Snapshot(self.prefix, self.state.copy(), trail=self._trail, shift=self._seen.shift)

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot. Raises RequestError when it belongs to another model, or to this one run otherwise."""
        path = snapshot.prefix.path
        if path.pack_hash != self.path.pack_hash:
            raise RequestError(
                f"snapshot of pack {path.pack_hash[:12]} cannot be restored into a session of pack "
                f"{self.path.pack_hash[:12]}: states of different models do not mix"
            )
        if path != self.path:
            differ = [f"{name} {value!r}, here {self.path.fields()[name]!r}" for name, value in path.fields().items()
                      if value != self.path.fields()[name]]
            raise RequestError(f"snapshot of a session with {differ[0]} cannot be restored here: states that were computed "
                               "in different ways do not mix")
        self._become(snapshot)

    def fork(self) -> Session:
        """Another session that stands where this one stands; it shares keys and values until either writes them."""
        other = object.__new__(Session)
        other.__dict__.update(self.__dict__)
        other._tokens, other._state = list(self._tokens), self.state.copy(is_live=True)
        return other

    def logits(self, ids: Sequence[int], trace: Trace = silent, images: Sequence[PreparedImage] = ()) -> np.ndarray:
        """Append ids; logits after each of them, float32 [T, vocab]. Raises as `prefill`."""
        checked = self._checked(ids, self.position)
        placed = self._placed(checked, images, self.position)
        if placed is not None:
            placed.encode(self.position)
        if self.engine.is_resident:
            return self._rows_of_resident(checked, trace, placed)
        with self._moving():
            hidden = (self._hidden(block, placed, trace) for block in self._blocks(checked, ()))
            rows = [self.engine.decoder.logits(part, trace) for part in hidden]
        self._went(checked, "cpu", placed)
        return np.concatenate(rows)

    def _placed(self, ids: np.ndarray, images: Sequence[PreparedImage], first: int) -> PlacedImages | None:
        """Images among ids int32 [T] that begin at token `first`; None without any."""
        if not images:
            return None
        return self.engine.vision.place(ids, images, first, self._seen.after(first))

    def _cache(self) -> SnapshotCache | None:
        return self.engine.snapshots

    def _start(self) -> None:
        """Be empty again."""
        self._tokens, self._seen, self._trail, self._saved = [], Seen(), (), 0
        if self._state is None:
            self._state = HybridState.fresh(self.engine.config, self.engine.options.kv_block, self.engine.options.kv_format)
        else:
            self._forget()
            self._state.clear()

    def _forget(self) -> None:
        """What a GPU has of the state is not it any more."""
        if self.engine.is_resident and self._state is not None:
            self.engine.resident.forget(self._state)

    def _become(self, snapshot: Snapshot) -> None:
        start, pages = time.perf_counter(), snapshot.state.page_tokens() - {self.engine.options.kv_block}
        if pages:
            raise RequestError(f"snapshot with pages of {pages.pop()} positions, here {self.engine.options.kv_block}; it needs "
                               "the same kv_block")
        self._forget()
        state, self._state = self._state, None  # until it is whole again
        if state is None:
            state = snapshot.state.copy(is_live=True)
        else:
            state.restore(snapshot.state)
        self._state = state
        self._tokens, self._trail, self._saved = list(snapshot.tokens), snapshot.trail, snapshot.position
        self._seen = Seen(snapshot.prefix.images, snapshot.shift)
        if self.engine.snapshots is not None:
            self.engine.snapshots.stats.restored_in(time.perf_counter() - start)

    def _base(self) -> int:
        """A position where a chunk of the GPU's ends, or would: boundaries are cheapest there."""
        chunks = self.state.current_chunks()
        return 0 if self.engine.gpu is None else self.position - (chunks.tokens if chunks else 0)

    def _append(self, ids: np.ndarray, progress: Progress | None, taking: Taking | None,
                is_prompt: bool = False, images: PlacedImages | None = None) -> np.ndarray:
        """Evaluate ids int32 [T] after what has gone in; logits of the last. taking: None leaves no snapshots. is_prompt: they
        are the rest of a prompt, and go the way that its beginning went. images: those of the prompt, or of these ids."""
        is_prompt = is_prompt or taking is not None
        if images is not None:
            images.encode(self.position)  # here, where an error leaves the state whole
        start = time.perf_counter()
        if self.engine.is_resident:
            logits = self._on_resident(ids, progress, taking, is_prompt or images is not None or len(ids) > 1, images)
            self._timed(start, ids, taking)
            return logits
        hidden = self._on_gpu(ids, progress, taking, is_prompt, self._inputs(images))
        if hidden is None and taking is not None:
            taking.give_back()  # of a GPU that has failed
        with self._moving():
            logits = self._on_cpu(ids, progress, taking, images) if hidden is None else self.engine.decoder.logits(hidden)[0]
        self._went(ids, "cpu" if hidden is None else "gpu", images)
        self._timed(start, ids, taking)
        return logits

    def _timed(self, start: float, ids: np.ndarray, taking: Taking | None) -> None:
        if taking is not None and len(ids) >= TIMED_TOKENS:
            taking.cache.costs.measured(token_s=(time.perf_counter() - start - taking.seconds) / len(ids))

    def _inputs(self, images: PlacedImages | None) -> Inputs:
        """What a GPU has to know of tokens beside their ids."""
        return TextInputs(self._seen.shift) if images is None else images

    def _on_resident(self, ids: np.ndarray, progress: Progress | None, taking: Taking | None, is_prefill: bool,
                     images: PlacedImages | None) -> np.ndarray:
        """Logits of the last token where the model lives on the GPU. is_prefill: by the kernels for many tokens, whose bits no
        cut changes; else one token of text goes through those of one."""
        state, resident = self._live(), self.engine.resident
        resident.admit(state, len(ids), is_prefill)  # refuses while nothing has happened yet
        if not is_prefill:
            with self._moving():
                logits = resident.decode(int(ids[0]), state, self._seen.shift)
            self._went(ids, "gpu token", None)
            if progress is not None:
                progress(1, 1)
            return logits
        with self._moving():
            logits = resident.prefill(ids, state, progress, taking, self._inputs(images))
        self._went(ids, "gpu", images)
        return logits

    def _rows_of_resident(self, ids: np.ndarray, trace: Trace, images: PlacedImages | None) -> np.ndarray:
        if trace is not silent:
            raise RequestError("a model that lives on the GPU has no trace of its layers; run with --decode cpu")
        state, resident = self._live(), self.engine.resident
        resident.admit(state, len(ids), True)
        with self._moving():
            logits = resident.rows(ids, state, self._inputs(images))
        self._went(ids, "gpu", images)
        return logits

    def _on_gpu(self, ids: np.ndarray, progress: Progress | None, taking: Taking | None, is_prompt: bool,
                inputs: Inputs) -> np.ndarray | None:
        """The last token's hidden row [1, H] where the GPU does this prefill, else None."""
        if self.engine.gpu is None:
            return None
        state = self.state
        try:
            return self.engine.gpu.hidden(ids, state, progress, taking, is_prompt and self.position > 0, inputs)
        except DeviceError:
            raise
        except BaseException:
            self._state = None
            raise

    def _on_cpu(self, ids: np.ndarray, progress: Progress | None, taking: Taking | None,
                images: PlacedImages | None) -> np.ndarray:
        decoder, state, done = self.engine.decoder, self.state, 0
        if len(ids) == 1 and images is None:
            logits = decoder.step(int(ids[0]), state, self._seen.shift)
            if progress is not None:
                progress(1, 1)
            return logits
        for block in self._blocks(ids, taking.stops if taking else ()):
            hidden = self._hidden(block, images)
            done += len(block)
            if taking is not None and state.position in taking.stops:
                taking.take(state, "cpu")
            if progress is not None:
                progress(done, len(ids))
        return decoder.logits(hidden[-1:])[0]

    def _hidden(self, block: np.ndarray, images: PlacedImages | None, trace: Trace = silent) -> np.ndarray:
        state = self.state
        part = images.part(state.position, state.position + len(block)) if images else None
        return self.engine.decoder.hidden(block, state, trace, part, self._seen.shift)

    def _went(self, ids: np.ndarray, way: str, images: PlacedImages | None) -> None:
        self._tokens.extend(ids.tolist())
        self._seen = images.seen(self._seen) if images else self._seen
        self._trail = extended(self._trail, self.position, way)

    def _checked(self, ids: Sequence[int], before: int) -> np.ndarray:
        array = _whole_numbers(ids, self.vocab_size)
        outside = array[(array < 0) | (array >= self.vocab_size)]
        if outside.size:
            raise RequestError(f"token id {int(outside[0])} is outside the vocabulary of {self.vocab_size}")
        if before + array.size > self.engine.context:
            raise RequestError(
                f"{before + array.size} tokens exceed the context of {self.engine.context}; "
                "shorten the prompt or raise --ctx-size"
            )
        return array.astype(np.int32)

    def _blocks(self, ids: np.ndarray, stops: Iterable[int]) -> Iterator[np.ndarray]:
        """`ids` cut where a block is full and at positions `stops`."""
        size, start = self.engine.options.token_block, self.position
        cuts = [stop - start for stop in stops if start < stop < start + len(ids)]
        begin = 0
        for cut in (*cuts, len(ids)):
            while begin < cut:
                end = min(begin + size, cut)
                yield ids[begin:end]
                begin = end

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Until the call has gone through, the state counts as lost."""
        state = self._live()
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
