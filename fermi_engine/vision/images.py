"""Image files to pixels, as transformers' image processors see them: upright, 8-bit RGB, transparency on white.

Pillow decodes (imported late). The orientation of EXIF is applied; anything with alpha or a transparent colour is laid on
white; of an animation the first frame counts. What Pillow would clip to white without a word is refused instead.
"""

from __future__ import annotations

import io
import os
import warnings
from typing import Any

import numpy as np

from fermi_engine.errors import ImageError
from fermi_engine.tokenizer import one_line

MAX_PIXELS = 89_478_485  # a quarter GiB of RGB, where Pillow begins to warn of decompression bombs
BACKGROUND = (255, 255, 255)
# Raster formats that Pillow decodes by itself: EPS would start another program, WMF the operating system's.
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "AVIF", "JPEG2000", "DIB", "TGA", "ICO", "PCX", "SGI", "QOI")
Source = str | os.PathLike[str] | bytes | np.ndarray


def load_pixels(source: Source, name: str | None = None) -> np.ndarray:
    """A file, the bytes of one, or pixels uint8 [height, width, 3] -> uint8 [height, width, 3]; `name` is for messages.

    Raises ImageError for what is no image of a known kind, is damaged, has more than MAX_PIXELS or samples that 8 bits do
    not hold.
    """
    if isinstance(source, np.ndarray):
        return _checked_pixels(source, name or "image")
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _decode(io.BytesIO(source), name or "image")
    path = os.fspath(source)
    if os.path.exists(path) and not os.path.isfile(path):
        raise ImageError(f"{path} is no file; give the path of an image")
    try:
        with open(path, "rb") as file:
            return _decode(file, name or path)
    except OSError as err:
        raise ImageError(f"cannot read {path}: {err.strerror}; give the path of an image") from None


def check_pixel_count(height: int, width: int, name: str) -> None:
    """Raises ImageError where an image of this size would fill the memory."""
    if height * width > MAX_PIXELS:
        raise ImageError(f"{name} has {width} x {height} pixels, more than the {MAX_PIXELS} that are decoded; scale it down")


def _checked_pixels(pixels: np.ndarray, name: str) -> np.ndarray:
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8 or 0 in pixels.shape:
        raise ImageError(f"{name} is an array {pixels.dtype} {list(pixels.shape)}, expected uint8 [height, width, 3]")
    check_pixel_count(*pixels.shape[:2], name)
    return np.ascontiguousarray(pixels)


def _decode(file: Any, name: str) -> np.ndarray:
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise ImageError("images need the 'pillow' package: pip install pillow") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of bombs, which check_pixel_count refuses, and of metadata that no one reads
            image = _open(Image, file)
            check_pixel_count(image.height, image.width, name)
            return _rgb(Image, _fits_bytes(ImageOps.exif_transpose(image), name))
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(f"{name} is no image of a kind that is read here ({', '.join(FORMATS)}), or damaged at its "
                         "beginning; convert it to PNG") from None
    except Image.DecompressionBombError as err:
        raise ImageError(f"{name}: {one_line(err)}; scale it down") from None
    except Exception as err:  # decoders of damaged data fail in any way
        raise ImageError(f"{name} cannot be decoded ({type(err).__name__}: {one_line(err)}); fetch or save it again") from None


def _open(pillow: Any, file: Any) -> Any:
    """With Pillow's five commonest decoders, then with all that this Pillow has."""
    pillow.preinit()
    try:
        return pillow.open(file, formats=[kind for kind in FORMATS if kind in pillow.OPEN])
    except OSError:
        pillow.init()
        file.seek(0)
        return pillow.open(file, formats=[kind for kind in FORMATS if kind in pillow.OPEN])


def _fits_bytes(image: Any, name: str) -> Any:
    """Refuse samples of 16 or 32 bits that Pillow's conversion clips."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        samples = np.asarray(image)
        whole = np.isfinite(samples) & (samples >= 0) & (samples <= 255)
        if not whole.all() or (samples != np.floor(samples)).any():
            raise ImageError(f"{name} is greyscale in mode {image.mode!r} with samples from {samples.min()} to "
                             f"{samples.max()}, which 8 bits do not hold; save it with 8 bits a sample")
    return image


def _rgb(pillow: Any, image: Any) -> np.ndarray:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        layer = image.convert("RGBA")
        image = pillow.alpha_composite(pillow.new("RGBA", layer.size, (*BACKGROUND, 255)), layer)
    return np.array(image.convert("RGB"))
