"""`fermi-engine convert` and `fermi-engine info`: model files, their rules and their sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fermi_engine import report
from fermi_engine.compression.scales import Scales
from fermi_engine.errors import RequestError
from fermi_engine.info import describe_checkpoint, describe_pack, left_out
from fermi_engine.pack import Pack


def show_rules(src: Path, format: str, rules: str | None) -> None:
    """Print which tensors of a checkpoint get which format and why. Raises CheckpointError, ConfigError."""
    from fermi_engine.checkpoint import Checkpoint
    from fermi_engine.compression.rules import assign, rule_rows
    from fermi_engine.compression.sensitivity import resolve
    from fermi_engine.shapes import pack_shapes

    checkpoint = Checkpoint.open(src)
    shapes = pack_shapes(checkpoint.config, checkpoint.vision)
    rows = rule_rows(assign(shapes, format, resolve(rules, shapes, format)))
    report.table("", ("tensors", "count", "format", "reason"), rows, right=("count",))


def convert(src: Path, dst: Path, format: str, rules: str | None, overwrite: bool, scales: str = "plain",
            moments: Path | None = None) -> None:
    """Convert with progress, then print what the pack holds. Raises as fermi_engine.convert.convert, and RequestError for
    moments that are not of this checkpoint."""
    from fermi_engine.convert import convert as convert_checkpoint

    chosen = _scales(src, scales, moments)
    with report.progress("converting") as progress:
        convert_checkpoint(src, dst, format=format, rules=rules, progress=progress, overwrite=overwrite, scales=chosen)
    with Pack.open(dst) as pack:
        _print_formats(describe_pack(pack))
        said = pack.info()
    print(f"{dst}: {report.size(said['bytes'])}, left out of the checkpoint: {left_out(said['unused'])}")


def _scales(src: Path, kind: str, path: Path | None) -> Scales:
    """What --scales and --moments ask for."""
    from fermi_engine.checkpoint import Checkpoint
    from fermi_engine.compression.moments import Moments
    from fermi_engine.convert import source_of

    if path is None:
        return Scales(kind)
    moments = Moments(path)
    checkpoint = Checkpoint.open(src)
    if moments.about.get("source") != source_of(checkpoint):
        raise RequestError(f"{path} was measured on another model than {src}; measure a pack of this checkpoint with "
                           "fermi-engine calibrate")
    return Scales(kind, lambda name, expert: moments.of(name, checkpoint.config, expert), f"moments {moments.hash[:16]}")


def info(path: Path, check: bool, as_json: bool) -> None:
    """Describe a pack or a checkpoint directory; `check` reads every byte of a pack first. Raises FermiError."""
    if path.is_dir():
        if check:
            raise RequestError(f"--check reads a pack, {path} is a checkpoint directory; convert it first")
        _print_description(describe_checkpoint(path), as_json)
        return
    with Pack.open(path) as pack:
        said = describe_pack(pack)
        if check:
            with report.progress("checking") as progress:
                pack.check(progress)
            said["checked"] = True
        _print_description(said, as_json)


def _print_description(said: dict[str, Any], as_json: bool) -> None:
    if as_json:
        report.json_document(said)
        return
    report.facts("", _head(said))
    report.facts("\nconfiguration", {**said["config"], **{f"{kind} layers": n for kind, n in said["layers"].items()}})
    _print_formats(said)
    rows = [(part, row["tensors"], f"{row['weights']:,}", report.size(row["bytes"]), report.size(row["read_per_token"]))
            for part, row in said["parts"].items()]
    columns = ("part", "tensors", "weights", "size", "read per token")
    report.table("", columns, rows, right=columns[1:])
    report.facts("", {
        "parameters": f"{said['parameters']:,}",
        "read per decoded token": report.size(said["read_bytes_per_token"]),
        "recurrent state": report.size(said["recurrent_state_bytes"]),
        "keys and values per token": report.size(said["kv_bytes_per_token"]),
    })
    if "checked" in said:
        print("\ncheck: ok, every checksum holds and every scale and value is finite")


def _head(said: dict[str, Any]) -> dict[str, str]:
    files = ", ".join(said["files"]) or "none: works on token ids only"
    common = {"files": files, "end-of-turn ids": ", ".join(map(str, said["eos_ids"])) or "none"}
    if said["kind"] == "pack":
        scales = {"scales": said["scales"]} if said["scales"] else {}
        return {"pack": said["path"], "size": report.size(said["file_bytes"]), "default format": said["format"], **scales,
                "seal": said["hash"], "written by": f"fermi-engine {said['engine_version']}", **common,
                "left out of the source": left_out(said["unused"])}
    return {"checkpoint": said["path"], "size": report.size(said["source_bytes"]), **common,
            "not used": left_out(said["unused"]),
            f"a {said['format']} pack of it": f"{report.size(said['file_bytes'])} (all sizes below are of that pack)"}


def _print_formats(said: dict[str, Any]) -> None:
    rows = [(name, row["tensors"], f"{row['weights']:,}", report.size(row["bytes"]))
            for name, row in said["formats"].items()]
    columns = ("format", "tensors", "weights", "size")
    report.table("", columns, rows, right=columns[1:])
