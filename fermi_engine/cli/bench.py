"""`fermi-engine bench`: prefill and decode of a model, what they move and compute, and the machine's limits beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fermi_engine import bench, report
from fermi_engine.config import EngineConfig
from fermi_engine.engine import Engine
from fermi_engine.errors import RequestError
from fermi_engine.report import quoted, size
from fermi_engine.roofline import LEAST_BYTES

MOST = 1 << 20  # of any count given here
QUIET = 0.95  # rooflines of a quiet machine lie within this of each other

DECODE_COLUMNS = ("context", "tok/s", "ms median", "min", "max", "weights", "state", "KV", "moved a token", "GB/s", "of roofline",
                  "GMAC/s")
PREFILL_COLUMNS = ("prompt", "tok/s", "s median", "min", "max", "GMAC/s", "of integer peak", "of own ISA's")


def run(model: Path, plan: bench.Plan, threads: Sequence[int], options: EngineConfig, as_json: bool) -> None:
    """Check the kernels' stages, then measure at every thread count and print. Raises FermiError."""
    available = bench.available_bytes()  # before the pack may be copied or locked
    with report.progress("loading") as progress:
        engine = Engine.load(model, config=options, progress=progress)
    said = _description(engine)
    with report.progress("verifying", "backends"):
        said["verified"] = bench.check_stages(sorted(set(engine.kernels.backends.values())))
    said["notes"] = _notes(engine.pack.mapped.size, available, said["verified"])
    said["runs"] = []
    for count in threads or (engine.kernels.threads,):
        runner = Engine(engine.pack, dataclasses.replace(options, threads=count))
        with report.progress(f"measuring, {count} threads", "runs") as progress:
            result = bench.measure(runner, plan, progress)
            result["first_token_s"] = bench.first_token(runner)
        said["runs"].append(result)
    if as_json:
        report.json_document(said)
    else:
        _print(said)


def parse_counts(option: str, items: Sequence[str]) -> tuple[int, ...]:
    """`128,512` or repeated options as whole numbers. Raises RequestError."""
    words = [word.strip() for item in items for word in item.split(",")]
    wrong = next((word for word in words if not word.isdecimal() or len(word) > 8 or int(word) > MOST), None)
    if wrong is not None:
        raise RequestError(f"{option}: {quoted(wrong)} is not a whole number up to {MOST}; "
                           "give one, or several with commas between")
    return tuple(int(word) for word in words)


def _description(engine: Engine) -> dict[str, Any]:
    ops: dict[str, int] = {}
    for backend in engine.kernels.backends.values():
        ops[backend] = ops.get(backend, 0) + 1
    pack, options = engine.pack, engine.options
    return {"model": str(pack.path), "model_type": engine.config.model_type, "pack_bytes": pack.mapped.size,
            "placed": pack.placed, "format": pack.default_format, "backends": ops, "activations": options.activations,
            "kv_format": options.kv_format}


def _notes(needed: int, available: int | None, verified: Sequence[str]) -> list[str]:
    notes = [f"verified before timing: {len(verified)} stages on each backend in use ({verified[0]} to {verified[-1]})"]
    if available is not None and available < needed:
        notes.append(f"memory is scarce: {size(available)} available for a pack of {size(needed)}, so what is measured is "
                     "in part the disk, not the engine")
    if needed < LEAST_BYTES:
        notes.append(f"the pack is smaller than {size(LEAST_BYTES)}: caches may hold it, so that GB/s and roofline are not "
                     "the memory's")
    return notes


def _print(said: dict[str, Any]) -> None:
    backends = ", ".join(f"{name} ({count} ops)" for name, count in said["backends"].items())
    model = f"{said['model']}, {said['model_type']}, {said['format']}, {size(said['pack_bytes'])} {said['placed']}"
    report.facts("", {"model": model,
                      "backends": backends, "activations": said["activations"], "keys and values": said["kv_format"]})
    for note in said["notes"]:
        print(note)
    for result in said["runs"]:
        _print_run(result)


