"""Pictures of coloured shapes, questions about them, and the vision tower in the form that trains."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fermi_engine.config import ModelConfig
from fermi_engine.vision.config import VisionConfig, vision_shapes
from fermi_engine.vision.patches import prepare
from reference.decoder import Decoder
from reference.vision_qwen import QwenVision, text_positions
from tests import hf
from tools import tiny_batches, tiny_files, tiny_model, tiny_scenes, tiny_tokenizer, tiny_tower, train_tiny
from tools import tiny_image_tasks as sights
from tools.tiny_quantise import Master
from tools.tiny_scenes import COLOURS, SHAPES, Scene, Shape
from tools.tiny_tasks import Encoder, Sample, check

# Sums of a few hundred float64 terms a layer, twelve layers, amplified by norms: a million roundings, none near it.
FLOAT64_NOISE = 1e6 * 2.0**-53
SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2}
LEAST_TOKENS = 12  # of a picture: 64 x 64 pixels, rounded down on both sides


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    with hf.threads(1):
        yield


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return tiny_tokenizer.encoder(tiny_tokenizer.tokenizer_files())


def some(task: str, split: str = "held", count: int = 40, tokens: int = 160) -> list[Sample]:
    return [sights.drawn(task, split, 3, i, None, tokens) for i in range(count)]


def question(sample: Sample) -> str:
    content = sample.messages[-1]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


# Pictures


def test_shapes_are_drawn_where_they_are_said_to_be():
    for kind in SHAPES:
        shape = Shape(kind, "red", (200, 30, 30), 40, 25, 16)
        pixels = Scene(60, 90, (120, 120, 120), (120, 120, 120), 0, 0, (shape,)).pixels()
        rows, columns = np.nonzero((pixels == shape.rgb).all(-1))
        assert abs(rows.mean() - 25) < 4, kind  # a triangle's pixels lie low
        assert abs(columns.mean() - 40) < 1, kind
        assert 25 - 16 <= rows.min() <= 25 - 0.8 * 16, kind
        assert (pixels[0, 0] == 120).all()
        assert 13 <= np.ptp(columns) / 2 <= 16


def test_shapes_look_different():
    masks = {kind: Scene(60, 60, (0, 0, 0), (0, 0, 0), 0, 0, (Shape(kind, "", (255, 255, 255), 30, 30, 24),)).pixels()[..., 0] > 0
             for kind in SHAPES}
    for a, b in itertools.combinations(SHAPES, 2):
        both = (masks[a] & masks[b]).sum() / (masks[a] | masks[b]).sum()
        assert both < 0.85, f"{a} and {b} share {both:.0%}"


def test_colours_keep_apart_from_each_other_and_from_backgrounds():
    """Even when both stray as far as they may."""
    strayed = 2 * tiny_scenes.TINT
    for a, b in itertools.combinations([*COLOURS.values(), *tiny_scenes.BACKGROUNDS], 2):
        if not (a in tiny_scenes.BACKGROUNDS and b in tiny_scenes.BACKGROUNDS):
            assert np.abs(np.subtract(a, b)).max() > strayed + tiny_scenes.NOISE


def test_shapes_lie_inside_and_do_not_touch():
    for task in sights.IMAGE_TASKS:
        for view in (view for sample in some(task) for view in sample.images):
            for s in view.shapes:
                assert s.radius <= s.x < view.width - s.radius
                assert s.radius <= s.y < view.height - s.radius
            for a, b in itertools.combinations(view.shapes, 2):
                assert (a.x - b.x) ** 2 + (a.y - b.y) ** 2 > (a.radius + b.radius) ** 2


def test_grids_differ_and_fit_the_tables(encoder):
    views = [view for task in sights.IMAGE_TASKS for sample in some(task) for view in sample.images]
    images = [prepare(view.pixels(), encoder.settings) for view in views]
    assert {image.grids[0] for image in images} <= set(tiny_tower.grids(sights.IMAGE_TOKENS))
    assert len({image.grids[0] for image in images}) > 8
    assert sum(height != width for image in images for height, width in image.grids) > len(images) / 2
    assert all(LEAST_TOKENS <= image.tokens[0] <= sights.IMAGE_TOKENS for image in images)
    assert any(view.width < 8 * image.grids[0][1] for view, image in zip(views, images, strict=True)), "none is enlarged"


# Questions


@pytest.mark.parametrize("task", sights.IMAGE_TASKS)
def test_the_same_arguments_give_the_same_sample(task):
    assert some(task) == some(task)
    assert np.array_equal(some(task)[0].images[-1].pixels(), some(task)[0].images[-1].pixels())
    assert len({(question(s), s.images) for s in some(task)}) == 40


@pytest.mark.parametrize("task", sights.IMAGE_TASKS)
def test_answers_are_true_of_the_picture(task):
    for split in ("train", "held"):
        for sample in some(task, split, tokens=256):
            asked = [m["content"] if isinstance(m["content"], str) else m["content"][-1]["text"]
                     for m in sample.messages if m["role"] == "user"]
            told = [m["content"] for m in sample.messages if m["role"] == "assistant"] + [sample.expected]
            for text, reply in zip(asked, told, strict=True):
                which = 1 if "second image" in text else 0
                assert true_of(sample.images[which], text, reply), (text, reply)
            assert check(sample, sample.answer)
            assert not check(sample, sample.answer.replace(sample.expected, sample.expected[:-2] + "x."))


def true_of(view: Scene, text: str, reply: str) -> bool:
    """By looking at the shapes, and at the words alone."""
    text = re.sub(r" in the (first|second) image", "", text)
    kinds = Counter(s.kind for s in view.shapes)
    if found := re.fullmatch(r"What colour is the (\w+)\?", text):
        return [f"The {s.kind} is {s.colour}." for s in view.shapes if s.kind == found[1]] == [reply]
    if found := re.fullmatch(r"Which shape is (?!on)(\w+)\?", text):
        return [f"The {s.colour} shape is a {s.kind}." for s in view.shapes if s.colour == found[1]] == [reply]
    if found := re.fullmatch(r"How many (\w+?)(?:es|s) are there\?", text):
        number = kinds[found[1]] or kinds[f"{found[1]}e"]
        return re.findall(r"\d", reply) == [str(number)] and reply.startswith("There is 1 " if number == 1 else "There are ")
    if found := re.fullmatch(r"Is the (\w+) left or right of the (\w+)\?", text):
        a, b = (next(s for s in view.shapes if s.kind == kind) for kind in found.groups())
        return reply == f"The {a.kind} is {'left' if a.x < b.x else 'right'} of the {b.kind}."
    (where,) = re.fullmatch(r"Which shape is on the (left|right)\?", text).groups()
    a, b = sorted(view.shapes, key=lambda s: s.x)
    return reply == f"The {(a if where == 'left' else b).kind} is on the {where}."


@pytest.mark.parametrize("task", sights.ABOUT)
def test_training_never_asks_what_is_held_out(task):
    for split in ("train", "held"):
        for sample in some(task, split, tokens=256):
            every = {q.text + "?": q for kind in sights.ABOUT.values() for q in kind(sample.images[0])}
            asked = [m["content"] if isinstance(m["content"], str) else m["content"][-1]["text"]
                     for m in sample.messages if m["role"] == "user"]
            assert [every[text].held for text in asked] == [split == "held"] * len(asked)


def test_every_answer_of_a_count_is_trained_and_held_out():
    for split in ("train", "held"):
        replies = Counter(int(re.findall(r"\d", s.expected)[0]) for s in some("count", split, 150))
        assert set(replies) == set(range(sights.MOST_COUNTED + 1))


def test_the_other_image_would_often_be_answered_otherwise():
    samples = some(sights.TWO, count=80)
    assert all(len(sample.images) == 2 for sample in samples)
    assert Counter("second" in question(s) for s in samples)[True] in range(30, 70)
    otherwise = 0
    for sample in samples:
        plain = re.sub(r" in the (first|second) image\?", "", question(sample))
        other = sample.images["first" in question(sample)]
        rivals = [q.reply for kind in sights.ABOUT.values() for q in kind(other) if q.text == plain]
        otherwise += bool(rivals) and rivals != [sample.expected]
    assert otherwise > 80 * (sights.CONTRAST_SHARE - 0.2)


def test_a_prompt_holds_as_many_places_as_its_images_have_tokens(encoder):
    for sample in (*some("side", count=5), *some(sights.TWO, count=5)):
        ids = encoder.prompt(sample)
        assert ids.count(encoder.image_token) == sum(image.tokens[0] for image in encoder.images(sample))
        start = encoder.tokenizer.id_of("<|vision_start|>")
        assert ids.count(start) == len(sample.images)


# The tower


@pytest.fixture(scope="module")
def config() -> tuple[ModelConfig, VisionConfig]:
    raw = tiny_files.config_json(**SMALL)
    text = ModelConfig.from_hf(raw)
    return text, VisionConfig.from_hf(raw, text.hidden_size, tiny_files.PREPROCESSOR)


@pytest.fixture(scope="module")
def rows(encoder) -> list[Sample]:
    return [*some("count", "train", 2), *some(sights.TWO, "train", 2, 200)]


def test_one_frame_of_bytes_holds_a_still_picture(encoder, rows):
    for image in (image for sample in rows for image in encoder.images(sample)):
        held = tiny_tower.pictures([([encoder.image_token] * image.tokens[0], [image])], 64, encoder.image_token,
                                   sights.IMAGE_TOKENS)
        back = tiny_tower.samples(torch.float32)[held.codes.astype(np.int64)].unflatten(1, (3, 1, -1)).expand(-1, -1, 2, -1)
        assert np.array_equal(back.flatten(1).numpy(), image.patches)


def test_training_form_of_tower_and_model_equals_the_reference(encoder, rows, config):
    """In float64, images of different grids in one batch, rows of different lengths; norms and biases are away from their
    starts."""
    text, vision = config
    generator = torch.Generator().manual_seed(1)
    fresh = tiny_model.initial(text, 0) | tiny_tower.initial(vision, 0)
    params = {name: w.double() + 0.05 * torch.randn(w.shape, generator=generator).double() for name, w in fresh.items()}
    whole = [(encoder.marked(sample)[0], encoder.images(sample)) for sample in rows]
    length = max(len(ids) for ids, _ in whole) + 3
    held = tiny_tower.pictures(whole, length, encoder.image_token, sights.IMAGE_TOKENS)
    assert len({image.grids[0] for _, images in whole for image in images}) > 2
    ids = np.zeros((len(whole), length), np.int16)
    for row, (tokens, _) in zip(ids, whole, strict=True):
        row[: len(tokens)] = tokens
    batch = train_tiny.sent(tiny_batches.Batch(ids, np.zeros(ids.shape, np.uint8), held), "cpu")
    model = tiny_model.Model(text, params, torch.float64, vision)
    tower = {name.removeprefix("visual."): w for name, w in params.items() if name.startswith("visual.")}
    tower["patch_embed.proj.weight"] = tower["patch_embed.proj.weight"].flatten(1)
    with torch.no_grad():
        got = model.head(model.hidden(batch.ids, batch.images))
        for row, (tokens, images) in zip(got, whole, strict=True):
            grids = [image.grids[0] for image in images]
            seen = QwenVision(vision, tower).forward(torch.from_numpy(np.concatenate([i.patches for i in images])), grids)
            decoder, t = Decoder(text, params), torch.tensor(tokens)
            embedded = decoder.embed(t)
            embedded[t == encoder.image_token] = seen
            want, _ = decoder.forward(t, None, text_positions(tokens, encoder.image_token, grids)[0], embedded=embedded)
            assert (row[: len(tokens)] - want).abs().max() < FLOAT64_NOISE * want.abs().max()


def test_towers_tensors_are_those_of_the_configuration(config):
    _, vision = config
    assert {name: tuple(w.shape) for name, w in tiny_tower.initial(vision, 0).items()} == vision_shapes(vision)


# Training


def test_a_batch_carries_its_images(encoder):
    batch = tiny_batches.make_batch(encoder, tiny_batches.Order(3, 0, 256, 3))
    assert len(batch.images.lengths) == 6
    assert (batch.ids.reshape(-1)[batch.images.slots] == encoder.image_token).all()
    assert len(batch.images.slots) * 4 == len(batch.images.codes) == batch.images.lengths.sum()
    assert (batch.kinds[batch.ids == encoder.image_token] == tiny_batches.PADDING).all()
    assert batch.images.longest % tiny_tower.ALIGNED == 0


def test_training_on_images_moves_the_tower_and_a_checkpoint_starts_it_again(encoder, tmp_path):
    """Eight steps on sight of one batch: the loss falls, and what is exported is what a later run begins with."""
    settings = train_tiny.Settings(tokens=10**6, rate=4e-3, stage="images", model=SMALL)
    trainer = train_tiny.Trainer(settings, tiny_tokenizer.tokenizer_files(), "cpu")
    before = {name: w.clone() for name, w in trainer.master.views().items()}
    batch = tiny_batches.make_batch(encoder, tiny_batches.Order(0, 0, 128, 4))
    trainer.tokens = 10**5  # behind the warm-up
    said = [float(trainer.train_step(batch)[0]) for _ in range(8)]
    assert said[-1] < said[0] - 1
    still = [name for name, w in trainer.master.views().items() if torch.equal(w, before[name])]
    assert not still
    trainer.export(tmp_path / "model")
    again = train_tiny.Trainer(dataclasses.replace(settings, start=str(tmp_path / "model")), trainer.texts, "cpu")
    assert all(torch.equal(w, trainer.master.views()[name].bfloat16().float()) for name, w in again.master.views().items())
    other = dataclasses.replace(settings, start=str(tmp_path / "model"), model={**SMALL, "hidden_size": 96})
    with pytest.raises(tiny_files.StateError, match="expected"):
        train_tiny.Trainer(other, trainer.texts, "cpu")
    with pytest.raises(tiny_files.StateError, match="holds no model"):
        train_tiny.Trainer(dataclasses.replace(settings, start=str(tmp_path)), trainer.texts, "cpu")
    trainer.master.flat.mul_(3)
    trainer.export(tmp_path / "thrice")
    tripled = load_file(tmp_path / "thrice" / "model.safetensors")
    arguments = ["--mean", tmp_path / "model", tmp_path / "thrice", "--export", tmp_path / "between"]
    assert train_tiny.main([str(argument) for argument in arguments]) == 0
    between = load_file(tmp_path / "between" / "model.safetensors")
    assert all(torch.allclose(w.float(), tripled[name].float() * 2 / 3, rtol=2**-7) for name, w in between.items())
    assert {file.name for file in (tmp_path / "between").iterdir()} == {file.name for file in (tmp_path / "model").iterdir()}


def test_text_steps_leave_the_tower_alone(encoder, config):
    text, vision = config
    master = Master.of(tiny_model.initial(text, 0) | tiny_tower.initial(vision, 0))
    seen = master.seen(torch.float32)
    batch = train_tiny.sent(tiny_batches.make_batch(encoder, tiny_batches.Order(0, 0, 64, 2)), "cpu")
    said, _ = train_tiny.losses(tiny_model.Model(text, seen, torch.float32, vision), batch)
    said.backward()
    gradients = master.views(master.gradient(seen))
    assert not any(g.any() for name, g in gradients.items() if name.startswith("visual."))
    assert all(g.any() for name, g in gradients.items() if name.endswith("q_proj.weight"))


def test_held_out_pictures_come_in_batches(encoder, monkeypatch):
    monkeypatch.setattr(tiny_batches, "HELD_SIZES", {})
    monkeypatch.setattr(tiny_batches, "HELD_ROWS", {})
    held = tiny_batches.held_batches(encoder, 0.02, images=True)
    assert set(held) == set(sights.IMAGE_TASKS)
    for parts in held.values():
        assert all(batch.images is not None and len(batch.images.lengths) >= len(batch.ids) for batch in parts)
    assert tiny_batches.held_batches(encoder, 0.02) == {}


def test_some_draws_by_weight():
    rng = Random(1)
    questions = [sights.Question(str(i), "", (), weight) for i, weight in enumerate((1.0, 3.0))]
    first = Counter(sights._some(rng, questions, 1)[0].text for _ in range(4000))
    assert abs(first["1"] / 4000 - 0.75) < 5 * (0.75 * 0.25 / 4000) ** 0.5
