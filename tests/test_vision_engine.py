"""Images through the CPU engine on float32 packs against transformers, its own image processors included.

Errors are relative L2 norms over all logits of a prompt, limits those of tests/test_engine_transformers.py.
"""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoImageProcessor

from fermi_engine import Engine, SamplingParams
from fermi_engine.errors import RequestError
from fermi_engine.vision.encoder import PlacedImages
from fermi_engine.vision.patches import PreparedImage
from tests import hf, hf_vision
from tools.checkpoint_vision import MINICPM_IMAGES, QWEN_IMAGES

FAMILIES = ("qwen3_5", "qwen3_5_moe", "minicpmv4_6")
LOGITS_CEILING = 1e-4
SIZES = {"one": [(40, 30)], "three": [(17, 50), (64, 64), (30, 90)]}  # height, width; of MiniCPM's some have slices


def error(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


def pictures(sizes: list[tuple[int, int]], seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 256, (*size, 3)).astype(np.uint8) for size in sizes]


class Pair:
    """transformers (eager and sdpa) and our engine over one checkpoint with its image processor."""

    def __init__(self, family: str, directory) -> None:
        self.family = family
        self.eager, self.sdpa = (hf_vision.with_text(family, attention=name) for name in ("eager", "sdpa"))
        hf.save(self.eager, directory, fused=True)
        patch = 2 if family == "minicpmv4_6" else 4
        settings = {**(MINICPM_IMAGES if family == "minicpmv4_6" else QWEN_IMAGES), "patch_size": patch}
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
        self.processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
        self.directory, self.engine = directory, Engine.load(directory, format="f32")

    def prompt(self, images: list[PreparedImage]) -> list[int]:
        """Text around each image, text at both ends; each view between markers of its own."""
        ids = [3, 7, 8]
        for image in images:
            for count in image.tokens:
                ids += [11, *[hf_vision.IMAGE_TOKEN] * count, 12]
            ids += [5, 6]
        return [*ids, 9, 4]

    def inputs(self, pixels: list[np.ndarray]) -> tuple[Tensor, list[tuple[int, int]]]:
        """What transformers' own processor makes of the images: patches and grids."""
        found = self.processor(images=pixels, input_data_format="channels_last", return_tensors="np")
        if self.family == "minicpmv4_6":
            return torch.from_numpy(hf_vision.unpacked(found["pixel_values"])), [tuple(g) for g in found["target_sizes"].tolist()]
        return torch.from_numpy(found["pixel_values"]), [tuple(g[1:]) for g in found["image_grid_thw"].tolist()]

    def ours(self, ids: list[int], images: list[PreparedImage], cuts: list[int]) -> Tensor:
        """Logits of every token through the decoder, in pieces."""
        decoder = self.engine.decoder
        placed = self.engine.vision.place(np.array(ids), images)
        return torch.from_numpy(run(decoder, self.engine, ids, placed, cuts))


def test_sessions_go_on_from_snapshots_with_the_same_images_only(pair):
    """Every turn of a talk about images: the logits of one run from the beginning, to the bit, and little evaluated anew."""
    engine, pixels = Engine.load(pair.directory, format="f32"), pictures(SIZES["three"])
    images = [engine.vision.prepare(one) for one in pixels]
    ids = pair.prompt(images)
    turns = [ids, [*ids, 20, 21, 22], [*ids, 20, 21, 23, 24, 25]]
    expected = [pair.ours(turn, images, []).numpy()[-1] for turn in turns]
    session = engine.session()
    for turn, logits in zip(turns, expected, strict=True):
        assert np.array_equal(session.prompt(turn, images=images), logits)
    assert session.cached_tokens >= len(ids)
    again = engine.session()
    assert np.array_equal(again.prompt(turns[1], images=images), expected[1])
    assert again.cached_tokens == len(turns[1])
    assert np.array_equal(again.decode(26), pair.ours([*turns[1], 26], images, []).numpy()[-1])
    changed = pixels[2].copy()
    changed[5, 5, 0] ^= 128
    others = [*images[:2], engine.vision.prepare(changed)]
    assert not np.array_equal(again.prompt(ids, images=others), expected[0])
    last = engine.vision.place(np.array(ids), images).images[-1]
    assert again.cached_tokens <= last.begin
    assert np.array_equal(again.prompt(ids, images=others), pair.ours(ids, others, []).numpy()[-1])


