"""Models over windows of text, side by side: every position's logits are compared and forgotten.

What stays is a handful of numbers a token. An interrupted run goes on with the window it was at, to the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fermi_engine.config import EngineConfig, ModelConfig
from fermi_engine.engine import Engine
from fermi_engine.errors import RequestError
from fermi_engine.formats import Experts, Matrix
from fermi_engine.model.decoder import Decoder
from fermi_engine.model.weights import Weights
from fermi_engine.quality.measures import HEAD_ROWS, Records, log_softmax, score
from fermi_engine.quality.resume import Resume
from fermi_engine.report import Progress
from fermi_engine.state import HybridState

TOGETHER = 16  # models whose hidden rows of a window are held at once


class Model(NamedTuple):
    """What is evaluated: a decoder, and how it runs."""

    decoder: Decoder
    options: EngineConfig

    @classmethod
    def of(cls, engine: Engine) -> Model:
        """An engine's own."""
        return cls(engine.decoder, engine.options)

    def hidden(self, ids: np.ndarray) -> np.ndarray:
        """Hidden rows [T, H] of ids int32 [T] from an empty state."""
        decoder, step = self.decoder, self.options.token_block
        state = HybridState.fresh(decoder.config, self.options.kv_block, self.options.kv_format)
        with decoder.kernels.held():
            return np.concatenate([decoder.hidden(ids[begin:begin + step], state) for begin in range(0, len(ids), step)])


class Mixed:
    """The weights of one pack, but those tensors that `chosen` picks, by canonical name, come from another of the same shapes."""

    def __init__(self, base: Weights, other: Weights, chosen: Callable[[str], bool]) -> None:
        self.config: ModelConfig = base.config
        self._pick = lambda name: other if chosen(name) else base

    def vector(self, name: str) -> np.ndarray:
        """A float32 tensor in its own shape."""
        return self._pick(name).vector(name)

    def matrix(self, name: str) -> Matrix:
        """A stored matrix."""
        return self._pick(name).matrix(name)

    def experts(self, layer: int) -> tuple[Experts, Experts]:
        """gate_up and down of all experts of a layer."""
        stem = f"layers.{layer}.mlp.experts."
        return self._pick(stem + "gate_up_proj").experts(layer)[0], self._pick(stem + "down_proj").experts(layer)[1]


def evaluate(models: Mapping[str, Model], base: Model | None, windows: Sequence[np.ndarray], resume: Resume,
             progress: Progress | None = None) -> dict[str, Records]:
    """Records of every model, by name, over `windows` (int32, two tokens or more each), against `base` where there is one.

    progress(tokens done, of all, ""). Raises RequestError for logits that are NaN or infinite.
    """
    total = sum(map(len, windows))
    found = _restored(resume)
    try:
        for i in range(found[-1].done if found else 0, len(windows)):
            found.append(_Done(i + 1, _window(models, base, windows[i], i)))  # one step: an interrupt comes before or after
            if resume.due():
                resume.save(_packed(found))
            if progress:
                progress(sum(map(len, windows[:i + 1])), total, "")
    except BaseException:
        if found:
            resume.save(_packed(found))
        raise
    return _joined(found)


class _Done(NamedTuple):
    """Records by model, of one window or of all before; `done` windows are complete with it."""

    done: int
    records: dict[str, Records]


def _window(models: Mapping[str, Model], base: Model | None, ids: np.ndarray, number: int) -> dict[str, Records]:
    """Records of one window. Hidden rows of up to TOGETHER models first, then logits of a few positions at a time."""
    targets, rows = ids[1:].astype(np.int64), {name: [] for name in models}
    base_hidden = None if base is None else base.hidden(ids[:-1])
    names = list(models)
    for group in (names[begin:begin + TOGETHER] for begin in range(0, len(names), TOGETHER)):
        hidden = {name: models[name].hidden(ids[:-1]) for name in group}
        for part in _slices(len(targets)):
            name = "the base"
            try:
                p = None if base is None else log_softmax(base.decoder.logits(base_hidden[part]))
                for name in group:
                    logits = models[name].decoder.logits(hidden[name][part])
                    rows[name].append(score(logits, targets[part], p, number, part.start))
            except RequestError as err:
                raise RequestError(f"{name}, window {number + 1}: {err}") from None
    return {name: Records.join(parts) for name, parts in rows.items()}


def _slices(count: int) -> Iterator[slice]:
    for begin in range(0, count, HEAD_ROWS):
        yield slice(begin, min(count, begin + HEAD_ROWS))


def _joined(found: Sequence[_Done]) -> dict[str, Records]:
    return {name: Records.join([part.records[name] for part in found]) for name in found[0].records}


def _packed(found: Sequence[_Done]) -> dict[str, np.ndarray]:
    arrays = {"done": np.array(found[-1].done), "names": np.array(list(found[0].records))}
    for number, records in enumerate(_joined(found).values()):
        arrays |= {f"{number}.{name}": array for name, array in records.arrays().items()}
    return arrays


def _restored(resume: Resume) -> list[_Done]:
    stored = resume.load()
    if stored is None:
        return []
    fields = Records.__dataclass_fields__
    return [_Done(int(stored["done"]), {name: Records(*(stored[f"{number}.{field}"] for field in fields))
                                        for number, name in enumerate(stored["names"].tolist())})]
