"""What formats cost the small trained model, and which tensors: tables, figures as JSON, and a picture.

    python tools/tiny_quality.py [-o STEM]       measures, writes STEM.json and STEM.svg, prints tables as Markdown
    python tools/tiny_quality.py STEM.json       draws and prints again

Held-out chats judge, chats of the training part calibrate. The `moved` rows are a control: this model was trained to be rounded
by plain Q4_0, so each of its weights is moved by up to half of a plain step first, and the moved model is the base.
"""

from __future__ import annotations

import argparse
import html
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fermi_engine.checkpoint import Checkpoint
from fermi_engine.cli.evaluate import Part, measured, mixed, parts_of
from fermi_engine.compression.calibrate import Request, calibrate
from fermi_engine.compression.moments import Moments
from fermi_engine.compression.scales import Scales
from fermi_engine.config import EngineConfig
from fermi_engine.convert import convert
from fermi_engine.engine import Engine
from fermi_engine.quality.evaluate import Model, evaluate
from fermi_engine.quality.measures import summary
from fermi_engine.quality.resume import Resume
from tools.tiny_quantise import as_q4_0, quantised_names
from tools.tiny_tasks import Encoder
from tools.tiny_text import TINY, write

OPTIONS = EngineConfig(threads=1)
EACH, CALIBRATION = 16, 24  # chats of each task
PRESET = "sensitive=5%"
WIDTH, LEFT, ROW, TOP, PLOT = 860, 330, 22, 60, 420  # pixels
SERIES = (("q4_0", "#b5541c"), ("q4_0, fitted", "#1f5fa8"))
STYLE = "text{font:12px sans-serif;fill:#222}.title{font-size:14px}.grid{stroke:#ddd}.axis{stroke:#222}"

Row = dict[str, Any]


def formats(checkpoint: Path, moments: Path) -> dict[str, Callable[[Path], Path]]:
    """Name of each kind of pack, and what writes it to a path."""
    held, c = Moments(moments), Checkpoint.open(checkpoint).config
    fitted = Scales("mse", lambda name, expert: held.of(name, c, expert))
    kinds: dict[str, dict[str, Any]] = {
        "f32": {"format": "f32"}, "q8_0": {"format": "q8_0"}, "q4_0": {}, "q4_0, mse": {"scales": Scales("mse")},
        "q4_0, fitted": {"scales": fitted}, f"q4_0, {PRESET}": {"rules": PRESET},
        f"q4_0, fitted, {PRESET}": {"scales": fitted, "rules": PRESET}}
    return {name: partial(_convert, checkpoint, options) for name, options in kinds.items()}


def _convert(checkpoint: Path, options: dict[str, Any], path: Path) -> Path:
    return convert(checkpoint, path, **options)


def measure(checkpoint: Path, folder: Path, apart: Sequence[str] = ("class", "kind")) -> dict[str, Any]:
    """All figures of one checkpoint against its own f32 pack; apart: how its tensors are told apart."""
    encoder = Encoder.from_directory(checkpoint)
    train = write(folder / "train.jsonl", encoder, "train", 3, CALIBRATION)
    held = write(folder / "held.jsonl", encoder, "held", 7, EACH)
    pieces = [np.array(json.loads(line)["ids"], np.int32) for line in held.read_text().splitlines()]
    base = convert(checkpoint, folder / f"{checkpoint.name}.base.pack", "f32")
    about = calibrate(Request(base, [train], folder / "moments", options=OPTIONS, overwrite=True))
    kinds = formats(checkpoint, folder / "moments")
    paths = {name: make(folder / f"{checkpoint.name}.{i}.pack") for i, (name, make) in enumerate(kinds.items())}
    engines = {name: Engine.load(path, config=OPTIONS) for name, path in paths.items()}
    compare = partial(evaluate, base=Model.of(engines["f32"]), windows=pieces, resume=Resume(None, ""))
    found = compare({name: Model.of(engine) for name, engine in engines.items()})
    rows = [{"format": name, "bytes": paths[name].stat().st_size, **summary(records)} for name, records in found.items()]
    return {"calibration_tokens": about["tokens"], "windows": len(pieces), "formats": rows,
            **{by: {name: _by(engines[name], engines["f32"], by, compare) for name, _ in SERIES} for by in apart}}


def _by(engine: Engine, base: Engine, by: str, compare: Callable[..., Any]) -> list[Row]:
    """Loss of each part of a model, put into the base alone."""
    found: dict[str, Part] = parts_of(engine, base, by)
    records = compare({name: mixed(base, engine, part) for name, part in found.items()})
    return [{"part": name, "weights": part.weights, "bytes": part.bytes, **summary(records[name])}
            for name, part in found.items()]


