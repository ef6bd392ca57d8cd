"""Pictures of coloured shapes, described by numbers and drawn by NumPy alone: the same pixels on every machine.

A scene is made from a `random.Random`; sizes and places are whole pixels of the picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

COLOURS = {"red": (210, 40, 40), "green": (40, 150, 60), "blue": (45, 80, 200), "yellow": (240, 215, 50),
           "purple": (135, 55, 165), "orange": (240, 135, 35), "white": (250, 250, 250), "black": (20, 20, 20)}
BACKGROUNDS = ((128, 128, 128), (90, 95, 100), (185, 190, 195), (205, 190, 160), (150, 190, 215), (60, 70, 90))
TINT, SLOPE, NOISE = 14, 20, 8  # most that a shape's colour, a background from side to side, and each pixel stray
SIZES = (5600, 12500)  # pixels of the resized picture, about; what is drawn is larger or smaller by one of SCALES
SCALES = (0.9, 2.5)
ASPECT = 2.0  # the longest picture's sides
RADII = ((0.15, 0.24), (0.13, 0.17))  # of a shape, of the shorter side: among few, among many
MANY = 4  # shapes
GAP = 1.1  # centres of two shapes keep off by this times both radii, and by two pixels
TRIES = 60  # to place a shape before it is drawn smaller
Coordinates = tuple[np.ndarray, np.ndarray]


def _triangle(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (y <= 0.75) & (np.abs(x) * 1.75 <= y + 1)


def _cross(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x, y = np.abs(x), np.abs(y)
    return (np.minimum(x, y) <= 0.28) & (np.maximum(x, y) <= 0.95)


def _star(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Five points up: within one of ten wedges, on the near side of the line from a tip (1, 0) to a notch."""
    wedge = math.pi / 5
    angle = np.abs((np.arctan2(x, -y) + wedge) % (2 * wedge) - wedge)
    radius = np.hypot(x, y)
    notch = 0.45 * math.cos(wedge), 0.45 * math.sin(wedge)
    return (notch[0] - 1) * radius * np.sin(angle) - notch[1] * (radius * np.cos(angle) - 1) >= 0


SHAPES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "circle": lambda x, y: x * x + y * y <= 1,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) <= 0.85,
    "triangle": _triangle,
    "cross": _cross,
    "ring": lambda x, y: (x * x + y * y <= 1) & (x * x + y * y >= 0.3),
    "star": _star,
}
PLURALS = {kind: f"{kind}es" if kind.endswith("s") else f"{kind}s" for kind in SHAPES}


@dataclass(frozen=True)
class Shape:
    """One shape: centre and radius in pixels, the name of its colour and the colour itself."""

    kind: str
    colour: str
    rgb: tuple[int, int, int]
    x: int
    y: int
    radius: int


@dataclass(frozen=True)
class Scene:
    """A picture: sides in pixels, background at its left and at its right, most that noise adds, shapes in no order."""

    height: int
    width: int
    left: tuple[int, int, int]
    right: tuple[int, int, int]
    noise: int
    noise_seed: int
    shapes: tuple[Shape, ...]

    def cell(self, shape: Shape) -> int:
        """Which of 3 x 3 fields of the picture a shape stands in, 0..8."""
        return 3 * (3 * shape.y // self.height) + 3 * shape.x // self.width

    def pixels(self) -> np.ndarray:
        """uint8 [height, width, 3]."""
        across = np.linspace(0, 1, self.width)[:, None]
        row = np.array(self.left) * (1 - across) + np.array(self.right) * across
        canvas = np.broadcast_to(np.rint(row).astype(np.int16), (self.height, self.width, 3)).copy()
        for shape in self.shapes:
            top, low = max(0, shape.y - shape.radius), shape.y + shape.radius + 1
            left, end = max(0, shape.x - shape.radius), shape.x + shape.radius + 1
            part = canvas[top:low, left:end]
            y, x = ((np.arange(n) + first - centre) / shape.radius
                    for n, first, centre in zip(part.shape, (top, left), (shape.y, shape.x), strict=False))
            part[SHAPES[shape.kind](*np.meshgrid(x, y))] = shape.rgb
        noise = np.frombuffer(Random(self.noise_seed).randbytes(canvas.size), np.uint8).astype(np.int16)
        canvas += (noise % (2 * self.noise + 1) - self.noise).reshape(canvas.shape)
        return np.clip(canvas, 0, 255).astype(np.uint8)


def scene(rng: Random, wanted: Sequence[tuple[str, str]]) -> Scene:
    """A picture that shows `wanted`, kinds and colours, at drawn places and of drawn sizes."""
    area = rng.uniform(*SIZES)
    aspect, scale = ASPECT ** rng.uniform(-1, 1), SCALES[0] * (SCALES[1] / SCALES[0]) ** rng.random()
    height, width = round(scale * math.sqrt(area / aspect)), round(scale * math.sqrt(area * aspect))
    shapes: list[Shape] = []
    for kind, colour in wanted:
        x, y, radius = _place(rng, height, width, shapes, RADII[len(wanted) >= MANY])
        shapes.append(Shape(kind, colour, _strayed(rng, COLOURS[colour], TINT), x, y, radius))
    left = rng.choice(BACKGROUNDS)
    right = _strayed(rng, left, SLOPE) if rng.random() < 0.5 else left
    noise = rng.randrange(NOISE + 1) if rng.random() < 0.5 else 0
    return Scene(height, width, left, right, noise, rng.getrandbits(32), tuple(shapes))


def _strayed(rng: Random, rgb: tuple[int, int, int], most: int) -> tuple[int, int, int]:
    return tuple(min(255, max(0, value + rng.randint(-most, most))) for value in rgb)


def _place(rng: Random, height: int, width: int, others: Sequence[Shape], radii: tuple[float, float]) -> tuple[int, int, int]:
    """Centre and radius of a shape that lies in the picture and touches none of `others`."""
    radius = min(height, width) * rng.uniform(*radii)
    while True:
        r = math.ceil(radius)
        for _ in range(TRIES):
            x, y = rng.randint(r, width - 1 - r), rng.randint(r, height - 1 - r)
            if all(math.hypot(x - o.x, y - o.y) > GAP * (r + o.radius) + 2 for o in others):
                return x, y, r
        radius *= 0.9
