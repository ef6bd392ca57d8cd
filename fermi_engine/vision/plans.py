"""How large a model wants an image, in integers: sizes, slices, patch grids, tokens. The settings that decide it.

Both plans give what transformers 5.24's image processors give: Qwen2VLImageProcessorPil and MiniCPMV4_6ImageProcessorPil.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from fermi_engine.errors import ImageError

Grid = tuple[int, int]  # height, width
MAX_ASPECT = 200  # of Qwen's images
MAX_VIEW_PATCHES = 65536  # of one view: Qwen's largest image; MiniCPM's stay far below but for absurdly long ones


@dataclass(frozen=True)
class QwenImages:
    """Fields of a Qwen3.5/3.6 preprocessor_config.json, by default those released. Pixel limits count after resizing."""

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 65536
    max_pixels: int = 16777216
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def patches_per_token(self) -> int:
        """Patches that become one embedding."""
        return self.merge_size**2


@dataclass(frozen=True)
class MiniCpmImages:
    """Fields of a MiniCPM-V-4.6 preprocessor_config.json, by default those released."""

    patch_size: int = 14
    scale_resolution: int = 448
    max_slice_nums: int = 9
    slice_mode: bool = True
    downsample_mode: str = "16x"
    use_image_id: bool = True
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def patches_per_token(self) -> int:
        """Patches that become one embedding: merged once ("4x") or twice ("16x")."""
        return 4 if self.downsample_mode == "4x" else 16


ImageSettings = QwenImages | MiniCpmImages


class Resize(NamedTuple):
    """The whole image resized to height x width pixels, then cut into rows x columns equal tiles, row by row."""

    height: int
    width: int
    rows: int = 1
    columns: int = 1

    def grids(self, patch_size: int) -> list[Grid]:
        """Patches of each tile, (height, width)."""
        tile = self.height // self.rows // patch_size, self.width // self.columns // patch_size
        return [tile] * (self.rows * self.columns)


def plan(height: int, width: int, settings: ImageSettings, name: str = "image") -> tuple[Resize, ...]:
    """What becomes of an image of height x width pixels. Raises ImageError, naming it, for a shape the model does not take."""
    if isinstance(settings, QwenImages):
        steps = (_qwen(height, width, settings, name),)
    else:
        steps = _minicpm(height, width, settings)
    most = max(rows * columns for step in steps for rows, columns in step.grids(settings.patch_size))
    if most > MAX_VIEW_PATCHES:
        raise ImageError(f"{name} of {width} x {height} pixels would become a view of {most} patches, more than "
                         f"{MAX_VIEW_PATCHES}; it is too long and thin, cut it")
    return steps


def grids(steps: tuple[Resize, ...], settings: ImageSettings) -> list[Grid]:
    """Patch grids of all views in order."""
    return [grid for step in steps for grid in step.grids(settings.patch_size)]


def _qwen(height: int, width: int, s: QwenImages, name: str) -> Resize:
    aspect = max(height, width) / min(height, width)
    if aspect > MAX_ASPECT:
        raise ImageError(f"{name} is {width} x {height} pixels, one side {aspect:.0f} times the other; the model takes up "
                         f"to {MAX_ASPECT}, cut it")
    unit = s.patch_size * s.merge_size
    sides = [round(side / unit) * unit for side in (height, width)]
    if sides[0] * sides[1] > s.max_pixels:
        shrink = math.sqrt((height * width) / s.max_pixels)
        sides = [max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width)]
    elif sides[0] * sides[1] < s.min_pixels:
        grow = math.sqrt(s.min_pixels / (height * width))
        sides = [math.ceil(side * grow / unit) * unit for side in (height, width)]
    return Resize(*sides)


def _minicpm(height: int, width: int, s: MiniCpmImages) -> tuple[Resize, ...]:
    """An overview; where the image has more pixels than one view, slices of its own resizing after it."""
    slices = _slice_grid(height, width, s) if s.slice_mode else None
    if slices is None:
        return (Resize(*_fit(height, width, s, enlarge=True)),)
    rows, columns = slices
    tile = _fit(_multiple(height, rows) / rows, _multiple(width, columns) / columns, s, enlarge=True)
    return Resize(*_fit(height, width, s, enlarge=False)), Resize(tile[0] * rows, tile[1] * columns, rows, columns)


def _multiple(size: float, unit: int) -> int:
    """The multiple of `unit` nearest to `size`, half to even, at least one."""
    return max(round(size / unit) * unit, unit)


def _fit(height: float, width: float, s: MiniCpmImages, enlarge: bool) -> Grid:
    """About scale_resolution^2 pixels of the same shape, both sides whole tokens; smaller ones stay unless `enlarge`."""
    if enlarge or height * width > s.scale_resolution * s.scale_resolution:
        aspect = width / height
        height = int(s.scale_resolution / math.sqrt(aspect))
        width = int(height * aspect)
    unit = s.patch_size * math.isqrt(s.patches_per_token)
    return _multiple(height, unit), _multiple(width, unit)


def _slice_grid(height: int, width: int, s: MiniCpmImages) -> Grid | None:
    """Rows and columns of slices: about one a view's worth of pixels, their shape nearest to the image's."""
    wanted = min(math.ceil(width * height / (s.scale_resolution * s.scale_resolution)), s.max_slice_nums)
    if wanted <= 1:
        return None
    shape, best, least = math.log(width / height), (1, 1), math.inf
    for count in (wanted - 1, wanted, wanted + 1):
        if count == 1 or count > s.max_slice_nums:
            continue
        for rows in (n for n in range(1, count + 1) if count % n == 0):
            error = abs(shape - math.log(count // rows / rows))
            if error < least or (error == least and rows > best[0]):
                best, least = (rows, count // rows), error
    return best
