"""`fermi-engine verify`: what this machine computes against stored results of the reference, or a dump of one model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fermi_engine import report

STAGE_COLUMNS = ("stage", "backend", "metric", "value", "limit", "ratio", "verdict")
LAYER_TITLE = "fed: largest error of a layer that gets the dump's input; free: of a run left to itself"
LAYER_COLUMNS = ("tensor", "fed", "free", "limit", "ratio", "skipped", "verdict")


def stages(backend: str | None, names: Sequence[str], as_json: bool) -> bool:
    """Replay stored results on `backend`, or on every backend of this CPU; True when all passed. Raises FermiError."""
    from fermi_engine import verify

    with report.progress("verifying", "checks") as progress:
        rows = verify.replay(backend, list(names) or None, progress)
    first, left_out = verify.first_divergence(rows), [] if names else verify.formless(backend)
    if as_json:
        report.json_document({"passed": first is None, "first_divergence": first and first.stage, "no_form": left_out,
                              "rows": [row._asdict() for row in rows]})
    else:
        drawn = [(row.stage, row.backend, row.metric, *map(_number, (row.value, row.limit, row.ratio)),
                  *_verdict(row.passed)) for row in rows]
        report.table("", STAGE_COLUMNS, drawn, right=("value", "limit", "ratio"))
    if first is not None:
        report.note(f"first stage that diverges: {first.stage} on {first.backend}: {first.metric} "
                    f"{_number(first.value)}, limit {_number(first.limit)} ({first.detail})")
    elif not as_json:
        print(f"all {len(rows)} checks passed{_elsewhere(left_out)}")
    return first is None


def _elsewhere(left_out: Sequence[str]) -> str:
    """What a run did not look at, because it has no form there."""
    from fermi_engine.stages.table import find_stage

    where = sorted({name for stage in left_out for name in find_stage(stage).backends})
    return f"; {len(left_out)} stages have no form here, see --backend {', '.join(where)}" if left_out else ""


def against(model: Path, dump: Path, backend: str | None, activations: str, threads: int | None, as_json: bool) -> bool:
    """Compare a whole forward with a dump, layer by layer; True when every tensor is within its limit."""
    from fermi_engine.against import against as compare
    from fermi_engine.against import first_failure
    from fermi_engine.config import EngineConfig
    from fermi_engine.engine import Engine

    options = EngineConfig(activations=activations, backend=backend, threads=threads)
    with report.progress("converting") as progress:
        engine = Engine.load(model, config=options, progress=progress)
    rows = compare(engine, dump)
    first = first_failure(rows)
    if as_json:
        report.json_document({"passed": first is None, "first_divergence": first and first.tensor,
                              "rows": [{**dataclasses.asdict(row), "passed": row.passed} for row in rows]})
    else:
        drawn = [(row.tensor, *map(_number, (row.fed, row.free, row.limit, _ratio(row))), row.skipped,
                  *_verdict(row.passed)) for row in rows]
        report.table(LAYER_TITLE, LAYER_COLUMNS, drawn, right=LAYER_COLUMNS[1:-1])
    if first is not None:
        report.note(f"first tensor over its limit: {_place(first.tensor)}: error {_number(first.fed)}, "
                    f"limit {_number(first.limit)}")
    elif not as_json:
        print(f"all {len(rows)} tensors within their limits")
    return first is None


def _place(tensor: str) -> str:
    layer = tensor.split(".")[1] if tensor.startswith("layers.") else None
    return tensor if layer is None else f"layer {layer}, {tensor}"


def _ratio(row: Any) -> float:
    return row.fed / row.limit if row.limit else 0.0 if row.fed == 0 else float("inf")


def _number(value: float) -> str:
    """A count as it is, a measurement with three digits."""
    whole = math.isfinite(value) and value == int(value) and abs(value) < 1e6
    return str(int(value)) if whole else f"{value:.3g}"


def _verdict(passed: bool) -> tuple[str, str]:
    """The word, and the style of its row."""
    return ("pass", "") if passed else ("FAIL", "bold red")
