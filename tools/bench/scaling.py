"""How cost grows: time of a decoded token over the context, of a prefilled one over the prompt.

    python tools/bench/scaling.py PACK -o STEM     measures, writes STEM.json and draws STEM.svg
    python tools/bench/scaling.py STEM.json        draws it again

Contexts are synthetic (fermi_engine.bench.synthetic_context): only what a token costs after them is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fermi_engine import bench, report
from fermi_engine.cli.bench import parse_counts
from fermi_engine.config import EngineConfig
from fermi_engine.doctor import examine
from fermi_engine.engine import Engine
from fermi_engine.errors import FermiError

CONTEXTS, PROMPTS = "128,2048,8192,32768", "64,128,256,512,1024,2048,4096"
WIDTH, HEIGHT, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 960, 400, 70, 60, 370, 260
STYLE = ("text{font:12px sans-serif;fill:#222}.title{font-size:14px}.grid{stroke:#ddd}.axis{stroke:#222}"
         ".measured{stroke:#1f5fa8;fill:none;stroke-width:2}.point{fill:#1f5fa8}"
         ".roof{stroke:#b5541c;fill:none;stroke-width:1.5;stroke-dasharray:5 4}")

Point = tuple[float, float]


def measure(path: Path, contexts: tuple[int, ...], prompts: tuple[int, ...], decode: int, repeat: int,
            options: EngineConfig) -> dict[str, Any]:
    """Figures of `bench.measure`, and where they are from. Raises FermiError, also while a stage is red."""
    engine = Engine.load(path, config=options)
    bench.check_stages(sorted(set(engine.kernels.backends.values())))
    plan = bench.Plan(prefill=prompts, decode=decode, context=contexts, repeat=repeat)
    with report.progress("measuring", "runs") as progress:
        figures = bench.measure(engine, plan, progress)
    return {"cpu": examine().facts["CPU"], "backends": sorted(set(engine.kernels.backends.values())),
            "pack": engine.pack.source, "pack_bytes": engine.pack.mapped.size, "kv_format": options.kv_format, **figures}


def draw(figures: dict[str, Any]) -> str:
    """Both curves as SVG text."""
    best = max(read["bytes_per_s"] for read in figures["roofline"].values())
    decode = [(row["context"][0], 1000 * row["median_s"]) for row in figures["decode"]]
    roof = [(row["context"][0], 1000 * sum(row["bytes_per_token"].values()) / best) for row in figures["decode"]]
    prefill = [(row["tokens"], 1000 * row["median_s"] / row["tokens"]) for row in figures["prefill"]]
    heading = (f"{figures['cpu']}, {figures['threads']} threads, {'+'.join(figures['backends'])}, pack of "
               f"{report.size(figures['pack_bytes'])}, keys and values {figures['kv_format']}")
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">',
             f"<style>{STYLE}</style>", f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
             _text(LEFT, 20, heading),
             *_panel(LEFT, "decode: ms a token over the context", decode, roof),
             *_panel(LEFT + WIDTH // 2, "prefill: ms a token over the prompt", prefill, []),
             _text(LEFT, HEIGHT - 14, "dashed: bytes moved a token, at the fastest streaming read of the pack"), "</svg>"]
    return "\n".join(parts) + "\n"


def _panel(left: int, title: str, measured: Sequence[Point], roof: Sequence[Point]) -> list[str]:
    """Axes from zero up and, sideways, of equal steps for equal factors; the points with their values."""
    if not measured:
        return []
    top = max(y for _, y in (*measured, *roof)) * 1.1
    first = max(1.0, measured[0][0])
    span = math.log(max(measured[-1][0], first + 1) / first)

    def place(point: Point) -> Point:
        x = math.log(max(point[0], first) / first) / span
        return left + x * PLOT_WIDTH, TOP + PLOT_HEIGHT * (1 - point[1] / top)

    parts = [_text(left, TOP - 16, title, "title")]
    for y in _ticks(top):
        _, at = place((first, y))
        parts += [_line((left, at), (left + PLOT_WIDTH, at), "grid"), _text(left - 8, at + 4, f"{y:g}", anchor="end")]
    for point in measured:
        parts.append(_text(place(point)[0], TOP + PLOT_HEIGHT + 18, f"{point[0]:.0f}", anchor="middle"))
    corner = (left, TOP + PLOT_HEIGHT)
    parts += [_line(corner, (left + PLOT_WIDTH, corner[1]), "axis"), _line(corner, (left, TOP), "axis")]
    return parts + _curve(roof, place, "roof") + _curve(measured, place, "measured") + _values(measured, place)


def _ticks(top: float) -> list[float]:
    """Four to ten round values from zero up to `top`."""
    step = next(s * 10.0**e for e in range(-6, 9) for s in (1, 2, 5) if top / (s * 10.0**e) <= 8)
    return [round(i * step, 9) for i in range(int(top / step) + 1)]


def _curve(points: Sequence[Point], place: Callable[[Point], Point], style: str) -> list[str]:
    path = " ".join("{:.1f},{:.1f}".format(*place(point)) for point in points)
    return [f'<polyline class="{style}" points="{path}"/>'] if points else []


def _values(points: Sequence[Point], place: Callable[[Point], Point]) -> list[str]:
    parts = []
    for point in points:
        x, y = place(point)
        parts += [f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="3"/>',
                  _text(x, y - 8, f"{point[1]:.3g}", anchor="middle")]
    return parts


def _line(a: Point, b: Point, style: str) -> str:
    return f'<line class="{style}" x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}"/>'


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped}</text>'


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 2 for a mistake, told in one line."""
    parser = argparse.ArgumentParser(description="Measure and draw how cost grows with context and prompt.")
    parser.add_argument("source", type=Path, help="pack to measure, or a JSON file of figures to draw")
    parser.add_argument("-o", "--output", type=Path, metavar="STEM", default=Path(__file__).with_name("scaling"))
    parser.add_argument("--contexts", default=CONTEXTS)
    parser.add_argument("--prompts", default=PROMPTS)
    parser.add_argument("--decode", type=int, default=16, help="tokens at each context and repeat")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-format", default="f32")
    o = parser.parse_args(argv)
    try:
        if o.source.suffix == ".json":
            stem, figures = o.source.with_suffix(""), json.loads(o.source.read_text())
        else:
            stem, options = o.output, EngineConfig(threads=o.threads, kv_format=o.kv_format)
            figures = measure(o.source, parse_counts("--contexts", [o.contexts]), parse_counts("--prompts", [o.prompts]),
                              o.decode, o.repeat, options)
            stem.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
        stem.with_suffix(".svg").write_text(draw(figures))
    except FermiError as err:
        report.note(f"error: {err}")
        return 2
    print(f"{stem.with_suffix('.json')}, {stem.with_suffix('.svg')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
