"""Draws a GPU prefill's timeline as an SVG picture: copies above, kernels below, on the device's clock.

    python tools/lab/timeline_svg.py --model PACK [--tokens 947] [--device cuda|emulated] [--vram BYTES] OUT.svg
    python tools/lab/timeline_svg.py --spans SPANS.json OUT.svg

The first form runs the prefill itself; on the emulated device the clock is that of a simulated C2075. SPANS.json is a list of
[label, engine, begin_s, end_s], as tools/lab/hybrid_h200.py writes it.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fermi_engine import report
from fermi_engine.config import EngineConfig
from fermi_engine.engine import Engine
from fermi_engine.errors import FermiError
from fermi_engine.gpu.prefill import HybridPrefill
from fermi_engine.kernels.gpu import Span, open_device
from fermi_engine.state import HybridState

WIDTH, LEFT, LANE, GAP, TOP = 1400, 90, 46, 14, 40  # pixels
LANES = (("h2d", "to device"), ("compute", "kernels"), ("d2h", "to host"))
KINDS = (  # beginning of a label, colour, name in the legend
    (("experts",), "#d95f02", "experts"), (("dense",), "#e6ab02", "dense weights"),
    (("grouped_gemm",), "#1b9e77", "expert products"), (("gemm", "sgemm"), "#66a61e", "dense products"),
    (("attention", "kv_append", "rope"), "#7570b3", "attention"), (("gdn", "conv1d"), "#e7298a", "delta rule"),
    (("",), "#888888", "other"),
)
MERGED = 0.4  # pixels; spans of one colour that lie closer are drawn as one

Row = tuple[str, str, float, float]  # label, engine, begin_s, end_s


def rows_of(spans: Sequence[Span]) -> list[Row]:
    """What the picture needs of a trace."""
    return [(span.label, span.engine, span.begin_s, span.end_s) for span in spans]


def draw(rows: Sequence[Row], title: str) -> str:
    """The picture as SVG text. ValueError without rows."""
    if not rows:
        raise ValueError("an empty timeline")
    length = max(end for *_, end in rows)
    scale = (WIDTH - LEFT - 10) / length
    lanes = [lane for lane in LANES if any(row[1] == lane[0] for row in rows)]
    height = TOP + len(lanes) * (LANE + GAP) + 60
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
             'font-family="sans-serif" font-size="12">',
             f'<rect width="{WIDTH}" height="{height}" fill="white"/>', f'<text x="{LEFT}" y="20">{html.escape(title)}</text>']
    for i, (engine, name) in enumerate(lanes):
        y = TOP + i * (LANE + GAP)
        parts.append(f'<text x="6" y="{y + LANE / 2 + 4}">{name}</text>')
        parts += [_box(LEFT + begin * scale, y, (end - begin) * scale, colour, text)
                  for colour, text, begin, end in _merged([row for row in rows if row[1] == engine], MERGED / scale)]
    return "\n".join([*parts, *_axis(length, scale, height), *_legend(rows, height), "</svg>"])


def _merged(rows: list[Row], apart_s: float) -> list[tuple[str, str, float, float]]:
    """(colour, tooltip, begin, end), neighbours of one colour as one."""
    merged: list[tuple[str, str, float, float]] = []
    for label, _, begin, end in sorted(rows, key=lambda row: row[2]):
        colour = _kind(label)[1]
        if merged and merged[-1][0] == colour and begin - merged[-1][3] < apart_s:
            merged[-1] = colour, merged[-1][1], merged[-1][2], max(end, merged[-1][3])
        else:
            merged.append((colour, label, begin, end))
    return merged


def _kind(label: str) -> tuple[tuple[str, ...], str, str]:
    return next(kind for kind in KINDS if label.startswith(kind[0]))


def _box(x: float, y: float, width: float, colour: str, text: str) -> str:
    return (f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.3):.2f}" height="{LANE}" fill="{colour}">'
            f"<title>{html.escape(text)}</title></rect>")


def _axis(length: float, scale: float, height: int) -> list[str]:
    step = 10 ** np.floor(np.log10(length))
    step = step / 5 if length / step < 2 else step / 2 if length / step < 5 else step
    unit, factor = ("s", 1.0) if length >= 1 else ("ms", 1e3) if length >= 1e-3 else ("us", 1e6)
    parts = []
    for i in range(int(length / step) + 1):
        x = LEFT + i * step * scale
        parts.append(f'<path d="M{x:.1f} {TOP - 8}V{height - 55}" stroke="#ccc" stroke-width="0.5"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 42}" text-anchor="middle">{i * step * factor:.3g} {unit}</text>')
    return parts


def _legend(rows: Sequence[Row], height: int) -> list[str]:
    parts, x = [], LEFT
    for kind in KINDS:
        seconds = sum(end - begin for label, _, begin, end in rows if _kind(label) is kind)
        if seconds:
            text = f"{kind[2]} {1e3 * seconds:.3g} ms"
            parts.append(f'<rect x="{x}" y="{height - 24}" width="12" height="12" fill="{kind[1]}"/>')
            parts.append(f'<text x="{x + 16}" y="{height - 14}">{text}</text>')
            x += 40 + 7 * len(text)
    return parts


def run(model: Path, tokens: int, device: str, vram: int | None) -> tuple[list[Row], str]:
    """A prefill of random ids, its second: the first also makes kernels ready and locks pages."""
    engine = Engine.load(model, config=EngineConfig(activations="f32"))
    prefill = HybridPrefill(open_device(device), engine.pack, engine.decoder, vram, timing=True)
    ids = np.random.default_rng(0).integers(0, engine.config.vocab_size, tokens).astype(np.int32)
    for _ in range(2):
        prefill.run(ids, HybridState.fresh(engine.config, engine.options.kv_block))
    return rows_of(prefill.last.spans), f"{prefill.device.name}: {prefill.last.line()}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a pack or checkpoint directory")
    parser.add_argument("--spans", type=Path, help="a stored timeline in place of a run")
    parser.add_argument("--tokens", type=int, default=947)
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--vram", type=int, help="bytes")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    if (args.model is None) == (args.spans is None):
        parser.error("give one of --model and --spans")
    try:
        rows, title = (json.loads(args.spans.read_text()), args.spans.stem) if args.spans else \
            run(args.model, args.tokens, args.device, args.vram)
    except FermiError as err:
        report.note(f"error: {err}")
        return 2
    args.out.write_text(draw(rows, title))
    report.note(title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
