"""Sizes, slices, patches and placeholders of images against transformers 5.24's own image processors."""

from __future__ import annotations

import dataclasses
import math
from hashlib import blake2b
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from fermi_engine.errors import ImageError, RequestError
from fermi_engine.vision import patches as image_patches
from fermi_engine.vision import plans as image_plans
from fermi_engine.vision import prompt as image_prompt
from fermi_engine.vision.plans import MiniCpmImages, QwenImages, Resize
from tests import hf_vision
from tests.test_vision_reference import IMAGE, image_prompts

RELEASED = {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
HALF = [0.5, 0.5, 0.5]
QWEN = Qwen2VLImageProcessorPil(**RELEASED, image_mean=HALF, image_std=HALF)
MINICPM = {mode: MiniCPMV4_6ImageProcessorPil(downsample_mode=mode) for mode in ("16x", "4x")}
COUNT = 20_000
modes = pytest.mark.parametrize("mode", MINICPM)


def sizes(count: int, longest: int, aspect: float) -> list[tuple[int, int]]:
    """Sides from 1 to `longest`, small, odd and long ones as likely as large; the first are corners."""
    corners = [(1, 1), (1, 2), (27, 28), (28, 27), (32, 32), (448, 448), (448, 449), (449, 448), (4000, 4000), (1, 150), (150, 1),
               (256, 256), (4096, 4096), (4096, 4097), (896, 896), (1344, 896), (600, 400), (600, 600), (48, 80), (80, 48),
               (16, 16)]
    draw, found = np.random.default_rng(7), list(corners)
    while len(found) < count:
        sides = np.concatenate([np.exp(draw.uniform(0, math.log(longest), (100, 2))), draw.uniform(1, longest / 3, (100, 2))])
        found += [(int(h), int(w)) for h, w in sides if max(int(h), int(w)) <= aspect * min(int(h), int(w))]
    return found[:count]


def test_qwen_sizes_are_those_of_transformers():
    for height, width in sizes(COUNT, 9000, 200):
        (step,) = image_plans.plan(height, width, QwenImages())
        assert step == Resize(*smart_resize(height, width, 32, 65536, 16777216)), (height, width)


def test_qwen_sizes_under_other_limits_are_those_of_transformers():
    settings = QwenImages(patch_size=14, min_pixels=3136, max_pixels=200000)
    for height, width in sizes(3000, 3000, 200):
        (step,) = image_plans.plan(height, width, settings)
        assert step == Resize(*smart_resize(height, width, 28, 3136, 200000)), (height, width)


def minicpm_plan(processor: MiniCPMV4_6ImageProcessorPil, height: int, width: int) -> tuple[Resize, ...]:
    """transformers' plan, from the functions its preprocessing calls."""
    unit = {"scale_resolution": processor.scale_resolution, "patch_size": processor.patch_size,
            "downsample_mode": processor.downsample_mode}
    grid = processor.get_sliced_grid((height, width), processor.max_slice_nums, processor.scale_resolution)
    overview = Resize(*processor.find_best_resize((height, width), **unit, allow_upscale=grid is None))
    if grid is None:
        return (overview,)
    return overview, Resize(*processor.get_refine_size((height, width), grid, **unit, allow_upscale=True), *grid)


@modes
def test_minicpm_plans_are_those_of_transformers(mode):
    settings, longest, with_slices = MiniCpmImages(downsample_mode=mode), 0, 0
    for height, width in sizes(COUNT, 9000, 2000):
        theirs = minicpm_plan(MINICPM[mode], height, width)
        assert image_plans.plan(height, width, settings) == theirs, (height, width)
        longest, with_slices = max(longest, len(image_plans.grids(theirs, settings))), with_slices + len(theirs) - 1
    assert longest == 10
    assert with_slices > COUNT / 3


def test_published_examples_of_slices():
    """(width, height) -> slice grid and patch grids of the released settings."""
    cases = {(300, 200): ((0, 0), [(28, 40)]), (600, 400): ((1, 2), [(28, 40), (36, 28), (36, 28)]),
             (1344, 896): ((2, 3), [(28, 40)] + [(32, 32)] * 6), (4000, 3000): ((3, 3), [(28, 36)] * 10)}
    for (width, height), (slices, grids) in cases.items():
        steps = image_plans.plan(height, width, MiniCpmImages())
        assert image_patches._slices(steps) == slices
        assert image_plans.grids(steps, MiniCpmImages()) == grids


def test_every_grid_can_be_merged():
    for settings, unit in ((QwenImages(), 2), (MiniCpmImages(), 4), (MiniCpmImages(downsample_mode="4x"), 2)):
        for height, width in sizes(2000, 9000, 200):
            for grid in image_plans.grids(image_plans.plan(height, width, settings), settings):
                assert grid[0] % unit == grid[1] % unit == 0


def test_long_and_thin_is_one_error():
    for shape in ((1, 201), (2000, 1)):
        with pytest.raises(ImageError, match=r"strip is \d+ x \d+ pixels, one side (201|2000) times the other"):
            image_plans.plan(*shape, QwenImages(), "strip")
    image_plans.plan(1, 200, QwenImages())
    assert image_plans.plan(1, 2000, MiniCpmImages()) == minicpm_plan(MINICPM["16x"], 1, 2000)
    with pytest.raises(ImageError, match=r"strip of 1 x 1000000 pixels would become a view of \d+ patches"):
        image_plans.plan(1000000, 1, MiniCpmImages(), "strip")


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height + 10000 * width).integers(0, 256, (height, width, 3)).astype(np.uint8)


