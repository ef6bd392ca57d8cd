"""Questions about pictures of coloured shapes: which colour, which shape, how many, left or right, and about one of two pictures.

What is asked for (shape, colour and place; shape and count; pair, colours and order) falls by a hash into a part for
training and a held-out part, so that a held-out question is never asked in training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import NamedTuple

from tools import tiny_words as w
from tools.tiny_scenes import COLOURS, PLURALS, SHAPES, Scene, Shape, scene
from tools.tiny_tasks import THINKING_SHARE, Measure, Messages, Sample, assistant, user

SIDE_GAP = 0.15  # of the width, at least between centres that are left and right of each other
SECOND_SHARE, CONTRAST_SHARE = 0.6, 0.7  # of questions about the second picture; of those the other would answer otherwise
MOST_COUNTED, MOST_OTHERS, NONE_WEIGHT = 4, 1, 0.15
MOST_QUESTIONS = 5
QUESTION_TOKENS = 46  # the longest question and answer with their tags
IMAGE_TOKENS = 49  # of the largest picture


class Question(NamedTuple):
    """text: what is asked, without its question mark; keys: what hashes put into one part or the other; weight: how often it is
    drawn."""

    text: str
    reply: str
    keys: tuple[str, ...]
    weight: float = 1.0

    @property
    def held(self) -> bool:
        """Whether it belongs to the part that training never asks for: every key does."""
        return all(map(w.held_out, self.keys))


def colour(view: Scene) -> Iterator[Question]:
    """Of every shape that is alone of its kind, its colour."""
    for shape in _alone(view, lambda s: s.kind):
        yield Question(f"What colour is the {shape.kind}", f"The {shape.kind} is {shape.colour}.", _one(view, shape))


def shape(view: Scene) -> Iterator[Question]:
    """Of every colour that one shape alone has, the shape."""
    for found in _alone(view, lambda s: s.colour):
        yield Question(f"Which shape is {found.colour}", f"The {found.colour} shape is a {found.kind}.", _one(view, found))


def count(view: Scene) -> Iterator[Question]:
    """How many there are of every kind, none included.

    Numbers are few: were (kind, number, others) held out alone, training would teach that this answer is never right.
    """
    for kind in SHAPES:
        counted = [s for s in view.shapes if s.kind == kind]
        number, others = len(counted), len(view.shapes) - len(counted)
        if number <= MOST_COUNTED:
            reply = f"There is 1 {kind}." if number == 1 else f"There are {number} {PLURALS[kind]}."
            places = sorted(f"{s.colour} {view.cell(s)}" for s in counted or view.shapes)
            yield Question(f"How many {PLURALS[kind]} are there", reply,
                           (f"count {kind} {number} {others}", f"count {kind} {' '.join(places)}"), max(number, NONE_WEIGHT))


def side(view: Scene) -> Iterator[Question]:
    """Which of two shapes, each alone of its kind, is on which side; of two in all, which is left and which is right."""
    known = _alone(view, lambda s: s.kind)
    for a in known:
        for b in known:
            if abs(a.x - b.x) < SIDE_GAP * view.width or a is b:
                continue
            where = "left" if a.x < b.x else "right"
            yield Question(f"Is the {a.kind} left or right of the {b.kind}", f"The {a.kind} is {where} of the {b.kind}.",
                           (f"side {a.kind} {a.colour} {b.kind} {b.colour} {where}",))
            if len(view.shapes) == 2:
                yield Question(f"Which shape is on the {where}", f"The {a.kind} is on the {where}.",
                               (f"on {a.kind} {a.colour} {b.kind} {b.colour} {where}",))


def _alone(view: Scene, by: Callable[[Shape], str]) -> list[Shape]:
    times = Counter(map(by, view.shapes))
    return [s for s in view.shapes if times[by(s)] == 1]


def _one(view: Scene, one: Shape) -> tuple[str]:
    return (f"{one.kind} {one.colour} {view.cell(one)}",)


ABOUT: dict[str, Callable[[Scene], Iterator[Question]]] = {"colour": colour, "shape": shape, "count": count, "side": side}
TWO = "second_image"
IMAGE_TASKS = (*ABOUT, TWO)


def view_for(rng: Random, task: str) -> Scene:
    """A picture that suits questions of a task: a few different shapes, or several of a kind among others."""
    if task != "count":
        number = rng.randint(2 if task == "side" else 1, 4)
        return scene(rng, list(zip(rng.sample(list(SHAPES), number), rng.sample(list(COLOURS), number), strict=True)))
    kind, *others = rng.sample(list(SHAPES), 1 + rng.randint(0, MOST_OTHERS))
    number = rng.randint(0 if others else 1, MOST_COUNTED)
    same = rng.choice(list(COLOURS)) if rng.random() < 0.5 else None
    wanted = [(k, same or rng.choice(list(COLOURS))) for k in [kind] * number + others]
    rng.shuffle(wanted)
    return scene(rng, wanted)


def about_one(rng: Random, task: str, held: bool, tokens: int) -> Sample:
    """One picture and a question of a task; in training more questions of any task come before it, where `tokens` have room."""
    while True:
        view = view_for(rng, task)
        last = _some(rng, ABOUT[task](view), 1)
        if last and last[0].held == held:
            return _asked(rng, task, (view,), [q for kind in ABOUT.values() for q in kind(view)], last[0], tokens)


def about_two(rng: Random, held: bool, tokens: int) -> Sample:
    """Two pictures and a question about one of them, most often such that the other would be answered otherwise."""
    while True:
        task, index = rng.choice(list(ABOUT)), int(rng.random() < SECOND_SHARE)
        views = view_for(rng, task), view_for(rng, task)
        rival = {q.text: q.reply for q in ABOUT[task](views[1 - index])}
        fitting = ABOUT[task](views[index])
        if rng.random() < CONTRAST_SHARE:
            fitting = (q for q in fitting if rival.get(q.text, q.reply) != q.reply)
        last = _some(rng, fitting, 1)
        if last and last[0].held == held:
            every = [_named(q, i) for i, view in enumerate(views) for kind in ABOUT.values() for q in kind(view)]
            return _asked(rng, TWO, views, every, _named(last[0], index), tokens)


def _named(question: Question, index: int) -> Question:
    return question._replace(text=f"{question.text} in the {('first', 'second')[index]} image")


def _asked(rng: Random, task: str, views: tuple[Scene, ...], every: list[Question], last: Question, tokens: int) -> Sample:
    """The chat: pictures with the first question, as a command line sends them, answers, at last `last`. Where that belongs to
    the training part, others of it come before."""
    room = (tokens - IMAGE_TOKENS * len(views)) // QUESTION_TOKENS - 1
    other = [q for q in every if not q.held and q.text != last.text]
    before = _some(rng, other, 0 if last.held else max(0, min(room, MOST_QUESTIONS - 1)))
    messages: Messages = []
    for question in (*before, last):
        text = f"{question.text}?"
        messages.append(user(text) if messages else
                        {"role": "user", "content": [*({"type": "image"} for _ in views), {"type": "text", "text": text}]})
        if question is not last:
            messages.append(assistant(question.reply))
    thinking = rng.random() < THINKING_SHARE
    thought = f"I look at the {'image' if len(views) == 1 else 'images'}.\n</think>\n\n" if thinking else ""
    return Sample(task, messages, thought + last.reply, last.reply, thinking, images=views)


def _some(rng: Random, questions: Iterable[Question], most: int) -> list[Question]:
    """Up to `most` different questions, by weight, in the order drawn (Efraimidis, Spirakis 2006)."""
    return sorted(questions, key=lambda q: -rng.random() ** (1 / q.weight))[:most]


def drawn(task: str, split: str, seed: int, index: int, measure: Measure | None = None, tokens: int = 160) -> Sample:
    """Sample `index` of a task of IMAGE_TASKS, as tiny_tasks.drawn of the others (`measure` is not needed)."""
    rng, held = Random(f"{split} {task} {seed} {index} {tokens}"), split == "held"
    return about_two(rng, held, tokens) if task == TWO else about_one(rng, task, held, tokens)