def test_prefill_snapshot_fork_and_restore_keep_positions(pair):
    engine = pair.engine
    images = [engine.vision.prepare(one) for one in pictures(SIZES["one"])]
    ids = pair.prompt(images)
    session = engine.session()
    session.prefill([3, 7])
    assert np.array_equal(session.prefill(ids[2:], images=images), pair.ours(ids, images, []).numpy()[-1])
    taken, forked = session.snapshot(), session.fork()
    expected = pair.ours([*ids, 20, 21, 22], images, []).numpy()[-1]
    other = engine.session()
    other.restore(taken)
    for one in (session, forked, other):
        one.decode(20)
        assert np.array_equal(one.prefill([21, 22]), expected)
    more = [engine.vision.prepare(one) for one in pictures(SIZES["one"], seed=1)]
    second = pair.prompt(more)
    both = pair.ours([*ids, 20, 21, 22, *second], [*images, *more], []).numpy()
    assert np.array_equal(session.prefill(second, images=more), both[-1])
    assert len(session.prefix.images) == 2
    assert np.array_equal(engine.session().logits(ids, images=images), pair.ours(ids, images, []).numpy())


def test_images_and_places_that_do_not_fit_are_refused_before_any_work(pair):
    images = [pair.engine.vision.prepare(one) for one in pictures(SIZES["one"])]
    session = pair.engine.session()
    with pytest.raises(RequestError, match=r"the prompt has 0 image tokens \(290\), its images have \d+ embeddings"):
        session.prompt([1, 2, 3], images=images)
    assert session.position == 0
    session.prompt([1, 2, 3])


def test_generate_takes_images(pair):
    images = [pair.engine.vision.prepare(one) for one in pictures(SIZES["one"])]
    ids = pair.prompt(images)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    found = [piece.id for piece in pair.engine.generate(ids, params, images=images)]
    session, expected = pair.engine.session(), []
    logits = session.prefill(ids, images=images)
    for _ in range(4):
        expected.append(int(logits.argmax()))
        logits = session.decode(expected[-1])
    assert [token for token in found if token is not None] == expected
    session = pair.engine.session()
    again = [piece.id for piece in pair.engine.generate(ids, params, images=images, session=session)]
    assert again == found