def moved(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint with every weight that q4_0 rounds moved by up to half of its plain step, uniformly."""
    shutil.copytree(checkpoint, folder)
    shapes = {name: info.shape for name, info in Checkpoint.open(checkpoint).tensors.items()}
    sources = {info.source: name for name, info in Checkpoint.open(checkpoint).tensors.items()}
    generator = torch.Generator().manual_seed(1)
    held = load_file(folder / "model.safetensors")
    for source, name in sources.items():
        if name in quantised_names(shapes):
            w = held[source].float()
            step = (as_q4_0(w).unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 8).expand(*w.shape[:-1], -1, 32)
            noise = torch.rand(w.shape, generator=generator) - 0.5
            held[source] = (w + noise * step.flatten(-2)).to(held[source].dtype)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return folder


def format_table(rows: Sequence[Row]) -> list[str]:
    """Markdown: a row for each format."""
    lines = ["| pack | size | perplexity | KL mean | median | p99 | back: mean | same top-1 |", "| --- " * 8 + "|"]
    for row in rows:
        kl, back = row["kl"], row["kl_back"]
        lines.append(f"| {row['format']} | {row['bytes'] / 1e6:.2f} MB | {row['ppl']:.4f} | "
                     f"{measured(kl['mean'], kl['error'])} | {kl['median']:.2g} | {kl['p99']:.2g} | "
                     f"{measured(back['mean'], back['error'])} | {row['top1']:.2%} ± {row['top1_error']:.2%} |")
    return lines


def part_table(found: dict[str, list[Row]]) -> list[str]:
    """Markdown: what each part loses alone, and a weight of it."""
    lines = ["| part | weights | KL mean, q4_0 | of it a weight | fitted |", "| --- " * 5 + "|"]
    fitted = {row["part"]: row["kl"]["mean"] for row in found[SERIES[1][0]]}
    for row in sorted(found[SERIES[0][0]], key=lambda row: -row["kl"]["mean"]):
        kl = row["kl"]
        lines.append(f"| {row['part']} | {row['weights']:,} | {measured(kl['mean'], kl['error'])} | "
                     f"{kl['mean'] / row['weights']:.1e} | {fitted[row['part']]:.2e} |")
    return lines


def draw(found: dict[str, Any]) -> str:
    """Loss by class and by kind as bars, SVG text."""
    groups = [[row["part"] for row in sorted(found[by][SERIES[0][0]], key=lambda row: -row["kl"]["mean"])]
              for by in ("class", "kind")]
    means = {(name, row["part"]): row["kl"]["mean"] for name, _ in SERIES for by in ("class", "kind")
             for row in found[by][name]}
    scale = PLOT / (max(means.values()) * 1.02)
    height = TOP + ROW * (sum(map(len, groups)) + 1) + 50
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">',
             f"<style>{STYLE}</style>", f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
             _text(10, 22, "What each part loses alone in four bits: mean KL divergence from the f32 model, nats", "title")]
    y = TOP
    for by, group in zip(("by class", "by kind"), groups, strict=True):
        lines.append(_text(10, y + 15, by, "title"))
        for part in group:
            lines.append(_text(LEFT - 8, y + 15, part, anchor="end"))
            for i, (name, colour) in enumerate(SERIES):
                value = means[name, part]
                lines.append(f'<rect x="{LEFT}" y="{y + 2 + 9 * i}" width="{value * scale:.1f}" height="8" fill="{colour}">'
                             f"<title>{html.escape(f'{part}, {name}: {value:.2e}')}</title></rect>")
            lines.append(_text(LEFT + _longest(means, part) * scale + 6, y + 15, f"{means[SERIES[0][0], part]:.2g}"))
            y += ROW
        y += ROW
    lines.append(f'<path class="axis" d="M{LEFT} {TOP - 4}V{y - ROW}"/>')
    for i, (name, colour) in enumerate(SERIES):
        lines += [f'<rect x="{LEFT + 160 * i}" y="{y}" width="12" height="12" fill="{colour}"/>',
                  _text(LEFT + 160 * i + 18, y + 11, name)]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _longest(means: dict[tuple[str, str], float], part: str) -> float:
    """Where the longer bar of a part ends."""
    return max(means[name, part] for name, _ in SERIES)


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x:.1f}" y="{y}" text-anchor="{anchor}">{html.escape(text)}</text>'


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, nargs="?", default=TINY, help="checkpoint, or a JSON file of figures")
    parser.add_argument("-o", "--output", type=Path, metavar="STEM", default=Path(__file__).with_name("lab") / "tiny_quality")
    o = parser.parse_args()
    if o.source.suffix == ".json":
        found, stem = json.loads(o.source.read_text()), o.source.with_suffix("")
    else:
        stem = o.output
        with tempfile.TemporaryDirectory() as folder:
            found = measure(o.source, Path(folder))
            found["moved"] = measure(moved(o.source, Path(folder) / "moved"), Path(folder), ())["formats"]
        stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="ascii")
    stem.with_suffix(".svg").write_text(draw(found), encoding="utf-8")
    for lines in (format_table(found["formats"]), part_table(found["class"]), part_table(found["kind"]),
                  ["moved weights:", *format_table(found["moved"])]):
        print("\n".join(lines), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
