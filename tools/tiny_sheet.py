"""A picture of held-out pictures with question and right answer: `python tools/tiny_sheet.py OUT.png`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fermi_engine import report
from tools.tiny_image_tasks import ABOUT, TWO, drawn
from tools.tiny_tasks import Sample

SEED, COLOURS = 1, 128  # the samples that tools/tiny_accuracy.py asks
COLUMNS, CELL, PICTURE, TEXT, MARGIN = 4, 214, 120, 44, 8  # pixels


def sheet(samples: Sequence[Sequence[Sample]]) -> Image.Image:
    """Rows of samples; those of two pictures take two cells."""
    image = Image.new("RGB", (COLUMNS * CELL + MARGIN, len(samples) * (PICTURE + TEXT) + MARGIN), "white")
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default(11)
    for row, line in enumerate(samples):
        top, cell = MARGIN + row * (PICTURE + TEXT), 0
        for sample in line:
            canvas.text((MARGIN + cell * CELL, top), sample.messages[-1]["content"][-1]["text"], "black", font)
            canvas.text((MARGIN + cell * CELL, top + 15), sample.expected, "#1f5fa8", font)
            for view in sample.images:
                picture = Image.fromarray(view.pixels())
                picture.thumbnail((CELL - MARGIN, PICTURE - MARGIN))
                image.paste(picture, (MARGIN + cell * CELL, top + TEXT - MARGIN))
                cell += 1
    return image


def main(argv: Sequence[str]) -> int:
    """Command line; 2 for a mistake, told in one line."""
    if len(argv) != 1:
        print("usage: tiny_sheet.py OUT.png", file=sys.stderr)
        return 2
    rows = [[drawn(task, "held", SEED, i) for i in range(COLUMNS)] for task in ABOUT]
    rows += [[drawn(TWO, "held", SEED, i) for i in (2 * k, 2 * k + 1)] for k in range(2)]
    try:
        sheet(rows).quantize(COLOURS).save(argv[0], optimize=True)
    except (OSError, ValueError) as err:  # ValueError: the name ends like no format of Pillow's
        report.note(f"error: {argv[0]}: {getattr(err, 'strerror', None) or err}; give a file to write, OUT.png")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
