"""Batches of the tasks: which lengths when, drawn ahead of time by worker processes.

A batch depends on its order (index, seed, length, rows) alone, whoever draws it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult
from random import Random
from typing import NamedTuple

import numpy as np

from fermi_engine.vision.patches import PreparedImage
from tools import tiny_image_tasks, tiny_tokenizer
from tools.tiny_image_tasks import IMAGE_TASKS
from tools.tiny_tasks import Encoder, Sample, drawn, drawn_row
from tools.tiny_tower import Pictures, pictures

FORWARD_TOKENS = 32768
PADDING, READ, SAID = 0, 1, 2  # kinds of tokens: filler behind the end, given, what an assistant says
LENGTHS: dict[int, dict[str, float]] = {  # tokens of a row -> tasks and their shares
    64: {"arithmetic": 1.0},
    128: {"count": 1.0},
    160: {"needle": 0.45, "copying": 0.3, "turns": 0.25},
    192: {"colour": 0.12, "shape": 0.13, "count": 0.4, "side": 0.35},
    256: {"second_image": 1.0},
    416: {"tool_call": 0.55, "needle": 0.25, "turns": 0.2},
    2048: {"needle": 1.0},
    10240: {"needle": 1.0},
}
Phases = tuple[tuple[float, dict[int, float]], ...]  # progress at which it begins, weights of steps of rows of a length
TEXT_PHASES: Phases = (
    (0.00, {64: 0.20, 160: 0.60, 416: 0.20}),
    (0.10, {64: 0.12, 160: 0.33, 416: 0.40, 2048: 0.15}),
    (0.25, {64: 0.10, 160: 0.20, 416: 0.35, 2048: 0.30, 10240: 0.05}),
    (0.45, {64: 0.08, 160: 0.16, 416: 0.30, 2048: 0.26, 10240: 0.20}),
    (0.75, {64: 0.08, 160: 0.16, 416: 0.28, 2048: 0.23, 10240: 0.25}),
)
IMAGE_PHASES: Phases = (  # for a model that knows the texts
    (0.00, {64: 0.03, 160: 0.06, 192: 0.54, 256: 0.20, 416: 0.10, 2048: 0.05, 10240: 0.02}),
    (0.40, {64: 0.08, 160: 0.09, 192: 0.36, 256: 0.20, 416: 0.14, 2048: 0.09, 10240: 0.08}),
    (0.70, {64: 0.12, 160: 0.12, 192: 0.25, 256: 0.15, 416: 0.18, 2048: 0.11, 10240: 0.13}),
)
FINISH_PHASES: Phases = (  # for a model that knows the images as well, and counts badly
    (0.00, {64: 0.03, 128: 0.54, 160: 0.05, 192: 0.13, 256: 0.12, 416: 0.07, 2048: 0.03, 10240: 0.03}),
)
PHASES = {"text": TEXT_PHASES, "images": IMAGE_PHASES, "finish": FINISH_PHASES}
HELD_SIZES = {"arithmetic": 256, "copying": 128, "turns": 128, "tool_call": 128}
HELD_LENGTHS = {"arithmetic": 64, "copying": 160, "turns": 416, "tool_call": 416} | dict.fromkeys(IMAGE_TASKS, 192)
HELD_ROWS = {2048: 6, 10240: 3}  # needle contexts, nine depths each
HELD_IMAGES = dict.fromkeys(IMAGE_TASKS, 192)


class Batch(NamedTuple):
    """Rows of tokens: ids int16 [B, T], kinds uint8 [B, T], and the images of some."""

    ids: np.ndarray
    kinds: np.ndarray
    images: Pictures | None = None


@dataclass(frozen=True)
class Order:
    """What a worker is asked for: batch `index` of a run, `rows` sequences of `length` tokens."""

    index: int
    seed: int
    length: int
    rows: int


def length_at(progress: float, index: int, seed: int, phases: Phases) -> int:
    """The row length of step `index`: drawn by the shares of the phase that `progress` (0..1) lies in."""
    shares = [shares for begin, shares in phases if begin <= progress][-1]
    return Random(f"length {seed} {index}").choices(list(shares), list(shares.values()))[0]


def _budget(rng: Random, length: int) -> int:
    """Tokens that a sample may fill: all rows of a long batch are at least half full."""
    return int(length * (0.3 + 0.7 * rng.random() if length < 1000 else 0.5 + 0.5 * rng.random() ** 0.5))


def make_batch(encoder: Encoder, order: Order) -> Batch:
    """Rows of the training part."""
    ids, kinds = _blank(encoder, order.rows, order.length)
    tasks = LENGTHS[order.length]
    shown = []
    for row in range(order.rows):
        rng = Random(f"batch {order.seed} {order.index} {order.length} {row}")
        task = rng.choices(list(tasks), list(tasks.values()))[0]
        sample, sample_ids, said = _fitting(encoder, task, rng, order.length)
        _fill(ids[row], kinds[row], sample_ids, said)
        shown.append((sample_ids, encoder.images(sample)))
    kinds[ids == encoder.image_token] = PADDING  # nobody reads how many tokens an image takes
    return Batch(ids, kinds, _pictures(encoder, shown, order.length))


def _pictures(encoder: Encoder, rows: list[tuple[list[int], list[PreparedImage]]], length: int) -> Pictures | None:
    most = encoder.settings.max_pixels // (2 * encoder.settings.patch_size) ** 2
    return pictures(rows, length, encoder.image_token, most) if any(images for _, images in rows) else None


def _fitting(encoder: Encoder, task: str, rng: Random, length: int) -> tuple[Sample, list[int], list[bool]]:
    budget = length if task in IMAGE_TASKS else _budget(rng, length)
    while True:
        sample = _drawn(encoder, task, "train", rng.getrandbits(62), 0, budget)
        ids, said = encoder.marked(sample)
        if len(ids) <= length:
            return sample, ids, said
        budget = max(length // 4, budget - (len(ids) - length))


def _drawn(encoder: Encoder, task: str, split: str, seed: int, index: int, tokens: int) -> Sample:
    draw = tiny_image_tasks.drawn if task in IMAGE_TASKS else drawn
    return draw(task, split, seed, index, encoder.measure, tokens)


def _blank(encoder: Encoder, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    end = encoder.tokenizer.id_of("<|endoftext|>")
    return np.full((rows, length), end, np.int16), np.full((rows, length), PADDING, np.uint8)


def _fill(ids: np.ndarray, kinds: np.ndarray, sample_ids: list[int], said: list[bool]) -> None:
    ids[: len(sample_ids)] = sample_ids
    kinds[: len(said)] = np.where(said, SAID, READ)


def final_answers(encoder: Encoder, samples: list[Sample], length: int) -> Batch:
    """Rows of `samples`; SAID marks only the last answer, the one that counts. ValueError if one is longer."""
    ids, kinds = _blank(encoder, len(samples), length)
    shown = []
    for row, sample in enumerate(samples):
        prompt, answer = encoder.prompt(sample), encoder.answer(sample)
        if len(prompt) + len(answer) > length:
            raise ValueError(f"a {sample.task} sample has {len(prompt) + len(answer)} tokens, room is for {length}")
        _fill(ids[row], kinds[row], prompt + answer, [False] * len(prompt) + [True] * len(answer))
        shown.append((prompt + answer, encoder.images(sample)))
    return Batch(ids, kinds, _pictures(encoder, shown, length))


def held_batches(encoder: Encoder, scale: float = 1.0, images: bool = False) -> dict[str, list[Batch]]:
    """The held-out set by name, in batches; a needle row has its nine depths one after another. `scale` shrinks or grows it."""
    found = {}
    for task, size in (HELD_SIZES | HELD_IMAGES if images else HELD_SIZES).items():
        length = HELD_LENGTHS[task]
        samples = [_drawn(encoder, task, "held", 0, i, int(0.7 * length)) for i in range(max(1, int(size * scale)))]
        fitting = [s for s in samples if len(encoder.prompt(s)) + len(encoder.answer(s)) <= length]
        found[task] = _batches(encoder, fitting, length)
    for length, rows in HELD_ROWS.items():
        contexts = [drawn_row("held", 0, i, encoder.measure, length - 64) for i in range(max(1, int(rows * scale)))]
        found[f"needle_{length}"] = _batches(encoder, [s for context in contexts for s in context], length)
    return found


def _batches(encoder: Encoder, samples: list[Sample], length: int) -> list[Batch]:
    """Parts of at most FORWARD_TOKENS tokens."""
    rows = max(1, FORWARD_TOKENS // length)
    return [final_answers(encoder, samples[i : i + rows], length) for i in range(0, len(samples), rows)]


_worker_encoder: Encoder | None = None


def _start_worker(files: dict[str, bytes]) -> None:
    global _worker_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_encoder = tiny_tokenizer.encoder(files)


def _work(order: Order) -> Batch:
    return make_batch(_worker_encoder, order)


def _work_held(what: tuple[float, bool]) -> dict[str, list[Batch]]:
    return held_batches(_worker_encoder, *what)


class Source:
    """Batches in order, drawn `ahead` of their use by `workers` processes (0: in this process).

    Make it before CUDA is used: the processes are forked at once.
    """

    def __init__(self, files: dict[str, bytes], workers: int, ahead: int = 32) -> None:
        self._pending: deque[tuple[Order, Promise]] = deque()
        self._ahead = ahead if workers else 1
        self._pool = None
        if workers:
            self._pool = multiprocessing.get_context("fork").Pool(workers, _start_worker, (files,))
        else:
            _start_worker(files)

    def held(self, scale: float, images: bool) -> Promise:
        """The held-out set, being drawn."""
        return self._submit(_work_held, (scale, images))

    def next(self, order_at: Callable[[int], Order], index: int) -> tuple[Order, Batch]:
        """Batch `index`, which counts up by one from call to call; `order_at` tells what to ask for ahead of it."""
        first = self._pending[-1][0].index + 1 if self._pending else index
        for upcoming in range(first, index + self._ahead):
            order = order_at(upcoming)
            self._pending.append((order, self._submit(_work, order)))
        order, promise = self._pending.popleft()
        return order, promise.get()

    def forget(self) -> None:
        """Drops what was asked for ahead, so that `next` may begin at another index."""
        self._pending.clear()

    def close(self) -> None:
        """Ends the workers."""
        if self._pool:
            self._pool.terminate()

    def _submit(self, work: Callable, argument: object) -> Promise:
        return self._pool.apply_async(work, (argument,)) if self._pool else Done(work(argument))


class Done:
    """A result that is there already, in the manner of AsyncResult."""

    def __init__(self, value: object) -> None:
        self._value = value

    def ready(self) -> bool:
        return True

    def get(self) -> object:
        return self._value


Promise = AsyncResult | Done
