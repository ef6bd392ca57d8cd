"""`fermi-engine reap`: what the command prints."""

from __future__ import annotations

import statistics
from typing import Any

from fermi_engine import report
from fermi_engine.compression.reap import Request, reap

COLUMNS = ("layer", "kept", "dead", "lowest kept", "highest dropped", "median score")
SHOWN = 12  # experts of a layer that are listed by number


def run(request: Request) -> None:
    """Measure, prune, print. Raises FermiError."""
    with report.progress("measuring", "tokens") as measuring, report.progress("pruning") as pruning:
        said = reap(request, measuring, pruning)
    report.table("", COLUMNS, [_cells(row) for row in said["layers"]], right=COLUMNS[2:])
    if "tokens" in said:
        print(f"measured on {said['tokens']} tokens of {said['documents']} documents; {said['generated']} are the model's own")
    print(f"{request.out}: {said['keep']} of {said['experts']} experts a layer; scores and choice: {request.scores_out}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    scores = dict(enumerate(row["scores"]))
    kept, dropped = ([scores[i] for i in scores if (i in row["kept"]) is there and scores[i] is not None]
                     for there in (True, False))
    ids = ", ".join(map(str, row["kept"][:SHOWN])) + (", ..." if len(row["kept"]) > SHOWN else "")
    numbers = [value for value in scores.values() if value is not None]
    return (str(row["layer"]), ids, str(sum(count == 0 for count in row["routed"])), f"{min(kept):.4g}",
            f"{max(dropped):.4g}" if dropped else "-", f"{statistics.median(numbers):.4g}")