# 2000 x 1 is an error of Qwen's; 4000 x 4000 is the largest of both
SHAPES = [(1, 1), (27, 28), (1, 150), (64, 48), (300, 200), (449, 448), (400, 600), (900, 1300), (4000, 4000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_qwen_pixels_are_those_of_transformers(shape):
    """By the hash of all values: a large image and its float64 copies fill a GB as they are."""
    pixels = noise(*shape)
    theirs = QWEN(images=[pixels], input_data_format="channels_last", return_tensors="np")
    grid, values = theirs["image_grid_thw"].tolist(), theirs.pop("pixel_values")
    assert values.dtype == np.float32
    expected = values.shape, blake2b(values).digest()
    del values
    ours = image_patches.prepare(pixels, QwenImages())
    assert [[1, *grid] for grid in ours.grids] == grid
    assert ours.patches.dtype == np.float32
    assert (ours.patches.shape, blake2b(ours.patches).digest()) == expected
    assert ours.tokens == (len(ours.patches) // 4,)


@modes
@pytest.mark.parametrize("shape", [*SHAPES, (1, 2000), (2000, 1)], ids=str)
def test_minicpm_pixels_are_those_of_transformers(shape, mode):
    pixels = noise(*shape)
    theirs = MINICPM[mode](images=[pixels], input_data_format="channels_last", return_tensors="np")
    ours = image_patches.prepare(pixels, MiniCpmImages(downsample_mode=mode))
    assert list(ours.grids) == [tuple(grid) for grid in theirs["target_sizes"].tolist()]
    assert list(ours.slices) == theirs["grids"][0]
    assert np.array_equal(ours.patches, hf_vision.unpacked(theirs["pixel_values"]))
    assert ours.tokens == tuple(h * w // (16 if mode == "16x" else 4) for h, w in ours.grids)


def test_other_means_and_deviations():
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    processor = Qwen2VLImageProcessorPil(**RELEASED, image_mean=list(mean), image_std=list(std))
    pixels = noise(300, 200)
    theirs = processor(images=[pixels], input_data_format="channels_last", return_tensors="np")["pixel_values"]
    assert np.array_equal(image_patches.prepare(pixels, QwenImages(image_mean=mean, image_std=std)).patches, theirs)


def test_without_slices_there_is_one_view():
    processor = MiniCPMV4_6ImageProcessorPil(slice_mode=False)
    pixels = noise(900, 700)
    theirs = processor(images=[pixels], input_data_format="channels_last", return_tensors="np")
    ours = image_patches.prepare(pixels, MiniCpmImages(slice_mode=False))
    assert np.array_equal(ours.patches, hf_vision.unpacked(theirs["pixel_values"]))
    assert ours.slices == (0, 0)


def test_the_digest_names_pixels_and_settings():
    pixels, settings = noise(300, 200), [QwenImages(), MiniCpmImages()]
    first = {image_patches.prepare(pixels, s).digest for s in settings}
    assert first == {image_patches.prepare(pixels.copy(), s).digest for s in settings}
    assert len(first) == 2
    others = set()
    for y, x, channel in ((0, 0, 0), (299, 199, 2), (150, 3, 1)):
        moved = pixels.copy()
        moved[y, x, channel] ^= 1
        others |= {image_patches.prepare(moved, s).digest for s in settings}
    changed = [QwenImages(max_pixels=16777215), MiniCpmImages(downsample_mode="4x"), MiniCpmImages(image_mean=(0.5, 0.5, 0.4))]
    others |= {image_patches.prepare(pixels, s).digest for s in changed}
    others.add(image_patches.prepare(pixels.reshape(200, 300, 3), QwenImages()).digest)
    assert len(others) == 10
    assert not others & first
    white = np.full((4000, 4000, 3), 255, np.uint8)  # a pixel that the resizing rounds away
    black = white.copy()
    black[2000, 2000, 0] = 254
    same = [image_patches.prepare(one, MiniCpmImages()) for one in (white, black)]
    assert same[0].digest != same[1].digest


# Prompts

TAGS = SimpleNamespace(
    image_token="<|image_pad|>", image_start_token="<image>", image_end_token="</image>", slice_start_token="<slice>",
    slice_end_token="</slice>", image_id_start_token="<image_id>", image_id_end_token="</image_id>", slice_mode=True)


def image_of(height: int, width: int, settings) -> image_patches.PreparedImage:
    """The plan of an image without its pixels."""
    steps = image_plans.plan(height, width, settings)
    grids = image_plans.grids(steps, settings)
    tokens = tuple(h * w // settings.patches_per_token for h, w in grids)
    return image_patches.PreparedImage(np.empty(0, np.float32), tuple(grids), image_patches._slices(steps), tokens, b"")


@modes
def test_minicpm_placeholders_are_those_of_transformers(mode):
    settings, divisor = MiniCpmImages(downsample_mode=mode), 16 if mode == "16x" else 4
    for first, second in zip(sizes(3000, 9000, 100)[::2], sizes(3000, 9000, 100)[1::2], strict=True):
        made = [image_of(*size, settings) for size in (first, second)]
        inputs = {"grids": [list(image.slices) for image in made], "num_patches_per_image": [len(image.grids) for image in made],
                  "target_sizes": np.array([grid for image in made for grid in image.grids])}
        theirs = [MiniCPMV4_6Processor.replace_image_token(TAGS, inputs, image_idx=i, image_token_divisor=divisor)
                  for i in range(2)]
        unnumbered = dataclasses.replace(settings, use_image_id=False)
        assert [image_prompt.placeholder(image, unnumbered, 0) for image in made] == theirs
        numbered = MiniCPMV4_6Processor._prepend_local_ids(TAGS, ["<|image_pad|> and <|image_pad|>"], theirs, "<|image_pad|>")
        assert [image_prompt.placeholder(image, settings, i) for i, image in enumerate(made)] == numbered


def test_placeholders_are_as_many_as_embeddings_for_every_size():
    for settings in (QwenImages(), MiniCpmImages(), MiniCpmImages(downsample_mode="4x")):
        for height, width in sizes(COUNT // 4, 9000, 200):
            image = image_of(height, width, settings)
            text = image_prompt.placeholder(image, settings, 3)
            rows = [(h // 2, w // 2) for h, w in image.grids]  # merged once, or in "16x" twice
            if settings == MiniCpmImages():
                rows = [(h // 2, w // 2) for h, w in rows]
            assert text.count("<|image_pad|>") == sum(h * w for h, w in rows) == sum(image.tokens)


def test_expansion_puts_each_image_in_its_place():
    assert image_prompt.expand([1, IMAGE, 2, IMAGE], IMAGE, [[7, IMAGE, IMAGE], [IMAGE]]) == [1, 7, IMAGE, IMAGE, 2, IMAGE]
    assert image_prompt.expand([1, 2], IMAGE, []) == [1, 2]
    for ids, images in (([1, IMAGE], []), ([1], [[IMAGE]]), ([IMAGE, IMAGE], [[IMAGE]])):
        with pytest.raises(RequestError, match=r"the prompt has \d places for images \(token 9\) and \d images"):
            image_prompt.expand(ids, IMAGE, images)


def test_slots_are_counted():
    assert image_prompt.image_slots(np.array([1, IMAGE, 2, IMAGE]), IMAGE, 2).tolist() == [1, 3]
    with pytest.raises(RequestError, match=r"the prompt has 1 image tokens \(9\), its images have 2 embeddings"):
        image_prompt.image_slots(np.array([1, IMAGE]), IMAGE, 2)


def test_positions_around_images_are_those_of_transformers():
    for ids, grids in image_prompts():
        ours, following = image_prompt.mrope_positions(ids, IMAGE, grids)
        theirs, expected = hf_vision.rope_index(ids, IMAGE, grids)
        assert ours.dtype == np.int32
        assert torch.equal(torch.from_numpy(ours).long(), theirs)
        if ids[-1] != IMAGE:
            assert following == expected
        later, end = image_prompt.mrope_positions(ids, IMAGE, grids, start=17)
        assert np.array_equal(later, ours + 17)
        assert end == following + 17


def test_images_that_do_not_fit_their_tokens_are_refused():
    for ids, grids in (([IMAGE] * 3, [(4, 4)]), ([IMAGE] * 4, []), ([1, 2], [(4, 4)])):
        with pytest.raises(RequestError, match=r"image tokens \(9\), its images have \d+ embeddings"):
            image_prompt.mrope_positions(ids, IMAGE, grids)
    with pytest.raises(RequestError, match="an image of 4 tokens is broken up by text at token 1"):
        image_prompt.mrope_positions([1, IMAGE, IMAGE, 5, IMAGE, IMAGE], IMAGE, [(4, 4)])


def test_plain_positions():
    assert image_prompt.text_positions(3, 5).tolist() == [[5, 6, 7]] * 3
