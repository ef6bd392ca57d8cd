"""Measures second moments of all inputs of a model over calibration texts, some layers at a time, into a moments file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fermi_engine.compression.calibration import opened, watch
from fermi_engine.compression.moments import COUNTS, Input, inputs, plan
from fermi_engine.config import EngineConfig
from fermi_engine.convert import cache_directory
from fermi_engine.engine import Engine
from fermi_engine.errors import RequestError
from fermi_engine.pack_writer import PackWriter
from fermi_engine.quality.documents import Document, identity
from fermi_engine.quality.resume import Resume, digest_of
from fermi_engine.report import Progress

VERSION = 1  # of what the progress files hold
MEMORY = 2 << 30  # bytes of moments held at once; what does not fit takes another pass over the text
KEPT_BYTES = 256 << 20  # of moments that are saved while a pass goes on; above it an interrupt repeats the pass


class SecondMoments:
    """Sums of u u^T, float32 [copies, n, n], and of rows, int64 [copies], for some inputs."""

    def __init__(self, wanted: Sequence[Input]) -> None:
        self.sums = {row.name: np.zeros((row.copies, row.n, row.n), np.float32) for row in wanted}
        self.rows = {row.name: np.zeros(row.copies, np.int64) for row in wanted}
        self._routed: dict[str, np.ndarray] = {}

    def trace(self, name: str, array: np.ndarray) -> None:
        """What layers report."""
        kind = name.rsplit(".", 1)[-1]
        if kind in ("router_ids", "expert_rows"):
            self._routed[kind] = array
        if name not in self.sums:
            return
        if not np.isfinite(array).all():
            raise RequestError(f"{name} is NaN or infinite while the text is read; check the weights: fermi-engine info --check")
        if kind == "expert_hidden":
            self._add_by_expert(name, array)
        else:
            self._add(name, 0, array)

    def _add(self, name: str, which: int, rows: np.ndarray) -> None:
        self.sums[name][which] += rows.T @ rows
        self.rows[name][which] += len(rows)

    def _add_by_expert(self, name: str, hidden: np.ndarray) -> None:
        """hidden [T * k, I]: rows of one expert follow each other."""
        expert = np.empty(len(hidden), np.int32)
        expert[self._routed["expert_rows"].reshape(-1)] = self._routed["router_ids"].reshape(-1)
        edges = [0, *(np.flatnonzero(np.diff(expert)) + 1).tolist(), len(expert)]
        for begin, end in pairwise(edges):
            self._add(name, int(expert[begin]), hidden[begin:end])

    def mean(self, name: str) -> np.ndarray:
        """float32 [copies, n, n]: zeros where no row came."""
        return self.sums[name] / np.maximum(self.rows[name], 1).astype(np.float32)[:, None, None]

    def arrays(self) -> dict[str, np.ndarray]:
        """The sums."""
        return {**{f"s.{name}": array for name, array in self.sums.items()},
                **{f"r.{name}": array for name, array in self.rows.items()}}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from earlier sums."""
        self.sums = {name: arrays[f"s.{name}"].copy() for name in self.sums}
        self.rows = {name: arrays[f"r.{name}"].copy() for name in self.rows}


@dataclass
class Request:
    """What is asked for: a pack, or a checkpoint directory, which is measured through a pack of `format`."""

    model: Path
    calibration: Sequence[Path]
    out: Path
    generate: int = 0
    window: int | None = None
    memory: int = MEMORY
    format: str | None = None
    overwrite: bool = False
    options: EngineConfig = field(default_factory=EngineConfig)


def calibrate(request: Request, progress: Progress | None = None) -> dict[str, Any]:
    """Measure and write `request.out`; returns what the file says about itself.

    An interrupted run goes on: finished passes are in the file's part, and of a pass whose moments are few those so far in
    the cache. progress(done, total, pass) counts tokens. Raises FermiError.
    """
    if request.out.exists() and not request.overwrite:
        raise RequestError(f"{request.out} exists; remove it, choose another name or ask for it to be overwritten")
    engine, documents, window = opened(request, progress)
    key = digest_of("moments", VERSION, engine.pack_hash, window, request.generate, request.options.activations,
                    *identity(documents))
    about = {"key": key, "pack": engine.pack_hash, "source": engine.pack.source, "window": window,
             "calibration": [path.name for path in request.calibration], "documents": len(documents),
             "tokens": sum(len(document.ids) for document in documents), "generate": request.generate}
    with PackWriter(request.out, plan(engine.config, about), key) as writer:
        left = {slot.name for slot in writer.remaining()}
        passes = _passes([row for row in inputs(engine.config) if {row.name, COUNTS + row.name} & left], request.memory)
        for number, rows in enumerate(passes, 1):
            _pass(request, engine, documents, window, rows, (key, number, len(passes)), writer, progress)
        writer.finish()
    return about


def _passes(rows: Sequence[Input], memory: int) -> list[list[Input]]:
    """Inputs in groups of at most `memory` bytes, one at least in each."""
    groups: list[list[Input]] = []
    for row in rows:
        if not groups or sum(other.nbytes for other in groups[-1]) + row.nbytes > memory:
            groups.append([])
        groups[-1].append(row)
    return groups


def _pass(request: Request, engine: Engine, documents: Sequence[Document], window: int, rows: Sequence[Input],
          name: tuple[str, int, int], writer: PackWriter, progress: Progress | None) -> None:
    """Read all documents for these inputs and write their moments."""
    key, number, count = name
    watcher, small = SecondMoments(rows), sum(row.nbytes for row in rows) <= KEPT_BYTES
    own = digest_of(key, [row.name for row in rows])
    resume = Resume(cache_directory() / f"moments-{own}.part" if small else None, own)
    report = progress and (lambda done, total, _: progress(done, total, f"pass {number} of {count}"))
    watch(engine, documents, watcher, window, request.generate, resume, report)
    for slot in list(writer.remaining()):
        source = slot.name.removeprefix(COUNTS)
        if source in watcher.sums:
            counts = slot.name.startswith(COUNTS)
            array = watcher.rows[source].astype(np.float32) if counts else watcher.mean(source)
            writer.put(slot.name, [np.ascontiguousarray(array).view(np.uint8).reshape(-1)])
    resume.done()
