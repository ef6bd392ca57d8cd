"""`fermi-engine eval`: perplexity of models over text, and what they lose against a base model, in all and part by part."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fermi_engine import report
from fermi_engine.config import EngineConfig
from fermi_engine.convert import DOWN, GATE_UP, cache_directory
from fermi_engine.engine import Engine
from fermi_engine.errors import RequestError
from fermi_engine.info import part_of
from fermi_engine.model.decoder import Decoder
from fermi_engine.pack import Pack
from fermi_engine.pack_layout import Part as StoredPart
from fermi_engine.pack_layout import blob_name
from fermi_engine.quality.documents import Reader, texts, windows
from fermi_engine.quality.evaluate import Mixed, Model, evaluate
from fermi_engine.quality.measures import Records, by_position, summary
from fermi_engine.quality.resume import Resume, digest_of
from fermi_engine.shapes import expected_shapes

VERSION = 1  # of what the progress files hold
WINDOW = 2048  # tokens, where the model's context is not shorter
BASE_FORMAT = "f32"  # of a checkpoint directory given as the base
WHOLE = "all"
LAYER = re.compile(r"^layers\.\d+\.")
COLUMNS = ("model", "size", "tokens", "perplexity", "loss, nats", "same top-1")
KL_COLUMNS = ("model", "KL divergence", "mean", "median", "p99", "max")
POSITION_COLUMNS = ("tokens before", "count", "perplexity", "KL mean", "p99", "same top-1")
PART_COLUMNS = ("part", "weights", "size", "size in base", "KL mean", "p99", "share of sum", "same top-1")


@dataclass
class Request:
    """What the command line asked for: packs or checkpoint directories, texts, and the sizes of both."""

    models: Sequence[Path]
    texts: Sequence[Path]
    against: Path | None = None
    by: str | None = None
    window: int | None = None
    format: str | None = None
    as_json: bool = False
    options: EngineConfig = field(default_factory=EngineConfig)


def run(request: Request) -> None:
    """Evaluate and print. Raises FermiError."""
    _check(request)
    engines, base = _load(request)
    length = request.window or min(WINDOW, engines[0].context)
    documents = Reader.of(engines[0]).read(request.texts)
    pieces = texts(windows(documents, length, ", ".join(map(str, request.texts))), "eval")
    models = {name: Model.of(engine) for name, engine in zip(_names(request.models), engines, strict=True)}
    parts = {} if request.by is None else parts_of(engines[0], base, request.by)
    if parts:
        models = {WHOLE: Model.of(engines[0]), **{name: mixed(base, engines[0], part) for name, part in parts.items()}}
    key = digest_of("eval", VERSION, [engine.pack_hash for engine in engines], base and base.pack_hash, list(models),
                    request.options.activations, request.options.kv_format, np.concatenate(pieces), list(map(len, pieces)))
    resume = Resume(cache_directory() / f"eval-{key}.part", key)
    with report.progress("evaluating", "tokens") as progress:
        found = evaluate(models, base and Model.of(base), pieces, resume, progress)
    said = _said(request, engines, base, found, parts, len(pieces))
    if request.as_json:
        report.json_document(said)
    else:
        _print(said)
    resume.done()


def _check(request: Request) -> None:
    if request.by is not None and (request.against is None or len(request.models) != 1):
        raise RequestError("--by needs one --model and --against: parts of that model are put into the base one at a time")
    if request.by not in (None, "class", "kind", "tensor"):
        raise RequestError(f"--by {report.quoted(request.by)}; choose class, kind or tensor")


def _load(request: Request) -> tuple[list[Engine], Engine | None]:
    """All models, each pack once, and the base."""
    loaded: dict[Path, Engine] = {}

    def load(path: Path, format: str | None) -> Engine:
        key = path.resolve() if path.is_file() else path
        if key not in loaded:
            with report.progress(f"loading {path.name}") as progress:
                loaded[key] = Engine.load(path, format, config=request.options, progress=progress)
        return loaded[key]

    engines = [load(path, request.format) for path in request.models]
    base = None
    if request.against is not None:
        directory = request.against.is_dir()
        base = Engine.load(request.against, BASE_FORMAT, config=request.options) if directory else load(request.against, None)
    for engine in (*engines[1:], *([base] if base else [])):
        _check_alike(engines[0], engine)
    return engines, base


def _check_alike(first: Engine, other: Engine) -> None:
    """The same tokens mean the same text to both."""
    a, b = first.config.vocab_size, other.config.vocab_size
    if a != b:
        raise RequestError(f"{first.pack.path} has a vocabulary of {a}, {other.pack.path} one of {b}: their logits do not "
                           "compare; give models of one family")
    texts = [engine.pack.files().get("tokenizer.json") for engine in (first, other)]
    if texts[0] != texts[1]:
        raise RequestError(f"{first.pack.path} and {other.pack.path} carry different tokenizers: the same text is not the "
                           "same tokens; convert both from checkpoints with one tokenizer.json")


def _names(paths: Sequence[Path]) -> list[str]:
    """File names, or whole paths where two models are called alike."""
    short = [path.name for path in paths]
    names = short if len(set(short)) == len(short) else [str(path) for path in paths]
    if len(set(names)) < len(names):
        raise RequestError("a model is given twice; name each once")
    return names


@dataclass
class Part:
    """Tensors of a model that go together: canonical names, weights, bytes in the model and in the base."""

    names: frozenset[str]
    weights: int
    bytes: int
    base_bytes: int


def parts_of(engine: Engine, base: Engine, by: str) -> dict[str, Part]:
    """Quantised tensors by class (attention, experts, ...), by kind (the same of all layers) or one by one."""
    if base.config != engine.config:
        raise RequestError(f"{base.pack.path} is of another shape than {engine.pack.path}: parts of one do not fit the other")
    label = {"class": part_of, "kind": lambda name: LAYER.sub("layers.*.", name), "tensor": str}[by]
    groups: dict[str, list[str]] = {}
    for name in expected_shapes(engine.config):
        if _stored(engine.pack, name)[0].format != "f32":
            groups.setdefault(label(name), []).append(name)
    if not groups:
        raise RequestError(f"{engine.pack.path} holds no quantised tensor; there is nothing to tell apart by {by}")
    return {label: _part(engine.pack, base.pack, names) for label, names in groups.items()}


def _stored(pack: Pack, name: str) -> tuple[StoredPart, int]:
    """How a tensor is stored, by its canonical name, and how many matrices it has."""
    if name.endswith((GATE_UP, DOWN)):
        return pack.stored(blob_name(int(name.split(".")[1])))[name.endswith(DOWN)]
    return pack.stored(name)[0]


def _part(pack: Pack, base: Pack, names: Iterable[str]) -> Part:
    names = frozenset(names)
    stored, before = ([_stored(which, name) for name in names] for which in (pack, base))
    weights = sum(count * part.rows * part.cols for part, count in stored)
    return Part(names, weights, *(sum(count * math.prod(part.stored_shape) for part, count in rows)
                                  for rows in (stored, before)))


def mixed(base: Engine, other: Engine, part: Part) -> Model:
    """The base with one part from another model."""
    weights = Mixed(base.pack, other.pack, part.names.__contains__)
    return Model(Decoder(weights, base.kernels, base.options.activations), base.options)


def _said(request: Request, engines: Sequence[Engine], base: Engine | None, found: Mapping[str, Records],
          parts: Mapping[str, Part], count: int) -> dict[str, Any]:
    whole = found if not parts else {_names(request.models)[0]: found[WHOLE]}
    rows = [{"model": name, **_identity(engine), **summary(records), "positions": by_position(records)}
            for (name, records), engine in zip(whole.items(), engines, strict=True)]
    said = {"text": [str(path) for path in request.texts], "windows": count, "activations": request.options.activations,
            "kv_format": request.options.kv_format, "models": rows, "base": base and _identity(base)}
    if parts:
        said["by"] = request.by
        said["parts"] = [{"part": name, "tensors": sorted(part.names), "weights": part.weights, "bytes": part.bytes,
                          "base_bytes": part.base_bytes, **summary(found[name])} for name, part in parts.items()]
    return said


def _identity(engine: Engine) -> dict[str, Any]:
    pack = engine.pack
    return {"path": str(pack.path), "hash": pack.hash, "bytes": pack.mapped.size, "format": pack.default_format}


def _print(said: dict[str, Any]) -> None:
    rows, compared = said["models"], said["base"] is not None
    columns = COLUMNS if compared else COLUMNS[:4]
    report.table("", columns, [_cells(row)[: len(columns)] for row in rows], right=columns[1:])
    if compared:
        print(f"against {said['base']['path']} ({said['base']['format']}), perplexity {rows[0]['base_ppl']:.4f}")
        cells = [(row["model"], which, *_divergence(row[field])) for row in rows
                 for which, field in (("of the model from the base", "kl"), ("of the base from the model", "kl_back"))]
        report.table("", KL_COLUMNS, cells, right=KL_COLUMNS[2:])
    if len(rows) == 1:  # of several models --json has them
        columns = POSITION_COLUMNS if compared else POSITION_COLUMNS[:3]
        report.table("by position in the window", columns,
                     [_position_cells(part)[: len(columns)] for part in rows[0]["positions"]], right=columns)
    if "parts" in said:
        _print_parts(said)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    cells = (row["model"], report.size(row["bytes"]), str(row["tokens"]), measured(row["ppl"], row["ppl_error"]))
    return cells if "kl" not in row else (*cells, measured(row["nll_loss"], row["nll_loss_error"]), _share(row))


def _divergence(part: dict[str, float]) -> tuple[str, ...]:
    return measured(part["mean"], part["error"]), *(_number(part[name]) for name in ("median", "p99", "max"))


def _position_cells(row: dict[str, Any]) -> tuple[str, ...]:
    span = str(row["from"]) if row["from"] == row["to"] else f"{row['from']}..{row['to']}"
    cells = (span, str(row["tokens"]), measured(row["ppl"], row["ppl_error"]))
    if "kl" not in row:
        return cells
    return (*cells, measured(row["kl"]["mean"], row["kl"]["error"]), _number(row["kl"]["p99"]), _share(row))


def _print_parts(said: dict[str, Any]) -> None:
    total = sum(row["kl"]["mean"] for row in said["parts"])
    rows = sorted(said["parts"], key=lambda row: -row["kl"]["mean"])
    cells = [(row["part"], f"{row['weights']:,}", report.size(row["bytes"]), report.size(row["base_bytes"]),
              measured(row["kl"]["mean"], row["kl"]["error"]), _number(row["kl"]["p99"]),
              f"{row['kl']['mean'] / total:.1%}" if total else "-", _share(row)) for row in rows]
    whole = said["models"][0]["kl"]
    cells.append((WHOLE, "", "", "", measured(whole["mean"], whole["error"]), _number(whole["p99"]),
                  f"{whole['mean'] / total:.1%}" if total else "-", _share(said["models"][0]), "bold"))
    report.table(f"\nby {said['by']}: the base with only these tensors from the model", PART_COLUMNS, cells,
                 right=PART_COLUMNS[1:])


def measured(value: float, error: float) -> str:
    """A value with its error, both to the error's second digit: 6.233 ± 0.041."""
    if not (math.isfinite(value) and math.isfinite(error)) or value == 0:
        return _number(value)
    if not 1e-3 <= abs(value) < 1e6:
        exponent = math.floor(math.log10(abs(value)))
        return f"({measured(value / 10.0**exponent, error / 10.0**exponent)})e{exponent}"
    digits = 4 if error <= 0 else min(9, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def _number(value: float) -> str:
    return f"{value:.3g}"


def _share(row: dict[str, Any]) -> str:
    return f"{row['top1']:.2%} ± {row['top1_error']:.2%}"

