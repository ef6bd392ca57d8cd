"""Small models that keep snapshots, runs that were never interrupted, and the ways a snapshot may take before it is restored."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from fermi_engine import SamplingParams, generate, kept_memory, kernels, state
from fermi_engine.config import EngineConfig
from fermi_engine.gpu.choice import GpuChoice
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.model.decoder import Decoder
from fermi_engine.session import Session
from fermi_engine.snapshots.budget import Costs
from fermi_engine.snapshots.cache import Snapshot, SnapshotCache
from fermi_engine.snapshots.disk import DiskTier
from fermi_engine.snapshots.prefix import ImageSpan, NumericPath, Prefix
from fermi_engine.stages.array_weights import ArrayWeights
from fermi_engine.stages.runs import ArrayModel, digest
from fermi_engine.state import KVPages
from tests.strategies import Draws
from tests.tiny_models import quantised_model

NOTES: list[str] = []  # what caches have said
COSTS = {"save_s": 0.015, "token_s": 0.02}  # of the full model on the CPU: boundaries 64 tokens apart
PLENTY = 1 << 30
VOCAB = 45


@functools.cache
def weights(layers: str = "lfl", taps: int = 4, seed: int = 3, experts: int = 4) -> ArrayWeights:
    arrays = quantised_model(Draws(seed), 1, 0, 4, "q8_0", layers=layers, hidden=32, key_heads=1, dk=32, dv=32, head_dim=32,
                             intermediate=32, experts=experts, taps=taps, vocab=VOCAB)
    return ArrayWeights(arrays)


def engine(budget: int | None = PLENTY, layers: str = "lfl", taps: int = 4, seed: int = 3, frozen: bool = True,
           **options: object) -> ArrayModel:
    """A model on the CPU; budget: bytes for snapshots, None for none of them."""
    config = EngineConfig(**{"token_block": 16, "kv_block": 8, **options})
    decoder = Decoder(weights(layers, taps, seed), kernels.get(None, 1), config.activations)
    costs = Costs(**COSTS, frozen=True) if frozen else None
    cache = None if budget is None else SnapshotCache(budget, costs=costs, note=NOTES.append)
    return ArrayModel(decoder, config, f"arrays {layers} {taps} {seed}", snapshots=cache)


def gpu_engine(budget: int | None = PLENTY, layers: str = "lfl", device: EmulatedDevice | None = None,
               **options: object) -> ArrayModel:
    """A dense model whose prompts go through an emulated GPU, with float32 activations on both sides."""
    config = EngineConfig(**{"activations": "f32", "kv_block": 24, "prefill": "gpu", "device": "emulated", **options})
    held = weights(layers, experts=0)
    decoder = Decoder(held, kernels.get(None, 1), config.activations)
    choice = GpuChoice(held, decoder, config)
    choice._device = device or emulated()
    cache = None if budget is None else SnapshotCache(budget, costs=Costs(**COSTS, frozen=True))
    return ArrayModel(decoder, config, f"arrays dense {layers}", gpu=choice, snapshots=cache)


@functools.cache
def emulated() -> EmulatedDevice:
    return EmulatedDevice()


def without_cache(model: ArrayModel) -> ArrayModel:
    return ArrayModel(model.decoder, model.options, model.pack_hash, model.gpu)


def ids_for(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def snapshot_bytes(length: int, make: Callable[..., ArrayModel] = engine) -> int:
    """What a snapshot after so many tokens takes."""
    session = Session(make(None))
    session.prefill(ids_for(length))
    return sum(session.snapshot().memory().values())


def outcome(session: Session, logits: np.ndarray) -> bytes:
    """Everything that counts about where a session stands."""
    return digest(logits, session.state).tobytes() + chunks_of(session.state)


def chunks_of(held: state.HybridState) -> bytes:
    """What GPU prefill carries beside it."""
    chunks = held.current_chunks()
    return b"" if chunks is None else b"".join(array.tobytes() for layer in sorted(chunks.layers)
                                               for _, array in sorted(chunks.layers[layer].items()))


def uninterrupted(model: ArrayModel, ids: Sequence[int], trail: Sequence[tuple[int, str]] = ()) -> bytes:
    """The outcome of the same calls without a cache, a snapshot or a fork between them; all at once if no trail is given."""
    plain, begin, logits = Session(without_cache(model)), 0, None
    for end, way in trail or [(len(ids), "gpu" if model.gpu else "cpu")]:
        piece = ids[begin:end]
        if model.gpu is not None and way == "cpu":
            logits = [plain.decode(token) for token in piece][-1]
        else:
            logits = plain._append(np.array(piece, np.int32), None, None, is_prompt=True)
        begin = end
    assert not trail or plain.trail == tuple(trail)
    return outcome(plain, logits)


def poison(session: Session) -> None:
    """NaN all over what a session has of its own, as a request that went wrong might leave it."""
    for layer in session.state.layers:
        if isinstance(layer, KVPages):
            for page in (*layer.keys, *layer.values):
                if page.flags.writeable:
                    page[...] = 0xFF  # NaN in every format
        else:
            layer.conv[...] = layer.recurrent[...] = np.nan


def poisoned(model: ArrayModel, seed: int = 99) -> Session:
    """A session that has been used and whose state is ruined."""
    session = Session(model)
    session.prefill(ids_for(30, seed))
    poison(session)
    return session


def tier(model: ArrayModel, directory: str | Path, budget: int = PLENTY, notes: list[str] | None = None) -> DiskTier:
    """Snapshots of the model on disk."""
    path, said = NumericPath.of(model.pack_hash, model.options), [] if notes is None else notes
    return DiskTier(Path(directory), budget, model.config, path, model.options.kv_block, said.append)


def through_a_restart(model: ArrayModel, snapshot: Snapshot) -> Snapshot:
    """Saved, and read by one that knows nothing but the directory."""
    with TemporaryDirectory() as directory:
        before = tier(model, directory)
        before.put(snapshot, lambda: None)
        before.flush()
        after = tier(model, directory)
        return after.load(after.longest(Prefix([*snapshot.tokens, 0], snapshot.prefix.path)))


# What may happen to a snapshot between making and restoring it.
DETOURS: dict[str, Callable[[ArrayModel, Snapshot], Snapshot]] = {
    "memory": lambda model, snapshot: snapshot, "disk": through_a_restart}


def answers(session: Session, ids: Sequence[int], after: int) -> generate.Stream:
    """A stream that is cancelled after some tokens, read to its end."""
    made: list[int] = []
    stream = generate.stream(Prompted(session), ids, SamplingParams(temperature=0.0, max_tokens=50), eos_ids=frozenset(),
                             context=1000, cancelled=lambda: len(made) >= after)
    for piece in stream:
        made.append(piece.id)
    return stream


class Prompted:
    """A session under whole prompts."""

    def __init__(self, session: Session) -> None:
        self.prefill, self.decode, self.finished = session.prompt, session.decode, session.keep


def held_memory(model: ArrayModel) -> int:
    """Bytes that the indexed snapshots hold, each piece once."""
    memory: dict[int, int] = {}
    for snapshot in model.snapshots.entries():
        memory |= snapshot.memory()
    return sum(memory.values())


class Tracer:
    """What a model's cache really holds, found out at every allocation for a snapshot from the snapshots that are alive and the
    memory that was allocated for one in the making. `peak` is the most there ever was."""

    def __init__(self, model: ArrayModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak, self.failures = 0, 0
        self._made: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self._making: list[weakref.ref] | None = None
        allocate, save, held = kept_memory.allocate, SnapshotCache.save, SnapshotCache.held

        def traced_allocate(*args: object) -> np.ndarray:
            array = allocate(*args)
            if self._making is not None:
                self._making.append(weakref.ref(array))
                self.look()
            return array

        def traced_save(cache: SnapshotCache, *args: object) -> object:
            self._making = []
            try:
                return save(cache, *args)
            finally:
                self._making = None
                self.look()

        def traced_held(cache: SnapshotCache, snapshot: Snapshot, reserved: int) -> object:
            if cache is model.snapshots:
                self._made.add(snapshot)
            return held(cache, snapshot, reserved)

        monkeypatch.setattr(kept_memory, "allocate", traced_allocate)
        monkeypatch.setattr(SnapshotCache, "save", traced_save)
        monkeypatch.setattr(SnapshotCache, "held", traced_held)

    def look(self) -> int:
        """Bytes now, each piece of memory once."""
        memory: dict[int, int] = {}
        for snapshot in self._made:
            memory |= snapshot.memory()
        making = (reference() for reference in self._making or ())
        memory |= kept_memory.memory_of(array for array in making if array is not None)
        self.peak = max(self.peak, sum(memory.values()))
        return sum(memory.values())


class Counting:
    """Counts the tokens that a model really evaluates."""

    def __init__(self, model: ArrayModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = 0
        hidden, step = Decoder.hidden, Decoder.step

        def counted_hidden(decoder: Decoder, ids: np.ndarray, *rest: object) -> np.ndarray:
            self.tokens += len(ids) * (decoder is model.decoder)
            return hidden(decoder, ids, *rest)

        def counted_step(decoder: Decoder, *args: object) -> np.ndarray:
            self.tokens += decoder is model.decoder and decoder.is_recordable
            return step(decoder, *args)

        monkeypatch.setattr(Decoder, "hidden", counted_hidden)
        monkeypatch.setattr(Decoder, "step", counted_step)

    def of(self, call: Callable[[], object]) -> int:
        """Tokens that one call evaluates."""
        self.tokens = 0
        call()
        return self.tokens


def pictures(which: int) -> tuple[ImageSpan, ...]:
    """One image among the tokens; its content by number."""
    return (ImageSpan(10, 20, bytes([which]) * 32),)
