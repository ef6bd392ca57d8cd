"""Small models that keep snapshots, runs that were never interrupted, and the ways a snapshot may take before it is restored."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from fermi_engine import SamplingParams, generate, kernels
from fermi_engine.array_weights import ArrayWeights
from fermi_engine.config import EngineConfig
from fermi_engine.model.decoder import Decoder
from fermi_engine.runs import ArrayModel, digest
from fermi_engine.session import Session
from fermi_engine.snapshot_budget import Costs
from fermi_engine.snapshots import Snapshot, SnapshotCache
from fermi_engine.state import HybridState, KVPages
from tests.strategies import Draws
from tests.tiny_models import quantised_model

COSTS = {"save_s": 0.015, "token_s": 0.02}  # of the full model on the CPU: boundaries 64 tokens apart
PLENTY = 1 << 30
VOCAB = 45


@functools.cache
def weights(layers: str = "lfl", taps: int = 4, seed: int = 3) -> ArrayWeights:
    arrays = quantised_model(Draws(seed), 1, 0, 4, "q8_0", layers=layers, hidden=32, key_heads=1, dk=32, dv=32, head_dim=32,
                             intermediate=32, experts=4, taps=taps, vocab=VOCAB)
    return ArrayWeights(arrays)


def engine(budget: int | None = PLENTY, layers: str = "lfl", taps: int = 4, seed: int = 3, frozen: bool = True,
           **options: object) -> ArrayModel:
    """A model on the CPU; budget: bytes for snapshots, None for none of them."""
    config = EngineConfig(**{"token_block": 16, "kv_block": 8, **options})
    decoder = Decoder(weights(layers, taps, seed), kernels.get(None, 1), config.activations)
    cache = None if budget is None else SnapshotCache(budget, costs=Costs(**COSTS, frozen=True) if frozen else None)
    return ArrayModel(decoder, config, f"arrays {layers} {taps} {seed}", snapshots=cache)


def ids_for(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def snapshot_bytes(length: int, **options: object) -> int:
    """What a snapshot after so many tokens takes."""
    session = Session(engine(None, **options))
    session.prefill(ids_for(length))
    return sum(session.snapshot().memory().values())


def outcome(session: Session, logits: np.ndarray) -> bytes:
    """Everything that counts about where a session stands."""
    return digest(logits, session.state).tobytes()


def uninterrupted(model: ArrayModel, ids: Sequence[int], trail: Sequence[tuple[int, str]] = ()) -> bytes:
    """The outcome of the same calls without a cache, a snapshot or a fork between them."""
    plain = Session(ArrayModel(model.decoder, model.options, model.pack_hash))
    return outcome(plain, plain.prefill(ids))


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


# What may happen to a snapshot between making and restoring it; tests of the disk tier add theirs.
DETOURS: dict[str, Callable[[ArrayModel, Snapshot], Snapshot]] = {"memory": lambda model, snapshot: snapshot}


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
    """Bytes that the cache's entries really hold, pages counted once."""
    memory: dict[int, int] = {}
    for snapshot in model.snapshots.entries():
        memory |= snapshot.memory()
    return sum(memory.values())


class Counting:
    """Counts the tokens that a model really evaluates."""

    def __init__(self, model: ArrayModel, monkeypatch: object) -> None:
        self.tokens = 0
        hidden, step = Decoder.hidden, Decoder.step

        def counted_hidden(decoder: Decoder, ids: np.ndarray, state: HybridState, *rest: object) -> np.ndarray:
            self.tokens += len(ids) * (decoder is model.decoder)
            return hidden(decoder, ids, state, *rest)

        def counted_step(decoder: Decoder, token: int, state: HybridState) -> np.ndarray:
            self.tokens += decoder is model.decoder and decoder.is_recordable
            return step(decoder, token, state)

        monkeypatch.setattr(Decoder, "hidden", counted_hidden)
        monkeypatch.setattr(Decoder, "step", counted_step)

    def of(self, call: Callable[[], object]) -> int:
        """Tokens that one call evaluates."""
        self.tokens = 0
        call()
        return self.tokens
