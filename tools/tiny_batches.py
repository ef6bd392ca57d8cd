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

import numpy as np

from tools import tiny_tokenizer
from tools.tiny_tasks import Encoder, Sample, drawn, drawn_row

PADDING, READ, SAID = 0, 1, 2  # kinds of tokens: filler behind the end, given, what an assistant says
LENGTHS: dict[int, dict[str, float]] = {  # tokens of a row -> tasks and their shares
    64: {"arithmetic": 1.0},
    160: {"needle": 0.45, "copying": 0.3, "turns": 0.25},
    416: {"tool_call": 0.55, "needle": 0.25, "turns": 0.2},
    2048: {"needle": 1.0},
    10240: {"needle": 1.0},
}
PHASES = (  # progress at which it begins, shares of steps of each of LENGTHS
    (0.00, (0.20, 0.60, 0.20, 0.00, 0.00)),
    (0.10, (0.12, 0.33, 0.40, 0.15, 0.00)),
    (0.25, (0.10, 0.20, 0.35, 0.30, 0.05)),
    (0.45, (0.08, 0.16, 0.30, 0.26, 0.20)),
    (0.75, (0.08, 0.16, 0.28, 0.23, 0.25)),
)
HELD_SIZES = {"arithmetic": 256, "copying": 128, "turns": 128, "tool_call": 128}
HELD_LENGTHS = {"arithmetic": 64, "copying": 160, "turns": 416, "tool_call": 416}
HELD_ROWS = {2048: 6, 10240: 3}  # needle contexts, nine depths each

Arrays = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Order:
    """What a worker is asked for: batch `index` of a run, `rows` sequences of `length` tokens."""

    index: int
    seed: int
    length: int
    rows: int


def length_at(progress: float, index: int, seed: int) -> int:
    """The row length of step `index`: drawn by the shares of the phase that `progress` (0..1) lies in."""
    shares = [shares for begin, shares in PHASES if begin <= progress][-1]
    return Random(f"length {seed} {index}").choices(list(LENGTHS), shares)[0]


def _budget(rng: Random, length: int) -> int:
    """Tokens that a sample may fill: all rows of a long batch are at least half full."""
    return int(length * (0.3 + 0.7 * rng.random() if length < 1000 else 0.5 + 0.5 * rng.random() ** 0.5))


def make_batch(encoder: Encoder, order: Order) -> Arrays:
    """-> ids int16 [rows, length], kinds uint8 [rows, length], of the training part."""
    ids, kinds = _blank(encoder, order.rows, order.length)
    tasks = LENGTHS[order.length]
    for row in range(order.rows):
        rng = Random(f"batch {order.seed} {order.index} {order.length} {row}")
        task = rng.choices(list(tasks), list(tasks.values()))[0]
        sample_ids, said = _fitting(encoder, task, rng, order.length)
        _fill(ids[row], kinds[row], sample_ids, said)
    return ids, kinds


def _fitting(encoder: Encoder, task: str, rng: Random, length: int) -> tuple[list[int], list[bool]]:
    budget = _budget(rng, length)
    while True:
        ids, said = encoder.marked(drawn(task, "train", rng.getrandbits(62), 0, encoder.measure, budget))
        if len(ids) <= length:
            return ids, said
        budget = max(length // 4, budget - (len(ids) - length))


def _blank(encoder: Encoder, rows: int, length: int) -> Arrays:
    end = encoder.tokenizer.id_of("<|endoftext|>")
    return np.full((rows, length), end, np.int16), np.full((rows, length), PADDING, np.uint8)


def _fill(ids: np.ndarray, kinds: np.ndarray, sample_ids: list[int], said: list[bool]) -> None:
    ids[: len(sample_ids)] = sample_ids
    kinds[: len(said)] = np.where(said, SAID, READ)


def final_answers(encoder: Encoder, samples: list[Sample], length: int) -> Arrays:
    """Rows of `samples`; SAID marks only the last answer, the one that counts. ValueError if one is longer."""
    ids, kinds = _blank(encoder, len(samples), length)
    for row, sample in enumerate(samples):
        prompt, answer = encoder.prompt(sample), encoder.answer(sample)
        if len(prompt) + len(answer) > length:
            raise ValueError(f"a {sample.task} sample has {len(prompt) + len(answer)} tokens, room is for {length}")
        _fill(ids[row], kinds[row], prompt + answer, [False] * len(prompt) + [True] * len(answer))
    return ids, kinds


def held_batches(encoder: Encoder, scale: float = 1.0) -> dict[str, Arrays]:
    """The held-out set by name; a needle row has its nine depths one after another. `scale` shrinks or grows it."""
    found = {}
    for task, size in HELD_SIZES.items():
        length = HELD_LENGTHS[task]
        samples = [drawn(task, "held", 0, i, encoder.measure, int(0.7 * length)) for i in range(max(1, int(size * scale)))]
        fitting = [s for s in samples if len(encoder.prompt(s)) + len(encoder.answer(s)) <= length]
        found[task] = final_answers(encoder, fitting, length)
    for length, rows in HELD_ROWS.items():
        contexts = [drawn_row("held", 0, i, encoder.measure, length - 64) for i in range(max(1, int(rows * scale)))]
        found[f"needle_{length}"] = final_answers(encoder, [s for context in contexts for s in context], length)
    return found


_worker_encoder: Encoder | None = None


def _start_worker(files: dict[str, bytes]) -> None:
    global _worker_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_encoder = tiny_tokenizer.encoder(files)


def _work(order: Order) -> Arrays:
    return make_batch(_worker_encoder, order)


def _work_held(scale: float) -> dict[str, Arrays]:
    return held_batches(_worker_encoder, scale)


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

    def held(self, scale: float) -> Promise:
        """The held-out set, being drawn."""
        return self._submit(_work_held, scale)

    def next(self, order_at: Callable[[int], Order], index: int) -> tuple[Order, Arrays]:
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
