"""REAP from end to end: measure which experts matter, write that down, leave the others out."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fermi_engine.checkpoint import PRUNED, Checkpoint
from fermi_engine.compression.calibration import opened, watch
from fermi_engine.compression.prune_checkpoint import check_new_directory, prune_checkpoint
from fermi_engine.compression.prune_pack import check_keep, check_new_pack, prune_pack
from fermi_engine.compression.saliency import KIND, Saliency, Scores, keep_best
from fermi_engine.config import EngineConfig, ModelConfig
from fermi_engine.convert import cache_directory
from fermi_engine.errors import RequestError
from fermi_engine.pack import Pack
from fermi_engine.quality.documents import identity
from fermi_engine.quality.resume import Resume, digest_of
from fermi_engine.report import Progress

VERSION = 1  # of what the progress files hold
SCORES_SUFFIX = ".reap.json"  # after the name of what is written


@dataclass
class Request:
    """What is asked for. `model`: a pack, or a checkpoint directory, which is measured through a pack of `format`; the
    result is of the same kind. Either `calibration` or `scores`, those of an earlier run."""

    model: Path
    keep: int
    out: Path
    calibration: Sequence[Path] = ()
    scores: Path | None = None
    generate: int = 0
    window: int | None = None
    format: str | None = None
    overwrite: bool = False
    options: EngineConfig = field(default_factory=EngineConfig)

    @property
    def scores_out(self) -> Path:
        """Where scores and kept experts go."""
        return self.out.with_name(self.out.name + SCORES_SUFFIX)


def reap(request: Request, measuring: Progress | None = None, pruning: Progress | None = None) -> dict[str, Any]:
    """Do it; returns the document that stands in `request.scores_out`. Nothing is written before all that was given has been
    checked. Raises FermiError."""
    config = check(request)
    if request.scores is None:
        scores = _measured(request, config, measuring)
    else:
        scores = _given(request.scores, config)
    kept = keep_best(scores.scores, request.keep)
    document = scores.to_json(kept)
    write_json(request.scores_out, document)
    if request.model.is_dir():
        prune_checkpoint(request.model, request.out, kept, pruning)
    else:
        prune_pack(request.model, request.out, kept, pruning, request.overwrite)
    return document


def check(request: Request) -> ModelConfig:
    """Everything that needs no running model. Raises FermiError."""
    if bool(request.calibration) == (request.scores is not None):
        raise RequestError("give --calibration to measure on, or --scores of an earlier run: one of both")
    if request.model.is_dir():
        checkpoint = Checkpoint.open(request.model)
        config, pruned = checkpoint.config, checkpoint.pruned
        check_new_directory(request.out)
    else:
        with Pack.open(request.model) as pack:
            config, pruned = pack.config, pack.source.get(PRUNED)
        check_new_pack(request.model, request.out, request.overwrite)
    check_keep(config.num_experts, config.num_experts_per_tok, request.keep, request.model, pruned)
    _check_scores_out(request.scores_out)
    return config


def _check_scores_out(path: Path) -> None:
    if path.exists():
        try:
            ours = json.loads(path.read_text(encoding="utf-8")).get("kind") == KIND
        except (OSError, ValueError, AttributeError, RecursionError):
            ours = False
        if not ours:
            raise RequestError(f"{path} is in the way and holds no scores; move it or choose another name")


def _given(path: Path, config: ModelConfig) -> Scores:
    scores = Scores.read(path)
    expected = (config.num_hidden_layers, config.num_experts)
    if scores.scores.shape != expected:
        raise RequestError(f"{path} holds scores of {scores.scores.shape[0]} layers of {scores.scores.shape[1]} experts, the "
                           f"model has {expected[0]} of {expected[1]}; measure this model")
    return scores


def _measured(request: Request, config: ModelConfig, progress: Progress | None) -> Scores:
    engine, documents, window = opened(request, progress)
    key = digest_of("reap", VERSION, engine.pack_hash, window, request.generate, request.options.activations,
                    request.options.kv_format, *identity(documents))
    about = {"key": key, "pack": engine.pack_hash, "source": engine.pack.source,
             "calibration": [str(path.name) for path in request.calibration], "window": window}
    before = _earlier(request.scores_out, key)
    if before is not None:
        return before
    saliency = Saliency(config.num_hidden_layers, config.num_experts)
    resume = Resume(cache_directory() / f"reap-{key}.part", key)
    counts = watch(engine, documents, saliency, window, request.generate, resume, progress)
    about |= {"documents": counts.documents, "tokens": counts.tokens, "generated": counts.generated}
    scores = Scores(saliency.scores(), saliency.routed, config.num_experts_per_tok, about)
    write_json(request.scores_out, scores.to_json(keep_best(scores.scores, request.keep)))
    resume.done()
    return scores


def _earlier(path: Path, key: str) -> Scores | None:
    """Scores that an earlier run of the same measurement has left, whose pruning was interrupted or kept another number."""
    if not path.exists():
        return None
    try:
        scores = Scores.read(path)
    except RequestError:
        return None
    return scores if scores.about.get("key") == key else None


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a document as a whole or not at all. RequestError where it cannot be written."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(part, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as err:
        raise RequestError(f"cannot write {path}: {err.strerror}; choose a place you can write to") from None
