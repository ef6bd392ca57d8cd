"""Decoding of image files against Pillow's own conversions as transformers applies them, and what is refused."""

from __future__ import annotations

import io
import random
import struct
import subprocess
import sys
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers import image_transforms

from fermi_engine.errors import ImageError
from fermi_engine.vision import images

WIDTH, HEIGHT = 7, 5


def load(data: bytes, name: str | None = None) -> np.ndarray:
    """Without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return images.load_pixels(data, name)


def noise(*shape: int, seed: int = 0, high: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, high, shape).astype(np.uint8)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def as_transformers(data: bytes) -> np.ndarray:
    """Upright as load_image makes it, RGB as its image processors make it of what Pillow opens."""
    with Image.open(io.BytesIO(data)) as image:
        return image_transforms.convert_to_rgb(ImageOps.exif_transpose(image), return_numpy=True)


def palette(alpha: bool) -> Image.Image:
    image = Image.fromarray(noise(HEIGHT, WIDTH, 3)).quantize(16)
    if alpha:
        image.info["transparency"] = bytes(range(0, 256, 16))
    return image


def modes() -> dict[str, bytes]:
    rgb, rgba = Image.fromarray(noise(HEIGHT, WIDTH, 3)), Image.fromarray(noise(HEIGHT, WIDTH, 4))
    return {
        "1.png": encoded(rgb.convert("1"), "PNG"),
        "L.png": encoded(rgb.convert("L"), "PNG"),
        "L-transparent.png": encoded(rgb.convert("L"), "PNG", transparency=int(np.array(rgb.convert("L"))[0, 0])),
        "LA.png": encoded(rgba.convert("LA"), "PNG"),
        "RGB.png": encoded(rgb, "PNG"),
        "RGB-transparent.png": encoded(rgb, "PNG", transparency=tuple(np.array(rgb)[1, 1].tolist())),
        "RGBA.png": encoded(rgba, "PNG"),
        "P.png": encoded(palette(False), "PNG"),
        "P-alpha.png": encoded(palette(True), "PNG", transparency=bytes(range(0, 256, 16))),
        "I16-dark.png": encoded(Image.fromarray(noise(HEIGHT, WIDTH).astype(np.uint16)), "PNG"),
        "RGB.jpg": encoded(rgb, "JPEG"),
        "L.jpg": encoded(rgb.convert("L"), "JPEG"),
        "CMYK.jpg": encoded(rgb.convert("CMYK"), "JPEG"),
        "CMYK.tif": encoded(rgb.convert("CMYK"), "TIFF"),
        "LAB.tif": encoded(Image.fromarray(noise(HEIGHT, WIDTH, 3), "LAB"), "TIFF"),
        "YCbCr.tif": encoded(rgb.convert("YCbCr"), "TIFF"),
        "F-dark.tif": encoded(Image.fromarray(noise(HEIGHT, WIDTH).astype(np.float32)), "TIFF"),
        "I-dark.tif": encoded(Image.fromarray(noise(HEIGHT, WIDTH).astype(np.int32)), "TIFF"),
        "RGBA.tif": encoded(rgba, "TIFF"),
        "RGB.bmp": encoded(rgb, "BMP"),
        "RGBA.webp": encoded(rgba, "WEBP", lossless=True, exact=True),
        "RGBA.tga": encoded(rgba, "TGA"),
        "RGB.ppm": encoded(rgb, "PPM"),
        "RGB.jp2": encoded(rgb, "JPEG2000"),
        "RGBA.ico": encoded(Image.fromarray(noise(16, 16, 4)), "ICO"),
        "P.gif": encoded(palette(False), "GIF"),
        "P-transparent.gif": encoded(palette(False), "GIF", transparency=3),
    }


MODES = modes()


@pytest.mark.parametrize("name", MODES)
def test_every_colour_mode_is_transformers(name, tmp_path):
    expected = as_transformers(MODES[name])
    found = images.load_pixels(MODES[name])
    assert found.dtype == np.uint8
    assert np.array_equal(found, expected)
    assert found.std() > 5
    path = tmp_path / "image"  # the kind is what the bytes say, not the name
    path.write_bytes(MODES[name])
    assert np.array_equal(images.load_pixels(path), expected)


def test_alpha_lies_on_white():
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[0, 0], rgba[0, 1], rgba[1, 0] = (10, 20, 30, 255), (10, 20, 30, 0), (0, 0, 0, 128)
    found = images.load_pixels(encoded(Image.fromarray(rgba), "PNG"))
    assert found.tolist() == [[[10, 20, 30], [255] * 3], [[127] * 3, [255] * 3]]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_every_orientation_stands_upright(kind, orientation):
    image = Image.fromarray(noise(HEIGHT, WIDTH, 3))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, kind, exif=exif)
    found = images.load_pixels(data)
    assert np.array_equal(found, as_transformers(data))
    assert found.shape == ((WIDTH, HEIGHT, 3) if orientation > 4 else (HEIGHT, WIDTH, 3))
    if kind == "PNG":  # by hand: transposing first turns 5..8 into 1..4
        upright = np.array(image).transpose(1, 0, 2) if orientation > 4 else np.array(image)
        rows, columns = [(1, 1), (1, -1), (-1, -1), (-1, 1)][(orientation - 1) % 4]
        assert np.array_equal(found, upright[::rows, ::columns])


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_unknown_orientation_is_none(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(noise(HEIGHT, WIDTH, 3))
    assert np.array_equal(images.load_pixels(encoded(image, "PNG", exif=exif)), np.array(image))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_frame_of_an_animation(kind):
    frames = [Image.fromarray(noise(HEIGHT, WIDTH, 3, seed=seed)) for seed in range(3)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    found = images.load_pixels(data)
    assert np.array_equal(found, as_transformers(data))
    if kind != "GIF":  # whose palette is another
        assert np.array_equal(found, np.array(frames[0]))


def test_sixteen_bits_of_colour_keep_their_upper_half():
    """Pillow reads such a PNG as 8-bit RGB."""
    samples = np.random.default_rng(0).integers(0, 65536, (HEIGHT, WIDTH, 3))
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    data = png(WIDTH, HEIGHT, rows, depth=16, colour=2)
    assert np.array_equal(images.load_pixels(data), samples >> 8)
    assert np.array_equal(images.load_pixels(data), as_transformers(data))


def png(width: int, height: int, rows: bytes, depth: int = 8, colour: int = 0) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("samples", [np.array([[256, 7]], np.uint16), np.array([[-1, 7]], np.int32),
                                     np.array([[0.5, 7]], np.float32), np.array([[np.nan, 7]], np.float32),
                                     np.array([[np.inf, 7]], np.float32)], ids=["uint16", "int32", "half", "nan", "inf"])
def test_samples_beyond_eight_bits_are_refused(samples):
    kind = "PNG" if samples.dtype == np.uint16 else "TIFF"
    with pytest.raises(ImageError, match=r"scan is greyscale in mode '.*' with samples from .*; save it with 8 bits a sample"):
        images.load_pixels(encoded(Image.fromarray(samples), kind), "scan")


def test_a_bomb_is_one_error_and_takes_no_memory():
    """65536 x 65536 grey pixels in a few bytes; the same just above the limit, where Pillow only warns."""
    for width, height in ((65536, 65536), (20000, 4475)):
        bomb = png(width, height, b"")
        with pytest.raises(ImageError, match=r"flag\.png.* pixels.*scale it down") as caught:
            load(bomb, "flag.png")
        assert "\n" not in str(caught.value)
    images.check_pixel_count(8192, 8192, "large")


def test_what_is_no_image_is_one_error(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("%!PS-Adobe-3.0 EPSF-3.0\n")
    cases = [(text, "notes.txt is no image of a kind that is read here"), (b"", "image is no image"),
             (tmp_path / "none.png", "cannot read .*none.png: No such file"), (tmp_path, "is no file; give the path"),
             (np.zeros((2, 2)), r"array float64 \[2, 2\], expected uint8"), (np.zeros((0, 2, 3), np.uint8), r"\[0, 2, 3\]")]
    for source, message in cases:
        with pytest.raises(ImageError, match=message) as caught:
            images.load_pixels(source)
        assert "\n" not in str(caught.value)
    assert np.array_equal(images.load_pixels(noise(3, 4, 3)), noise(3, 4, 3))


@pytest.mark.parametrize("name", ["RGB.png", "RGB.jpg", "P.gif", "RGBA.webp", "RGBA.tif", "RGB.jp2", "RGB.bmp", "RGBA.ico"])
def test_damage_gives_an_error_or_an_image(name):
    """Cut anywhere, or with bytes changed: nothing but ImageError escapes, no warning either."""
    data, draw, refused = MODES[name], random.Random(0), []
    for _ in range(150):
        damaged = bytearray(data[:draw.randrange(len(data))] if draw.random() < 0.5 else data)
        for _ in range(draw.randrange(4)):
            if damaged:
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            assert load(bytes(damaged)).dtype == np.uint8
        except ImageError as err:
            refused.append(str(err))
    assert len(refused) > 20
    assert not any("\n" in message for message in refused)


def test_importing_the_module_leaves_pillow_alone():
    code = "import sys, fermi_engine.vision.images, fermi_engine.vision.patches; print('PIL' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
