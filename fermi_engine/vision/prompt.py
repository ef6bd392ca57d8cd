"""Images inside a prompt: the tokens that stand for one, and the positions of text around them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fermi_engine.errors import RequestError
from fermi_engine.vision.patches import PreparedImage
from fermi_engine.vision.plans import Grid, ImageSettings, MiniCpmImages

IMAGE_PAD = "<|image_pad|>"


def placeholder(image: PreparedImage, settings: ImageSettings, index: int) -> str:
    """Text that takes the place of one `<|image_pad|>` of the chat template: as many as the image has embeddings.

    MiniCPM marks views and numbers images (`index` counts from 0 in a prompt); rows of slices stand on lines of their own.
    """
    if not isinstance(settings, MiniCpmImages):
        return IMAGE_PAD * image.tokens[0]
    number = f"<image_id>{index}</image_id>" if settings.use_image_id else ""
    tiles = [f"<slice>{IMAGE_PAD * count}</slice>" for count in image.tokens[1:]]
    rows, columns = image.slices
    lines = ["".join(tiles[row * columns:(row + 1) * columns]) for row in range(rows)]
    return f"{number}<image>{IMAGE_PAD * image.tokens[0]}</image>" + "\n".join(lines)


def expand(ids: Sequence[int], image_token_id: int, replacements: Sequence[Sequence[int]]) -> list[int]:
    """Prompt ids with the ids of each image in place of its one image token.

    Raises RequestError where image tokens and images differ in number.
    """
    marks = sum(token == image_token_id for token in ids)
    if marks != len(replacements):
        raise RequestError(f"the prompt has {marks} places for images (token {image_token_id}) and {len(replacements)} "
                           "images came with it; give one image for each place")
    images = iter(replacements)
    return [token for given in ids for token in (next(images) if given == image_token_id else (given,))]


def image_slots(ids: np.ndarray, image_token_id: int, tokens: int) -> np.ndarray:
    """Where in ids [T] the `tokens` embeddings of all images go: int64 [tokens], rising.

    Raises RequestError where the prompt has another number of places.
    """
    slots = np.flatnonzero(np.asarray(ids) == image_token_id)
    if len(slots) != tokens:
        raise RequestError(f"the prompt has {len(slots)} image tokens ({image_token_id}), its images have {tokens} "
                           "embeddings; let the engine expand the places of images")
    return slots


def text_positions(count: int, start: int) -> np.ndarray:
    """Positions of `count` tokens without images, or of any tokens of MiniCPM: int32 [3, count], alike on all axes."""
    return np.broadcast_to(np.arange(start, start + count, dtype=np.int32), (3, count)).copy()


def mrope_positions(ids: Sequence[int], image_token_id: int, grids: Sequence[Grid], start: int = 0) -> tuple[np.ndarray, int]:
    """ids [T] of a prompt, grids (height, width) in patches of its images -> positions int32 [3, T] (time, height, width),
    and the position of the token that follows.

    Text moves all three axes by one. An image of h x w tokens stands at (p, p + row, p + column) in raster order, the text
    behind it at p + max(h, w): Qwen2-VL (arXiv 2409.12191), section 2.1. Raises RequestError where image tokens and grids
    do not fit each other.
    """
    sides = [(height // 2, width // 2) for height, width in grids]
    slots = image_slots(np.asarray(ids), image_token_id, sum(h * w for h, w in sides))
    parts, done, used = [], 0, 0
    for h, w in sides:
        first = int(slots[used])
        if slots[used + h * w - 1] != first + h * w - 1:
            raise RequestError(f"an image of {h * w} tokens is broken up by text at token {first}; its tokens go in a row")
        parts.append(text_positions(first - done, start))
        start += first - done
        parts.append(start + _raster_places(h, w))
        start, done, used = start + max(h, w), first + h * w, used + h * w
    parts.append(text_positions(len(ids) - done, start))
    return np.concatenate(parts, axis=1), start + len(ids) - done


def _raster_places(height: int, width: int) -> np.ndarray:
    """(0, row, column) of each cell: int32 [3, height * width]."""
    row, column = np.divmod(np.arange(height * width, dtype=np.int32), np.int32(width))
    return np.stack([np.zeros_like(row), row, column])
