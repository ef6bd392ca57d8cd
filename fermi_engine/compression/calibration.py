"""Documents through a model while somebody watches its layers: what saliency and second moments are measured by.

Everything goes through the prefill path, which reports what layers compute; a decoded token is a recorded program and
reports nothing. So a model's own answer is generated first and then read like any other text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from fermi_engine.config import EngineConfig
from fermi_engine.engine import Engine
from fermi_engine.model.weights import Trace
from fermi_engine.quality.documents import Document, Reader, windows
from fermi_engine.quality.resume import Resume
from fermi_engine.report import Progress
from fermi_engine.sampling import SamplingParams
from fermi_engine.state import HybridState
from fermi_engine.vision.patches import PreparedImage

WINDOW = 2048  # tokens, where the model's context is not shorter


class Asked(Protocol):
    """What requests for a measurement have in common."""

    model: Path
    calibration: Sequence[Path]
    window: int | None
    format: str | None
    options: EngineConfig


def opened(request: Asked, progress: Progress | None) -> tuple[Engine, list[Document], int]:
    """The model (a checkpoint through a pack of `format`), the texts that hold tokens, and tokens of a window. FermiError for a
    model or texts that cannot be read, or texts without a token."""
    engine = Engine.load(request.model, request.format if request.model.is_dir() else None,
                         config=replace(request.options, snapshot_ram=0), progress=progress)
    documents = Reader.of(engine).read(request.calibration)
    window = request.window or min(WINDOW, engine.context)
    windows(documents, window, ", ".join(map(str, request.calibration)))  # refuses texts that hold nothing
    return engine, [document for document in documents if len(document.ids)], window


class Watcher(Protocol):
    """Adds up what layers report. Documents are watched whole or not at all: `arrays` are asked for between two."""

    trace: Trace

    def arrays(self) -> dict[str, np.ndarray]:
        """All sums so far, by name."""

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from sums that `arrays` gave."""


@dataclass
class Counts:
    """What has been watched: documents, tokens read, and how many of these the model generated itself."""

    documents: int = 0
    tokens: int = 0
    generated: int = 0


def watch(engine: Engine, documents: Sequence[Document], watcher: Watcher, window: int, generate: int = 0,
          resume: Resume | None = None, progress: Progress | None = None) -> Counts:
    """Run all documents in windows of at most `window` tokens, each from an empty state; one with images is never cut.

    generate: after a document's last window the model goes on by up to so many tokens of its own (the likeliest), which are
    watched, too; never past its context. progress(tokens of the documents done, of all, ""). An interrupted run goes on
    after the last document that was saved.
    """
    resume, total = resume or Resume(None, ""), sum(len(document.ids) for document in documents)
    counts = _restored(resume, watcher)
    whole = True  # between two documents
    try:
        for document in documents[counts.documents:]:
            whole = False
            for ids, images, made in _sequences(engine, document, window, generate):
                _read(engine, ids, images, watcher.trace)
                counts.tokens, counts.generated = counts.tokens + len(ids), counts.generated + made
            counts.documents += 1
            whole = True
            if resume.due():
                resume.save(_packed(watcher, counts))
            if progress:
                progress(sum(len(document.ids) for document in documents[:counts.documents]), total, "")
    except BaseException:
        if whole and counts.documents:
            resume.save(_packed(watcher, counts))
        raise
    return counts


def _sequences(engine: Engine, document: Document, window: int,
               generate: int) -> Iterator[tuple[np.ndarray, list[PreparedImage], int]]:
    """What of a document is read from an empty state, the images in it, and how many tokens at its end are the model's own."""
    images = [image.prepared(engine.vision) for image in document.images]
    length = len(document.ids) if images else window
    for begin in range(0, len(document.ids), length):
        ids = document.ids[begin:begin + length]
        own: list[int] = []
        if generate and begin + length >= len(document.ids):
            params = SamplingParams(max_tokens=generate, temperature=0.0)
            own = [piece.id for piece in engine.generate(ids.tolist(), params, images=images) if piece.id is not None]
        yield np.concatenate([ids, np.array(own, np.int32)]), images, len(own)


def _read(engine: Engine, ids: np.ndarray, images: Sequence[PreparedImage], trace: Trace) -> None:
    decoder, options = engine.decoder, engine.options
    placed = engine.vision.place(ids, images) if images else None
    state = HybridState.fresh(engine.config, options.kv_block, options.kv_format)
    with decoder.kernels.held():
        for begin in range(0, len(ids), options.token_block):
            block = ids[begin:begin + options.token_block]
            part = placed.part(begin, begin + len(block)) if placed else None
            x = decoder.hidden(block, state, trace, part)
            trace("norm", decoder.kernels.rms_norm(x, decoder.norm, engine.config.rms_norm_eps))


def _packed(watcher: Watcher, counts: Counts) -> dict[str, np.ndarray]:
    return {"counts": np.array([counts.documents, counts.tokens, counts.generated]), **watcher.arrays()}


def _restored(resume: Resume, watcher: Watcher) -> Counts:
    stored = resume.load()
    if stored is None:
        return Counts()
    counts = Counts(*stored.pop("counts").tolist())
    watcher.restore(stored)
    return counts
