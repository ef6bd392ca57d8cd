"""Learning curves as a picture: `python tools/tiny_curves.py curve.tsv curves.png` draws what tools/train_tiny.py wrote."""

from __future__ import annotations

import csv
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1000, 420, 70, 220, 36, 44
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f",
           "#bcbd22", "#e377c2", "#000000")
Series = dict[str, list[tuple[float, float]]]


def read(path: Path) -> Series:
    """Series name -> (million tokens, value), in order."""
    found: Series = defaultdict(list)
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines, delimiter="\t"):
            found[row["series"]].append((float(row["tokens"]) / 1e6, float(row["value"])))
    return found


def draw(series: Series, path: Path) -> None:
    """Three panels: losses of what assistants say (by row length), held-out accuracy in bfloat16, and in q4_0."""
    said = {f"{name.partition('/')[2]} tokens": points for name, points in series.items() if name.startswith("said/")}
    panels = [("loss on answers, by row length", said, _log_scale(said))]
    for kind in ("bf16", "q4_0"):
        shares = {name.split("/")[1]: points for name, points in series.items() if name.endswith(f"/{kind}")}
        panels.append((f"held-out accuracy, {kind} weights", shares, (lambda v: v, [0.0, 0.25, 0.5, 0.75, 1.0])))
    image = Image.new("RGB", (WIDTH, HEIGHT * len(panels)), "white")
    last = max((points[-1][0] for points in series.values()), default=1.0)
    for i, (title, lines, scale) in enumerate(panels):
        _panel(ImageDraw.Draw(image), i * HEIGHT, title, lines, scale, last)
    image.save(path)


def _log_scale(series: Series) -> tuple[Callable[[float], float], list[float]]:
    """A map of values to 0..1 over whole powers of ten, and those powers."""
    values = [max(v, 1e-6) for points in series.values() for _, v in points] or [0.1, 1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    return lambda v: (math.log10(max(v, 1e-6)) - low) / (high - low), [10.0**p for p in range(low, high + 1)]


def _panel(canvas: ImageDraw.ImageDraw, top: int, title: str, lines: Series,
           scale: tuple[Callable[[float], float], list[float]], last: float) -> None:
    position, marks = scale
    font = ImageFont.load_default(13)
    x0, x1, y0, y1 = LEFT, WIDTH - RIGHT, top + HEIGHT - BOTTOM, top + TOP
    canvas.text((x0, top + 10), title, "black", font)
    for mark in marks:
        y = y0 + (y1 - y0) * position(mark)
        canvas.line([(x0, y), (x1, y)], "#dddddd")
        canvas.text((8, y - 8), f"{mark:g}", "black", font)
    for part in range(5):
        x = x0 + (x1 - x0) * part / 4
        canvas.text((x - 12, y0 + 6), f"{last * part / 4:.4g}", "black", font)
    canvas.text(((x0 + x1) / 2 - 50, y0 + 22), "million tokens", "black", font)
    for i, (name, points) in enumerate(sorted(lines.items())):
        colour = COLOURS[i % len(COLOURS)]
        path = [(x0 + (x1 - x0) * t / last, y0 + (y1 - y0) * position(v)) for t, v in points]
        canvas.line(path if len(path) > 1 else path * 2, colour, 2)
        canvas.line([(x1 + 12, y1 + 8 + 20 * i), (x1 + 32, y1 + 8 + 20 * i)], colour, 3)
        canvas.text((x1 + 38, y1 + 20 * i), name, "black", font)


def main(argv: Sequence[str]) -> int:
    """Command line."""
    if len(argv) != 2:
        print("usage: tiny_curves.py curve.tsv curves.png", file=sys.stderr)
        return 2
    draw(read(Path(argv[0])), Path(argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