def run(decoder, engine, ids: list[int], placed: PlacedImages, cuts: list[int]) -> np.ndarray:
    state = engine.session().state
    rows = []
    for begin, end in itertools.pairwise([0, *cuts, len(ids)]):
        part = placed.part(begin, end)
        rows.append(decoder.logits(decoder.hidden(np.array(ids[begin:end], np.int32), state, images=part)))
    return np.concatenate(rows)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, hf.threads(1), torch.no_grad():
        patch.setenv("FERMI_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield Pair(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("count", SIZES)
def test_logits_are_within_the_spread_of_transformers(pair, count, capsys):
    pixels = pictures(SIZES[count])
    images = [pair.engine.vision.prepare(one) for one in pixels]
    patches, grids = pair.inputs(pixels)
    assert [grid for image in images for grid in image.grids] == grids
    assert np.array_equal(np.concatenate([image.patches for image in images]), patches.numpy())
    ids = pair.prompt(images)
    runs = [hf_vision.logits(model, ids, patches, grids) for model in (pair.eager, pair.sdpa)]
    with hf_vision.double_precision(pair.eager):
        exact = hf_vision.logits(pair.eager, ids, patches, grids)
    mine = pair.ours(ids, images, [])
    spread, apart = error(*runs), error(mine, runs[0])
    with capsys.disabled():
        print(f"\n{pair.family}, {count}: transformers with itself {spread:.1e}, engine to it {apart:.1e}; to float64: "
              f"transformers {error(runs[0], exact):.1e}, engine {error(mine, exact):.1e}", end="")
    assert apart <= min(2 * spread, LOGITS_CEILING)
    assert error(mine, exact) <= 2 * error(runs[0], exact)


def test_any_cut_gives_the_same_bits(pair):
    images = [pair.engine.vision.prepare(one) for one in pictures(SIZES["three"])]
    ids = pair.prompt(images)
    whole = pair.ours(ids, images, [])
    for cuts in ([1], [len(ids) - 1], list(range(1, len(ids), 7)), [5, 6, 7]):
        assert torch.equal(pair.ours(ids, images, cuts), whole)


def test_decoding_goes_on_behind_the_images(pair):
    """A token after the prompt stands where transformers puts it; a wrong place is noticed (by Qwen: MiniCPM counts tokens)."""
    pixels = pictures(SIZES["one"])
    images = [pair.engine.vision.prepare(one) for one in pixels]
    ids = [*pair.prompt(images), 20, 21]
    patches, grids = pair.inputs(pixels)
    theirs = hf_vision.logits(pair.eager, ids, patches, grids)
    decoder, state = pair.engine.decoder, pair.engine.session().state
    placed = pair.engine.vision.place(np.array(ids[:-2]), images)
    decoder.hidden(np.array(ids[:-2], np.int32), state, images=placed.part(0, len(ids) - 2))
    shift = placed.end - (len(ids) - 2)
    assert (shift < 0) == (pair.family != "minicpmv4_6")
    state_copy = state.copy()
    rows = [decoder.step(20, state, shift), decoder.step(21, state, shift)]
    both = decoder.logits(decoder.hidden(np.array([20, 21], np.int32), state_copy, shift=shift))
    assert np.array_equal(np.stack(rows), both)
    assert error(torch.from_numpy(both), theirs[-2:]) < 1e-5


def test_a_recorded_step_stands_behind_the_images_too(pair):
    """A quantised model decodes by a list of calls that was recorded at other positions."""
    engine = Engine.load(pair.directory, format="q8_0")
    assert engine.decoder.is_recordable
    images = [engine.vision.prepare(one) for one in pictures(SIZES["one"])]
    ids = pair.prompt(images)
    placed, state = engine.vision.place(np.array(ids), images), engine.session().state
    shift = placed.end - len(ids)
    engine.decoder.hidden(np.array(ids, np.int32), state, images=placed.part(0, len(ids)))
    beside, counted = state.copy(), state.copy()
    rows = [engine.decoder.step(token, state, shift) for token in (20, 21)]
    both = engine.decoder.logits(engine.decoder.hidden(np.array([20, 21], np.int32), beside, shift=shift))
    assert np.array_equal(np.stack(rows), both)
    assert np.array_equal(rows[0], engine.decoder.step(20, counted)) == (shift == 0)


def test_a_pixel_changes_embeddings_and_digest(pair):
    vision, (pixels,) = pair.engine.vision, pictures([(40, 30)])
    changed = pixels.copy()
    changed[20, 10, 1] ^= 128
    first, second = vision.prepare(pixels), vision.prepare(changed)
    assert first.digest != second.digest
    assert not np.array_equal(vision.encode(first), vision.encode(second))
    assert np.array_equal(vision.encode(first), vision.encode(vision.prepare(pixels)))


def test_an_image_is_encoded_once_and_only_where_it_is_needed(pair, monkeypatch):
    vision, images = pair.engine.vision, [pair.engine.vision.prepare(one) for one in pictures(SIZES["three"])]
    ids, encoded, real = np.array(pair.prompt(images)), [], vision.encode

    def encode(image):
        encoded.append(image.digest)
        return real(image)

    monkeypatch.setattr(vision, "encode", encode)
    placed = vision.place(ids, images)
    last = placed.images[-1]
    placed.part(last.end, len(ids))
    assert encoded == []
    for begin in range(last.begin, last.end, 3):
        placed.part(begin, min(begin + 3, last.end))
    assert encoded == [images[-1].digest]


def test_settings_come_from_the_checkpoint(pair):
    config = pair.engine.vision.config
    assert config.image_token_id == hf_vision.IMAGE_TOKEN
    assert config.images.patch_size == config.patch_size == (2 if pair.family == "minicpmv4_6" else 4)
    assert config.insert_layer_id == (1 if pair.family == "minicpmv4_6" else -1)
