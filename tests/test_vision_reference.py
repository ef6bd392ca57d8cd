"""The PyTorch reference of both vision towers against transformers. Errors are relative L2 norms."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import vision_utils

from fermi_engine.config import ModelConfig
from reference import resize, vision, vision_minicpm, vision_qwen
from reference.decoder import Decoder
from tests import hf, hf_vision

# A tower in float64: a few hundred roundings of 2**-53 (measured 7e-16).
DOUBLE = 1000 * 2.0**-53
CEILING = 1e-4
LARGEST = [(36, 28)]
QWEN_GRIDS = ([(2, 2)], [(2, 14)], [(14, 2)], [(8, 12)], [(50, 6)], LARGEST, [(6, 4), (2, 2), (4, 10)])
# multiples of 4 in "16x", of 2 in "4x"
MINICPM_GRIDS = ([(4, 4)], [(4, 28)], [(28, 4)], [(8, 12)], LARGEST, [(12, 8), (4, 4), (8, 16)], [(72, 4)])
SEED = 5

moe = pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "moe"])
modes = pytest.mark.parametrize("mode", ["16x", "4x"])


@pytest.fixture(autouse=True)
def _one_thread_without_gradients():
    with hf.threads(1), torch.no_grad():
        yield



def qwen_model(is_moe: bool, attention: str = "eager"):
    return _cached(hf_vision.qwen, is_moe, attention=attention)


def minicpm_model(attention: str = "eager", **sizes: int):
    return _cached(hf_vision.minicpm_model, attention=attention, **sizes)


@functools.cache
def _cached(build, *args, **kwargs):
    return build(*args, **kwargs)


def error(x: Tensor, truth: Tensor) -> float:
    return ((x.double() - truth.double()).norm() / truth.double().norm()).item()


def patches_of(grids: list, width: int) -> Tensor:
    """Pixels from -1 to 1 in every patch."""
    count = sum(height * width for height, width in grids)
    return torch.rand((count, width), generator=torch.Generator().manual_seed(SEED + count)) * 2 - 1


Runs = Iterator[tuple[list, Callable[[str], Tensor], Callable[[torch.dtype], Tensor]]]


def qwen_runs(is_moe: bool) -> Runs:
    """Of each case: grids, what transformers gives by attention, what the reference gives by dtype."""
    reference = hf_vision.qwen_reference(qwen_model(is_moe), torch.float64)
    for grids in QWEN_GRIDS:
        patches = patches_of(grids, 96)

        def theirs(attention: str, patches: Tensor = patches, grids: list = grids) -> Tensor:
            return hf_vision.qwen_features(qwen_model(is_moe, attention), patches, grids)

        def ours(dtype: torch.dtype, patches: Tensor = patches, grids: list = grids) -> Tensor:
            return reference.to(dtype).forward(patches, grids)
        yield grids, theirs, ours


def minicpm_runs(mode: str) -> Runs:
    reference = hf_vision.minicpm_reference(minicpm_model(), torch.float64)
    for grids in MINICPM_GRIDS:
        patches = patches_of(grids, 12)

        def theirs(attention: str, patches: Tensor = patches, grids: list = grids) -> Tensor:
            return hf_vision.minicpm_features(minicpm_model(attention), patches, grids, mode)

        def ours(dtype: torch.dtype, patches: Tensor = patches, grids: list = grids) -> Tensor:
            return reference.to(dtype).forward(patches, grids, mode)
        yield grids, theirs, ours


def assert_equal_in_double(model, runs: Runs) -> None:
    for grids, theirs, ours in runs:
        with hf_vision.double_precision(model):
            exact = theirs("eager")
        assert exact.dtype == torch.float64
        assert error(ours(torch.float64), exact) < DOUBLE, grids


def assert_within_spread(runs: Runs) -> None:
    """Per image: at most twice the largest difference between two settings of transformers, over all images."""
    spread, theirs_error, ours_error, apart = [], [], [], []
    for grids, theirs, ours in runs:
        found = [theirs("eager"), theirs("sdpa")]
        if grids == LARGEST:  # torch splits little of the others among threads
            with hf.threads(2):
                found.append(theirs("eager"))
        exact, mine = ours(torch.float64), ours(torch.float32)
        assert mine.dtype == torch.float32
        spread.append(max(error(a, b) for a, b in itertools.combinations(found, 2)))
        theirs_error.append(error(found[0], exact))
        ours_error.append(error(mine, exact))
        apart.append(error(mine, found[0]))
        print(f"{grids}: transformers with itself {spread[-1]:.1e}, reference to transformers {apart[-1]:.1e}; "
              f"error in float32: transformers {theirs_error[-1]:.1e}, reference {ours_error[-1]:.1e}")
    assert max(apart) <= min(2 * max(spread), CEILING)
    assert max(ours_error) <= 2 * max(theirs_error)


@moe
def test_double_qwen_tower_is_transformers_in_double(is_moe):
    assert_equal_in_double(qwen_model(is_moe), qwen_runs(is_moe))


@modes
def test_double_minicpm_tower_is_transformers_in_double(mode):
    assert_equal_in_double(minicpm_model(), minicpm_runs(mode))


@moe
def test_single_qwen_tower_is_within_the_spread_of_transformers(is_moe):
    assert_within_spread(qwen_runs(is_moe))


@modes
def test_single_minicpm_tower_is_within_the_spread_of_transformers(mode):
    assert_within_spread(minicpm_runs(mode))


def test_the_window_merger_stands_behind_the_layer_that_the_configuration_names():
    for insert in (0, 2):
        model = minicpm_model(depth=3, insert=insert)
        patches = patches_of([(8, 4)], 12)
        with hf_vision.double_precision(model):
            exact = hf_vision.minicpm_features(model, patches, [(8, 4)], "16x")
        reference = hf_vision.minicpm_reference(model, torch.float64)
        assert error(reference.forward(patches, [(8, 4)], "16x"), exact) < DOUBLE
        wrong = types.SimpleNamespace(**{**vars(model.config.vision_config), "insert_layer_id": 1})
        assert error(vision_minicpm.MiniCpmVision(wrong, reference.params).forward(patches, [(8, 4)], "16x"), exact) > 0.01


def test_both_gelus_are_those_of_torch():
    x = torch.linspace(-9, 9, 10001, dtype=torch.float64)
    for ours, name in ((vision.gelu_tanh, "tanh"), (vision.gelu_erf, "none")):
        theirs = torch.nn.functional.gelu(x, approximate=name)
        assert (ours(x) - theirs).abs().max() < 9 * 2.0**-51  # of 1 + tanh or erf near -1
    assert (vision.gelu_tanh(x) - vision.gelu_erf(x)).abs().max() > 4e-4


def test_images_do_not_see_each_other():
    model = qwen_model(False)
    reference = hf_vision.qwen_reference(model, torch.float64)
    first, second = patches_of([(4, 6)], 96), patches_of([(2, 8)], 96)
    both = reference.forward(torch.cat([first, second]), [(4, 6), (2, 8)])
    # a product of more rows may be summed in another order
    assert error(both[:6], reference.forward(first, [(4, 6)])) < DOUBLE
    assert error(both[6:], reference.forward(second, [(2, 8)])) < DOUBLE


def test_traces_name_every_stage():
    seen: dict[str, Tensor] = {}
    reference = hf_vision.minicpm_reference(minicpm_model(), torch.float64)
    reference.forward(patches_of([(4, 8)], 12), [(4, 8)], "16x", seen.__setitem__)
    assert set(seen) == {"embed", "vit_merger", "post_layernorm", "merger", *(f"layers.{i}" for i in range(9))}
    assert torch.equal(reference.window_merger(seen["layers.6"], [(4, 8)]), seen["vit_merger"])
    assert torch.equal(reference.layer(7, seen["vit_merger"], [8]), seen["layers.7"])
    assert torch.equal(reference.projector(seen["post_layernorm"], [(2, 4)]), seen["merger"])
    seen.clear()
    qwen = hf_vision.qwen_reference(qwen_model(False), torch.float64)
    qwen.forward(patches_of([(4, 8)], 96), [(4, 8)], seen.__setitem__)
    assert set(seen) == {"embed", "merger", *(f"blocks.{i}" for i in range(3))}
    cos, sin = vision_qwen.rotary_tables((4, 8), 12, torch.float64)
    assert torch.equal(qwen.block(1, seen["blocks.0"], cos, sin, [32]), seen["blocks.1"])
    assert torch.equal(qwen.merger(seen["blocks.2"]), seen["merger"])


# Text with images

FAMILIES = ("qwen3_5", "qwen3_5_moe", "minicpmv4_6")


@pytest.mark.parametrize("family", FAMILIES)
def test_text_with_images_in_double(family):
    """Embeddings in their slots, positions around them: logits of every token."""
    model = hf_vision.with_text(family)
    is_qwen, divisor = family != "minicpmv4_6", 4 if family != "minicpmv4_6" else 16
    grids, ids = [(4, 8), (8, 4)], [3, 7]
    for height, width in grids:
        ids += [11, *[hf_vision.IMAGE_TOKEN] * (height * width // divisor), 12]
    ids += [5, 6, 8]
    patches = patches_of(grids, 96 if is_qwen else 12)
    decoder = Decoder(ModelConfig.from_hf(model.config.text_config.to_dict()), hf.canonical_params(model, torch.float64))
    if is_qwen:
        rows = hf_vision.qwen_reference(model.model.visual, torch.float64).forward(patches, grids)
        positions, _ = vision_qwen.text_positions(ids, hf_vision.IMAGE_TOKEN, grids)
    else:
        rows = hf_vision.minicpm_reference(model.model, torch.float64).forward(patches, grids, "16x")
        positions = torch.arange(len(ids)).expand(3, -1)
    embedded, slots = decoder.embed(torch.tensor(ids)), torch.tensor(ids) == hf_vision.IMAGE_TOKEN
    embedded[slots] = rows
    with hf_vision.double_precision(model):
        exact = hf_vision.logits(model, ids, patches, grids)
    assert exact.dtype == torch.float64
    assert error(decoder.forward(ids, positions=positions, embedded=embedded)[0], exact) < DOUBLE
    # later tokens notice each image, and Qwen's where it stands
    embedded[slots] = rows.flip(0)
    assert error(decoder.forward(ids, positions=positions, embedded=embedded)[0][-1:], exact[-1:]) > 1e-3
    embedded[slots] = rows
    counted = decoder.forward(ids, embedded=embedded)[0]
    assert (error(counted[-1:], exact[-1:]) > 1e-4) == is_qwen


# Positions


def test_buckets_are_those_of_transformers_for_every_side():
    """Floor in integers against float32 boundaries: every side that a view can have, and longer ones."""
    for size in range(1, 700):
        theirs = vision_utils.get_vision_nearest_position_ids(torch.tensor([[size, 1]]), 70)
        assert torch.equal(vision_minicpm.position_ids((size, 1), 70), theirs), size
    for grid in ((28, 40), (3, 7), (70, 140), (71, 1)):
        theirs = vision_utils.get_vision_nearest_position_ids(torch.tensor([grid]), 70)
        assert torch.equal(vision_minicpm.position_ids(grid, 70), theirs)


def test_a_bucket_boundary_belongs_above():
    assert vision_minicpm.position_ids((1, 140), 70).tolist() == [i // 2 for i in range(140)]
    assert vision_minicpm.position_ids((1, 35), 70).tolist() == list(range(0, 70, 2))


@pytest.mark.parametrize("grid", [(2, 2), (2, 96), (48, 48), (50, 46), (94, 30)])
def test_position_taps_are_those_of_transformers(grid):
    thw = torch.tensor([(1, *grid)])
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        thw, 48, mode="bilinear", align_corners=True, spatial_merge_size=2)
    table = torch.randn((2304, 5), generator=torch.Generator().manual_seed(0))
    theirs = (table[indices] * weights[:, :, None]).sum(1)
    # four weights of two factors and one subtraction each, in [0, 1]; four products, three additions
    limit = 8 * 2.0**-24 * table.abs().max() * 4
    assert (vision_qwen.position_embedding(table, grid) - theirs).abs().max() <= limit
    rows, columns = vision.block_order(*grid)
    theirs = vision_utils.get_vision_position_ids(thw, 2)
    assert torch.equal(torch.stack([rows, columns], dim=-1), theirs)
    if grid == (48, 48):  # the table's own size: no interpolation at all
        exact = table[rows * 48 + columns]
        assert torch.equal(vision_qwen.position_embedding(table, grid), exact)


def test_rotary_angles_are_those_of_transformers():
    model = qwen_model(False)
    grid = (8, 20)
    ids = vision_utils.get_vision_position_ids(torch.tensor([(1, *grid)]), 2)
    theirs = model.rotary_pos_emb(torch.zeros(1), ids)
    for ours, full in zip(vision_qwen.rotary_tables(grid, 12, torch.float32), theirs, strict=True):
        # an angle below 20 rounds by half a unit of 16's last place, a frequency by one of its own
        assert (torch.cat([ours, ours], -1) - full).abs().max() <= 20 * 2.0**-23


IMAGE = 9


def image_prompts():
    """Prompts of text and images as (ids, grids): none, one, several, at both ends, next to each other but for markers."""
    generator = np.random.default_rng(3)
    for _ in range(60):
        ids, grids = [], []
        for _ in range(generator.integers(0, 4)):
            ids += generator.integers(0, 9, generator.integers(1, 6)).tolist()
            height, width = (2 * int(n) for n in generator.integers(1, 12, 2))
            grids.append((height, width))
            ids += [IMAGE] * (height * width // 4)
        ids += generator.integers(0, 9, generator.integers(0 if ids else 1, 6)).tolist()
        yield ids, grids


def test_text_positions_are_those_of_transformers():
    for ids, grids in image_prompts():
        ours, following = vision_qwen.text_positions(ids, IMAGE, grids)
        theirs, expected = hf_vision.rope_index(ids, IMAGE, grids)
        assert torch.equal(ours, theirs)
        # transformers continues from the largest position; markers after the last image make that the next one
        if ids[-1] != IMAGE:
            assert following == expected


# Pixels


def test_resized_pixels_are_those_of_pillow():
    """Where every Pillow takes columns first, and else in the order of this one."""
    draw, fixed, turned = np.random.default_rng(0), 0, 0
    for height, width, rows, columns in draw.integers(1, 45, (120, 4)).tolist():
        pixels = draw.integers(0, 256, (height, width, 3)).astype(np.uint8)
        theirs = np.asarray(Image.fromarray(pixels).resize((columns, rows), resample=Image.Resampling.BICUBIC))
        source = torch.from_numpy(pixels)
        orders = [resize.resize(source, rows, columns, first).numpy() for first in (False, True)]
        if resize.order_depends(source, rows, columns):
            assert any(np.array_equal(theirs, ours) for ours in orders)
            turned += 1
        else:
            assert np.array_equal(theirs, orders[0])
            fixed += 1
    assert min(fixed, turned) > 20