def _print_run(result: dict[str, Any]) -> None:
    count = result["threads"]
    title = f"{count} thread{'s' if count > 1 else ''}"
    if result["decode"]:
        report.table(f"\n{title}: decode after a synthetic context, without sampling", DECODE_COLUMNS,
                     [_decode_cells(row) for row in result["decode"]], right=DECODE_COLUMNS[1:])
    if result["prefill"]:
        report.table(f"\n{title}: prefill", PREFILL_COLUMNS, [_prefill_cells(row) for row in result["prefill"]],
                     right=PREFILL_COLUMNS)
    report.facts("", _limits(result))
    rates = [read["bytes_per_s"] for read in result["roofline"].values()]
    if min(rates) < QUIET * max(rates):
        print(f"not quiet: the rooflines before and after differ by {1 - min(rates) / max(rates):.0%}; something else used the "
              "machine, measure again")
    for row in result["decode"]:
        if "timing" in row:
            _print_timing(f"{title}: a token after {row['context'][1]}", row["timing"])
    for row in result["prefill"]:
        if "timing" in row:
            _print_timing(f"{title}: a prefill of {row['tokens']}", row["timing"])


def _decode_cells(row: dict[str, Any]) -> tuple[str, ...]:
    sizes = row["bytes_per_token"]
    return ("{}..{}".format(*row["context"]), f"{row['tokens_per_s']:.2f}", *_milliseconds(row), size(sizes["weights"]),
            size(sizes["recurrent"] + sizes["conv"]), size(sizes["kv"]), size(sum(sizes.values())),
            f"{row['bytes_per_s'] / 1e9:.2f}", f"{row['share_of_roofline']:.1%}", f"{row['macs_per_s'] / 1e9:.1f}")


def _prefill_cells(row: dict[str, Any]) -> tuple[str, ...]:
    shares = (row.get("share_of_integer_peak"), row.get("share_of_own_peak"))
    return (str(row["tokens"]), f"{row['tokens_per_s']:.2f}", *(f"{row[name]:.3f}" for name in ("median_s", "min_s", "max_s")),
            f"{row['macs_per_s'] / 1e9:.1f}", *("-" if share is None else f"{share:.1%}" for share in shares))


def _milliseconds(row: dict[str, Any]) -> list[str]:
    return [f"{1000 * row[name]:.2f}" for name in ("median_s", "min_s", "max_s")]


def _limits(result: dict[str, Any]) -> dict[str, str]:
    rows = {}
    for when, read in result["roofline"].items():
        of = f"{size(read['read_bytes'])} of the pack, {read['pattern']}"
        rows[f"roofline {when}"] = f"{read['bytes_per_s'] / 1e9:.2f} GB/s ({of})"
    rows["integer peak"] = ", ".join(f"{name} {rate / 1e9:.1f} GMAC/s"
                                     for name, rate in result["integer_peak_macs_per_s"].items()) or "unknown"
    if result["decode"]:
        rows["resident memory"] = _memory(result["decode"][-1]["memory"])
    rows["first token"] = f"{result['first_token_s']:.2f} s in a new process, pack in the page cache"
    return rows


def _memory(held: dict[str, int | None]) -> str:
    if held["resident"] is None or held["anonymous"] is None:  # old kernels do not tell them apart
        return "unknown" if held["resident"] is None else size(held["resident"])
    beyond = held["anonymous"] - held["state_and_kv"]
    return (f"{size(held['resident'])}: {size(held['file'])} of files ({size(held['pack'])} is the pack), "
            f"{size(held['state_and_kv'])} of state, keys and values, {size(max(0, beyond))} else")


def _print_timing(title: str, timing: dict[str, Any]) -> None:
    total = timing["total_s"]
    cells = [(name, f"{1000 * seconds:.3f}", f"{seconds / total:.1%}") for name, seconds in timing["parts_s"].items()]
    cells.append(("total", f"{1000 * total:.3f}", "100.0%", "bold"))
    report.table(f"\n{title}", ("op", "ms", "share"), cells, right=("ms", "share"))
