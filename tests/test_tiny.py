"""The small trained model end to end: questions whose right answers are known, put to the Q4_0 engine as a user would.

Chat template, tokenizer and greedy generation are the engine's own. An accuracy must not fall below what chance leaves
of the recorded one (golden/tiny/README.md); what must be equal is compared to the token.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from fermi_engine import Engine, SamplingParams, chat
from fermi_engine.convert import convert
from fermi_engine.kernels import dispatch
from fermi_engine.session import Session
from fermi_engine.timeline import Timeline
from fermi_engine.vision.patches import PreparedImage
from tests import hf
from tests.test_cli import run
from tools import tiny_accuracy, tiny_calls
from tools import tiny_image_tasks as sights
from tools import tiny_tasks as tasks
from tools.tiny_image_tasks import IMAGE_TASKS
from tools.tiny_scenes import COLOURS, Scene, Shape
from tools.tiny_tasks import Encoder, Sample

TINY = Path(__file__).resolve().parent.parent / "golden" / "tiny"
SEED = 2  # apart from the samples that training and the recorded table look at
GREEDY = SamplingParams(temperature=0.0, max_tokens=240)
# A line of the table in the README: task, and right answers of samples through each of tiny_accuracy.RUNNERS.
RECORD = re.compile(r"^\| (\w+) " + 3 * r"\| [^|]+ \| (\d+)/(\d+) " + r"\|$", re.MULTILINE)
BUDGETS = {"arithmetic": 64, "tool_call": 400, "turns": 400, "copying": 160}
COUNTS = {"arithmetic": 60,  # many: a sum shows slight faults
           "tool_call": 20, "turns": 20, "copying": 24, **dict.fromkeys(IMAGE_TASKS, 16)}
CHANCE = 1e-6  # of a model as good as the recorded one falling below the limit
LOGITS_CEILING = 1e-4


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    return Encoder.from_directory(TINY)


@pytest.fixture(scope="session")
def pack(tmp_path_factory) -> Path:
    return convert(TINY, tmp_path_factory.mktemp("tiny") / "model.pack", "q4_0")


@pytest.fixture(scope="session")
def engine(pack) -> Engine:
    return Engine.load(pack, threads=1)


@functools.cache
def recorded() -> dict[str, tuple[int, ...]]:
    """Task -> right answers and samples through the reference, the engine in float32, and the Q4_0 engine."""
    rows = RECORD.findall((TINY / "README.md").read_text(encoding="utf-8"))
    return {task: tuple(map(int, numbers)) for task, *numbers in rows}


def share_of(task: str) -> float:
    """(right + 1) / (samples + 2) through the engine: the mean that the samples leave of an unknown share."""
    *_, right, samples = recorded()[task]
    return (right + 1) / (samples + 2)


def fewest(task: str, count: int) -> int:
    """The least number right of `count` that a model as good as the recorded one reaches but for CHANCE."""
    share = share_of(task)
    below = itertools.accumulate(math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(count))
    return sum(1 for _ in takewhile(lambda chance: chance <= CHANCE, below))


def said(engine: Engine, ids: Sequence[int], thinking: bool, session: Session | Timeline | None = None,
         images: Sequence[PreparedImage] = ()) -> tuple[str, str]:
    """Reasoning and answer of greedy generation after `ids`; an answer that does not end by itself is marked."""
    stream = engine.generate(ids, GREEDY, images=images, session=session, reasoning_open=thinking)
    pieces = list(stream)
    ending = "" if stream.finish.reason == "eos" else f" [{stream.finish.reason}]"
    return "".join(piece.reasoning for piece in pieces), "".join(piece.text for piece in pieces) + ending


def encode(encoder: Encoder, messages: tasks.Messages, **options: bool) -> list[int]:
    return chat.encode(encoder.tokenizer, encoder.template, messages, **options)


def is_right(sample: Sample, reasoning: str, answer: str) -> bool:
    return tasks.check(sample, f"{reasoning}{chat.THINK_CLOSE}{answer}" if sample.thinking else answer)


def drawn(encoder: Encoder, task: str) -> list[Sample]:
    draw, budget = (sights.drawn, 160) if task in IMAGE_TASKS else (tasks.drawn, BUDGETS[task])
    return [draw(task, "held", SEED, i, encoder.measure, budget) for i in range(COUNTS[task])]


def answers(engine: Engine, encoder: Encoder, samples: list[Sample]) -> list[tuple[str, str]]:
    return [said(engine, encoder.prompt(sample), sample.thinking, images=encoder.images(sample)) for sample in samples]


def assert_accurate(task: str, samples: list[Sample], replies: list[tuple[str, str]]) -> None:
    wrong = [(sample.expected, *reply) for sample, reply in zip(samples, replies, strict=True)
             if not is_right(sample, *reply)]
    right, least = len(samples) - len(wrong), fewest(task, len(samples))
    assert right >= least, f"{right} of {len(samples)} right, at least {least} expected; wrong: {wrong[:3]}"


def test_the_recorded_accuracies_meet_their_targets():
    assert list(recorded()) == list(tiny_accuracy.COUNTS)
    for task, (right, samples, *engines) in recorded().items():
        assert right / samples >= tiny_accuracy.TARGETS.get(task, 0.95)
        for right_engine, samples_engine in zip(engines[::2], engines[1::2], strict=True):
            assert right_engine / samples_engine >= right / samples - tiny_accuracy.MOST_LOSS


def test_a_model_as_good_as_recorded_stays_above_the_limits():
    for task, count in (*COUNTS.items(), ("needle_2k", 36), ("needle_10k", 9)):
        draws = np.random.default_rng(0).binomial(count, share_of(task), 200_000)
        assert (draws < fewest(task, count)).mean() <= 1e-4  # a hundred times CHANCE: 20 of the draws
        assert (draws < fewest(task, count) + 2).any(), "the limit lies too low to be one"
        assert fewest(task, count) > count / 2


# Needles


def needles(engine: Engine, encoder: Encoder, tokens: int, indices: range) -> dict[float, list[bool]]:
    """Depth -> whether the code there came back, one for each context; a context is read once for all questions."""
    found: dict[float, list[bool]] = {depth: [] for depth in tasks.DEPTHS}
    for index in indices:
        samples = tasks.drawn_row("held", SEED, index, encoder.measure, tokens)
        prompts = [encoder.prompt(sample) for sample in samples]
        shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))
        assert shared > tokens - 2 * tasks.ROW_TOKENS
        session = engine.session()
        session.prefill(prompts[0][:shared])
        snapshot = session.snapshot()
        for depth, sample, prompt in zip(tasks.DEPTHS, samples, prompts, strict=True):
            session.restore(snapshot)
            found[depth].append(is_right(sample, *said(engine, prompt[shared:], False, session)))
    return found


def assert_found(task: str, found: dict[float, list[bool]]) -> None:
    hits = [hit for row in found.values() for hit in row]
    least, each = fewest(task, len(hits)), fewest(task, len(hits) // len(found))
    assert sum(hits) >= least, f"{sum(hits)} of {len(hits)} needles, at least {least} expected: {found}"
    assert all(sum(row) >= each for row in found.values()), f"a depth with less than {each}: {found}"


def test_needles_at_every_depth_of_2k_tokens(engine, encoder):
    assert_found("needle_2k", needles(engine, encoder, 2000, range(4)))


def test_needles_at_every_depth_of_10k_tokens(engine, encoder):
    assert_found("needle_10k", needles(engine, encoder, 10000, range(1)))


@pytest.mark.soak
def test_many_needles_of_10k_tokens(engine, encoder):
    assert_found("needle_10k", needles(engine, encoder, 10000, range(1, 9)))


@pytest.mark.soak
def test_the_recorded_table_meets_its_targets(capsys):
    assert tiny_accuracy.main([str(TINY)]) == 0


# Short tasks


def test_arithmetic_with_the_steps_apart_from_the_answer(engine, encoder):
    samples = drawn(encoder, "arithmetic")
    replies = answers(engine, encoder, samples)
    assert_accurate("arithmetic", samples, replies)
    apart = [answer.strip().isdecimal() and chat.THINK_CLOSE not in reasoning for reasoning, answer in replies]
    worked = [f"{reasoning}{chat.THINK_CLOSE}{answer}" == sample.answer
              for sample, (reasoning, answer) in zip(samples, replies, strict=True)]
    least = fewest("arithmetic", len(samples))
    assert sum(apart) >= least
    assert sum(worked) >= least, f"{sum(worked)} of {len(samples)} worked out step by step, at least {least} expected"


def test_tool_calls_parse_and_fit_their_schema(engine, encoder):
    samples = drawn(encoder, "tool_call")
    replies = answers(engine, encoder, samples)
    assert_accurate("tool_call", samples, replies)
    fitting = 0
    for sample, (_, answer) in zip(samples, replies, strict=True):
        content, calls = chat.parse_tool_calls(answer, sample.tools)
        schemas = {tool["function"]["name"]: tool for tool in sample.tools}
        fitting += not content.strip() and len(calls) == 1 and calls[0].name in schemas \
            and tiny_calls.fits_schema(calls[0].arguments, schemas[calls[0].name])
    assert fitting >= fewest("tool_call", len(samples))


def test_questions_about_earlier_turns(engine, encoder):
    samples = drawn(encoder, "turns")
    assert_accurate("turns", samples, answers(engine, encoder, samples))


def test_copies_of_words_numbers_scripts_and_emoji(engine, encoder):
    samples = drawn(encoder, "copying")
    assert any(ord(letter) >= 0x1F000 for sample in samples for letter in sample.expected)
    assert_accurate("copying", samples, answers(engine, encoder, samples))


@pytest.mark.parametrize("text", ["🐄 and 🦔 in 東京", "世界 😀 4821 Vinevik", "🐢 修 Heldazon 957"])
def test_a_given_text_comes_back(engine, encoder, text):
    ids = encode(encoder, [tasks.user(f"Repeat exactly: {text}")], enable_thinking=False)
    assert said(engine, ids, False)[1] == text


def test_a_talk_that_goes_on(engine, encoder):
    """Turn by turn on one timeline, with what the model itself has answered; nothing before the last answer is read twice."""
    timeline, messages, held = Timeline(engine), [], 0
    told = {"dog": "Vinevik", "room": "4821", "boat": "Bepirad"}
    for kind, value in told.items():
        fact = f"My {kind} is called {value}." if value.isalpha() else f"My {kind} number is {value}."
        messages += [tasks.user(fact), tasks.assistant(f"Noted, your {kind}.")]
        for asked in list(told)[: list(told).index(kind) + 1]:
            question = f"What is my {asked} called?" if told[asked].isalpha() else f"What is my {asked} number?"
            messages.append(tasks.user(question))
            timeline.mark = len(encode(encoder, messages, add_generation_prompt=False))
            ids = encode(encoder, messages, enable_thinking=False)
            timeline.begin()
            _, answer = said(engine, ids, False, timeline)
            assert answer.removesuffix(".").split(" ")[-1] == told[asked], question
            assert timeline.evaluated == len(ids) - held
            held = timeline.mark
            messages.append(tasks.assistant(answer))
    assert held > 150


def test_earlier_turns_through_a_session_that_holds_them(engine, encoder):
    for sample in drawn(encoder, "turns")[:4]:
        prompt = encoder.prompt(sample)
        earlier = encode(encoder, sample.messages[:-1], add_generation_prompt=False)
        assert prompt[: len(earlier)] == earlier
        session = engine.session()
        session.prefill(earlier)
        assert said(engine, prompt[len(earlier) :], sample.thinking, session) == said(engine, prompt, sample.thinking)


# Images


@pytest.mark.parametrize("task", IMAGE_TASKS)
def test_questions_about_pictures(engine, encoder, task):
    samples = drawn(encoder, task)
    assert_accurate(task, samples, answers(engine, encoder, samples))


@pytest.mark.soak
@pytest.mark.parametrize("task", IMAGE_TASKS)
def test_many_questions_about_pictures(engine, encoder, task):
    samples = [sights.drawn(task, "held", SEED + 1, i) for i in range(200)]
    assert_accurate(task, samples, answers(engine, encoder, samples))


def test_without_its_picture_a_question_is_guessed(engine, encoder):
    """The answers come from the pixels: with one grey picture for all, few are right."""
    samples = drawn(encoder, "colour")
    grey = [dataclasses.replace(s, images=tuple(dataclasses.replace(view, shapes=()) for view in s.images)) for s in samples]
    hits = sum(is_right(s, *reply) for s, reply in zip(samples, answers(engine, encoder, grey), strict=True))
    assert hits <= len(samples) / 2


def picture(path: Path, *shapes: tuple[str, str, int]) -> str:
    """Draw shapes (kind, colour, centre across) side by side into a PNG file."""
    drawn = tuple(Shape(kind, colour, COLOURS[colour], x, 75, 28) for kind, colour, x in shapes)
    Image.fromarray(Scene(150, 220, (128, 128, 128), (128, 128, 128), 0, 0, drawn).pixels()).save(path)
    return str(path)


def asked(capsys, pack: Path, question: str, *images: str) -> str:
    """What `fermi-engine generate` prints."""
    shown = [part for image in images for part in ("--image", image)]
    status, out, err = run(capsys, "generate", "--model", pack, "--no-think", "--temp", "0", *shown, "--prompt", question)
    assert status == 0, err
    return out.strip()


def test_a_second_image_changes_the_answer(pack, tmp_path, capsys):
    first = picture(tmp_path / "first.png", ("circle", "red", 60))
    blue = picture(tmp_path / "blue.png", ("star", "yellow", 50), ("circle", "blue", 150))
    green = picture(tmp_path / "green.png", ("circle", "green", 110))
    plain, other = "What colour is the circle?", "What colour is the circle in the second image?"
    assert asked(capsys, pack, plain, first) == "The circle is red."
    assert asked(capsys, pack, other, first, blue) == "The circle is blue."
    assert asked(capsys, pack, other, first, green) == "The circle is green."
    assert asked(capsys, pack, other, green, first) == "The circle is red."
    assert asked(capsys, pack, "What colour is the circle in the first image?", first, blue) == "The circle is red."


# The same text whatever way it is computed


@pytest.fixture(scope="module")
def few(engine, encoder) -> list[tuple[Sample, list[int], tuple[str, str]]]:
    """A prompt of each task with what one thread of the best backend answers; long enough for more than one block."""
    samples = [drawn(encoder, task)[0] for task in BUDGETS]
    samples.append(tasks.drawn_row("held", SEED, 90, encoder.measure, 500)[4])
    return [(s, encoder.prompt(s), said(engine, encoder.prompt(s), s.thinking)) for s in samples]


def test_those_texts_are_right(few):
    assert [sample.task for sample, _, reply in few if is_right(sample, *reply)] == [*BUDGETS, "needle"]


@pytest.mark.parametrize("backend", dispatch.supported())
def test_what_is_seen_is_one_for_backends_and_threads(pack, engine, encoder, backend):
    sample = drawn(encoder, sights.TWO)[0]
    prompt, images = encoder.prompt(sample), encoder.images(sample)
    reply = said(engine, prompt, sample.thinking, images=images)
    assert is_right(sample, *reply)
    for threads in (1, 2):
        other = Engine.load(pack, backend=backend, threads=threads)
        assert said(other, prompt, sample.thinking, images=images) == reply


@pytest.mark.parametrize("backend", dispatch.supported())
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_greedy_text_is_one_for_backends_and_threads(pack, few, backend, threads):
    other = Engine.load(pack, backend=backend, threads=threads)
    for sample, prompt, reply in few if threads == 1 else few[::2]:
        assert said(other, prompt, sample.thinking) == reply, sample.task


@pytest.mark.parametrize("cuts", [(1,), (-1,), (31, 32, 33), (16, 48, -7)], ids=str)
def test_greedy_text_is_one_for_cuts_of_the_prompt(engine, few, cuts):
    for sample, prompt, reply in few:
        session = engine.session()
        edges = [0, *sorted({cut % len(prompt) for cut in cuts})]
        for begin, end in itertools.pairwise(edges):
            session.prefill(prompt[begin:end])
        assert said(engine, prompt[edges[-1] :], sample.thinking, session) == reply, sample.task


# transformers


@pytest.fixture(scope="module")
def theirs():
    with hf.threads(1), torch.no_grad():
        yield load(transformers.Qwen3_5MoeForConditionalGeneration, "eager")


def load(cls, attention: str):
    """The model in float32; fails where the files and the class do not agree on every tensor."""
    model, notes = cls.from_pretrained(TINY, dtype=torch.float32, attn_implementation=attention, output_loading_info=True)
    assert not any(notes.values()), notes
    return model.eval()


@pytest.mark.parametrize("cls", [transformers.Qwen3_5MoeForConditionalGeneration, transformers.AutoModelForCausalLM])
def test_transformers_loads_every_tensor_and_no_other(cls):
    model = load(cls, "sdpa")
    assert model.config.get_text_config().num_hidden_layers == 8
    assert "Random" not in type(model).__name__


def test_transformers_tokenizer_and_template_give_the_same_ids(encoder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    for task in BUDGETS:
        for sample in drawn(encoder, task)[:3]:
            ids = tokenizer.apply_chat_template(sample.messages, tools=sample.tools, enable_thinking=sample.thinking,
                                                add_generation_prompt=True, return_dict=True)["input_ids"]
            assert ids == encoder.prompt(sample)


def test_logits_of_reference_and_engine_are_those_of_transformers(theirs, few, tmp_path):
    """As for random models: at most twice what transformers differs from itself, over all prompts."""
    reference = tiny_accuracy.Reference(TINY).decoder
    ours = Engine.load(convert(TINY, tmp_path / "f32.pack", "f32"), threads=1)
    sdpa = load(transformers.Qwen3_5MoeForConditionalGeneration, "sdpa")
    spread, apart = [], {"reference": [], "engine": []}
    for _, prompt, _ in few:
        runs = [hf.logits(theirs, prompt), hf.logits(sdpa, prompt)]
        if len(spread) == 2:  # one prompt of middle length: two threads of torch take seconds on a busy machine
            with hf.threads(2):
                runs.append(hf.logits(theirs, prompt))
        spread.append(max(error(a, b) for a, b in itertools.combinations(runs, 2)))
        apart["reference"].append(error(reference.forward(prompt)[0], runs[0]))
        apart["engine"].append(error(torch.from_numpy(ours.session().logits(prompt)), runs[0]))
        print(f"T {len(prompt):3d}: transformers with itself {spread[-1]:.1e}, reference {apart['reference'][-1]:.1e}, "
              f"engine {apart['engine'][-1]:.1e}")
    for name, found in apart.items():
        assert max(found) <= min(2 * max(spread), LOGITS_CEILING), name


def test_logits_behind_images_are_those_of_transformers(theirs, encoder, tmp_path):
    """Tower, places among the text and positions: two pictures of different sides, as near to the released class as texts are."""
    sdpa = load(transformers.Qwen3_5MoeForConditionalGeneration, "sdpa")
    reference, spread, apart = tiny_accuracy.Reference(TINY), [], {"reference": [], "engine": []}
    ours = Engine.load(convert(TINY, tmp_path / "f32.pack", "f32"), threads=1)
    for sample in drawn(encoder, sights.TWO)[:3]:
        ids, images = encoder.prompt(sample), encoder.images(sample)
        runs = [picture_logits(model, ids, images, encoder.image_token) for model in (theirs, sdpa)]
        spread.append(error(*runs))
        tail = -8
        state = reference.read(ids[:tail], images)
        apart["reference"].append(error(torch.from_numpy(reference.logits(state, ids[tail:])), runs[0][tail:]))
        apart["engine"].append(error(torch.from_numpy(ours.session().logits(ids, images=images)), runs[0]))
    print(f"transformers with itself {max(spread):.1e}, " + ", ".join(f"{name} {max(x):.1e}" for name, x in apart.items()))
    for name, found in apart.items():
        assert max(found) <= min(2 * max(spread), LOGITS_CEILING), name


def picture_logits(model, ids: list[int], images: Sequence[PreparedImage], image_token: int) -> torch.Tensor:
    """[T, vocab] of the released class in float32."""
    patches = torch.from_numpy(np.concatenate([image.patches for image in images]))
    grids = torch.tensor([(1, *image.grids[0]) for image in images])
    kinds = (torch.tensor([ids]) == image_token).int()
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), pixel_values=patches, image_grid_thw=grids, mm_token_type_ids=kinds).logits[0]


def test_transformers_generates_the_right_answer(theirs, encoder):
    sample = drawn(encoder, "arithmetic")[0]
    answer = encoder.answer(sample)[:-1]  # hf.greedy never ends a turn
    assert hf.greedy(theirs, encoder.prompt(sample), len(answer)) == answer


def error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())
