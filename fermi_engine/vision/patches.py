"""Pixels to what a vision tower takes: resized by Pillow, normalised, cut into patches in the tower's order."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from fermi_engine.errors import ImageError
from fermi_engine.vision.plans import Grid, ImageSettings, QwenImages, Resize, grids, plan


@dataclass(frozen=True)
class PreparedImage:
    """One image for the tower.

    patches: float32 [N, width], views end to end. Qwen: one view, patches in 2x2 blocks, each (channel, time, row, column)
        with the still image at both times. MiniCPM: the overview, then the slices row by row, patches in raster order,
        each (channel, row, column).
    grids: (height, width) in patches of each view; slices: rows and columns of slices, (0, 0) without.
    tokens: embeddings of each view, so many placeholders; digest: of pixels and settings, 32 bytes.
    """

    patches: np.ndarray
    grids: tuple[Grid, ...]
    slices: Grid
    tokens: tuple[int, ...]
    digest: bytes


def prepare(pixels: np.ndarray, settings: ImageSettings, name: str = "image") -> PreparedImage:
    """Pixels uint8 [height, width, 3] -> PreparedImage. Raises ImageError where the model does not take the size."""
    steps = plan(*pixels.shape[:2], settings, name)
    views = [view for step in steps for view in _views(pixels, step)]
    cut = _blocks if isinstance(settings, QwenImages) else _raster
    patches = np.concatenate([_normalised(cut(view, settings.patch_size), settings) for view in views])
    found = grids(steps, settings)
    tokens = tuple(height * width // settings.patches_per_token for height, width in found)
    return PreparedImage(patches, tuple(found), _slices(steps), tokens, _digest(pixels, views, settings))


def _slices(steps: tuple[Resize, ...]) -> Grid:
    return (steps[1].rows, steps[1].columns) if len(steps) > 1 else (0, 0)


def _views(pixels: np.ndarray, step: Resize) -> list[np.ndarray]:
    """Tiles uint8 [height, width, 3] of the resized image, row by row."""
    try:
        from PIL import Image
    except ImportError:
        raise ImageError("images need the 'pillow' package: pip install pillow") from None
    resized = np.asarray(Image.fromarray(pixels).resize((step.width, step.height), resample=Image.Resampling.BICUBIC))
    return [tile for band in np.split(resized, step.rows) for tile in np.split(band, step.columns, axis=1)]


def _raster(view: np.ndarray, patch: int) -> np.ndarray:
    """[height, width, 3] -> uint8 [N, 3, 1, patch, patch] in raster order."""
    height, width = view.shape[0] // patch, view.shape[1] // patch
    cells = view.reshape(height, patch, width, patch, 3).transpose(0, 2, 4, 1, 3)
    return cells.reshape(height * width, 3, 1, patch, patch)


def _blocks(view: np.ndarray, patch: int) -> np.ndarray:
    """[height, width, 3] -> uint8 [N, 3, 1, patch, patch], blocks of 2x2 in raster order, inside a block likewise."""
    height, width = view.shape[0] // patch, view.shape[1] // patch
    cells = view.reshape(height // 2, 2, patch, width // 2, 2, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return cells.reshape(height * width, 3, 1, patch, patch)


def _normalised(patches: np.ndarray, settings: ImageSettings) -> np.ndarray:
    """uint8 [N, 3, 1, patch, patch] -> float32 [N, 3 * times * patch * patch].

    sample * rescale_factor in double, rounded; less the mean, over the deviation in float, as transformers rounds. With 256
    samples that is a table of each channel.
    """
    scaled = (np.arange(256) * settings.rescale_factor).astype(np.float32)
    mean, std = (np.array(values, np.float32)[:, None] for values in (settings.image_mean, settings.image_std))
    table = (scaled - mean) / std
    times = settings.temporal_patch_size if isinstance(settings, QwenImages) else 1
    out = np.empty((len(patches), 3, times, *patches.shape[3:]), np.float32)
    for channel in range(3):
        out[:, channel] = table[channel][patches[:, channel]]
    return out.reshape(len(patches), -1)


def _digest(pixels: np.ndarray, views: list[np.ndarray], settings: ImageSettings) -> bytes:
    """Of every pixel as decoded, and as resized, which covers the resizing library's version, and of the settings."""
    described = [type(settings).__name__, dataclasses.asdict(settings), pixels.shape, [view.shape for view in views]]
    digest = blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=32)
    for part in (pixels, *views):
        digest.update(np.ascontiguousarray(part).data)
    return digest.digest()
