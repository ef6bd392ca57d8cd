"""Held-out accuracy of the small trained model, through the fp32 reference and through the engine in float32 and Q4_0.

`python tools/tiny_accuracy.py [CHECKPOINT]` prints a table with counts and standard errors, and leaves with 1 where a
target is missed. Decoding is greedy. Answers are first fed to the model: where the likeliest token is the right one at
every place, greedy generation gives the very same text, and only otherwise is it run and its text checked.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fermi_engine import report
from fermi_engine.checkpoint import Checkpoint
from fermi_engine.convert import convert
from fermi_engine.engine import Engine
from fermi_engine.errors import FermiError
from fermi_engine.vision.config import is_vision
from fermi_engine.vision.patches import PreparedImage
from reference.decoder import Decoder
from reference.vision_qwen import QwenVision, text_positions
from tools import tiny_image_tasks
from tools.tiny_image_tasks import IMAGE_TASKS
from tools.tiny_tasks import DEPTHS, Encoder, Sample, check, drawn, drawn_row

ROOT = Path(__file__).resolve().parents[1]
RUNNERS = ("reference fp32", "engine f32", "engine q4_0")
SEED = 1  # not the held-out samples that training shows its progress on
COUNTS = {"needle_2k": 16, "needle_10k": 8, "arithmetic": 200, "tool_call": 150, "turns": 100, "copying": 100,
          **dict.fromkeys(IMAGE_TASKS, 200)}
NEEDLE_TOKENS = {"needle_2k": 2000, "needle_10k": 10000}
TASK_TOKENS = {"arithmetic": 64, "tool_call": 400, "turns": 400, "copying": 160, **dict.fromkeys(IMAGE_TASKS, 160)}
TARGETS = {"needle_2k": 0.99, "needle_10k": 0.99, "arithmetic": 0.95, "tool_call": 0.95, **dict.fromkeys(IMAGE_TASKS, 0.95)}
MOST_LOSS = 0.03  # that the engine may lose against the reference
BLOCK = 512  # tokens that go through the reference together
GROUP = 10  # samples of a short task in a job
SPARE_TOKENS = 16  # that a wrong answer may be longer than the right one


class Runner(Protocol):
    """A model that keeps what it has read."""

    def read(self, ids: Sequence[int], images: Sequence[PreparedImage] = ()) -> Any:
        """A state after `ids`, from the start of a sequence; `images` are those whose tokens are among them."""

    def logits(self, state: Any, ids: Sequence[int]) -> np.ndarray:
        """Logits [n, vocab] after each of `ids`, which follow `state`; the state stays as it is."""


class Reference:
    """The reference in float32 over a checkpoint's weights, the tower's among them."""

    def __init__(self, path: Path) -> None:
        checkpoint = Checkpoint.open(path)
        params = {name: torch.from_numpy(checkpoint.read(name)) for name in checkpoint.tensors}
        tower = {name.removeprefix("visual."): params.pop(name) for name in list(params) if is_vision(name)}
        patch = "patch_embed.proj.weight"
        self.tower = QwenVision(checkpoint.vision, tower | {patch: tower[patch].flatten(1)})
        self.decoder = Decoder(checkpoint.config, params)
        self.image_token = checkpoint.vision.image_token_id

    def read(self, ids: Sequence[int], images: Sequence[PreparedImage] = ()) -> Any:
        grids = [image.grids[0] for image in images]
        positions, after = text_positions(ids, self.image_token, grids) if ids else (torch.empty(3, 0), 0)
        state, ids = None, torch.tensor(ids, dtype=torch.int64)
        with torch.no_grad():
            embedded = self.decoder.embed(ids)
            if images:
                patches = torch.from_numpy(np.concatenate([image.patches for image in images]))
                embedded[ids == self.image_token] = self.tower.forward(patches, grids)
            for begin in range(0, len(ids), BLOCK):
                part = slice(begin, begin + BLOCK)
                _, state = self.decoder.forward(ids[part], state, positions[:, part], embedded=embedded[part])
        return state, after

    def logits(self, state: Any, ids: Sequence[int]) -> np.ndarray:
        cache, first = state
        with torch.no_grad():
            return self.decoder.forward(list(ids), cache, torch.arange(first, first + len(ids)).expand(3, -1))[0].numpy()


class Packed:
    """The engine over a pack; where its weights are float32, so are the activations."""

    def __init__(self, path: Path) -> None:
        self.session = Engine.load(path, threads=1).session()
        self._empty = self.session.snapshot()

    def read(self, ids: Sequence[int], images: Sequence[PreparedImage] = ()) -> Any:
        self.session.restore(self._empty)
        if ids:
            self.session.prefill(ids, images=images)
        return self.session.snapshot()

    def logits(self, state: Any, ids: Sequence[int]) -> np.ndarray:
        self.session.restore(state)
        return self.session.logits(ids)


def right(runner: Runner, encoder: Encoder, samples: Sequence[Sample]) -> list[bool]:
    """Which samples the model answers rightly; what their prompts share at the beginning is read once.

    Samples with images come one by one.
    """
    prompts = [encoder.prompt(sample) for sample in samples]
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))
    shared = min(shared, *(len(prompt) - 1 for prompt in prompts)) if len(prompts) > 1 else len(prompts[0]) - 1
    state = runner.read(prompts[0][:shared], encoder.images(samples[0]))
    found = []
    for sample, prompt in zip(samples, prompts, strict=True):
        answer = encoder.answer(sample)
        rows = runner.logits(state, prompt[shared:] + answer[:-1])[-len(answer) :]
        exact = rows.argmax(-1).tolist() == answer
        found.append(exact or check(sample, _generated(runner, encoder, state, prompt[shared:], len(answer))))
    return found


def _generated(runner: Runner, encoder: Encoder, state: Any, ids: list[int], length: int) -> str:
    """The text of greedy decoding."""
    chosen: list[int] = []
    while len(chosen) < length + SPARE_TOKENS:
        token = int(runner.logits(state, ids + chosen)[-1].argmax())
        if token == encoder.end:
            break
        chosen.append(token)
    return encoder.tokenizer.decode(chosen)


@dataclass(frozen=True)
class Job:
    """Samples `begin` to `end` of a task for one of RUNNERS; of needles, one context with all depths."""

    runner: str
    task: str
    begin: int
    end: int

    def groups(self, encoder: Encoder) -> list[list[Sample]]:
        """Samples that share a context together."""
        if self.task in NEEDLE_TOKENS:
            tokens = NEEDLE_TOKENS[self.task]
            return [drawn_row("held", SEED, i, encoder.measure, tokens) for i in range(self.begin, self.end)]
        tokens = TASK_TOKENS[self.task]
        draw = tiny_image_tasks.drawn if self.task in IMAGE_TASKS else drawn
        return [[draw(self.task, "held", SEED, i, encoder.measure, tokens)] for i in range(self.begin, self.end)]

    @property
    def work(self) -> int:
        """About how much longer than another job it takes: tokens, the reference slower."""
        tokens = NEEDLE_TOKENS.get(self.task) or TASK_TOKENS[self.task]
        return tokens * (self.end - self.begin) * (2 if self.runner == RUNNERS[0] else 1)


def jobs(counts: dict[str, int]) -> list[Job]:
    """All jobs, the longest first."""
    found = []
    for runner in RUNNERS:
        for task, count in counts.items():
            step = 1 if task in NEEDLE_TOKENS else GROUP
            found += [Job(runner, task, begin, min(count, begin + step)) for begin in range(0, count, step)]
    return sorted(found, key=lambda job: -job.work)


_models: dict[str, Any] = {}


def _start(checkpoint: Path, packs: tuple[Path, Path]) -> None:
    torch.set_num_threads(1)
    _models.update(encoder=Encoder.from_directory(checkpoint), paths=(checkpoint, *packs))


def _work(job: Job) -> tuple[Job, list[bool]]:
    """Runs in a process of its own; models are loaded when first asked for."""
    if job.runner not in _models:
        path = _models["paths"][RUNNERS.index(job.runner)]
        _models[job.runner] = Reference(path) if job.runner == RUNNERS[0] else Packed(path)
    encoder = _models["encoder"]
    return job, [hit for group in job.groups(encoder) for hit in right(_models[job.runner], encoder, group)]


def measure(checkpoint: Path, counts: dict[str, int], processes: int) -> dict[tuple[str, str], list[bool]]:
    """(task, runner) -> whether each sample came out right, in order; a needle context gives one for each of DEPTHS."""
    found: defaultdict[tuple[str, str], dict[int, list[bool]]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as folder:
        packs = tuple(convert(checkpoint, Path(folder) / f"{format}.pack", format) for format in ("f32", "q4_0"))
        Encoder.from_directory(checkpoint)  # a process of the pool that cannot would be started again for ever
        with multiprocessing.get_context("spawn").Pool(processes, _start, (checkpoint, packs)) as pool:
            for job, hits in pool.imap_unordered(_work, jobs(counts)):
                found[job.task, job.runner][job.begin] = hits
    return {key: [hit for _, hits in sorted(parts.items()) for hit in hits] for key, parts in found.items()}


def table(results: dict[tuple[str, str], list[bool]]) -> list[str]:
    """Lines to print: accuracy, standard error and count for each task, and needles by depth."""
    lines = [f"{'held-out task':14}" + "".join(f"{runner:>30}" for runner in RUNNERS) + f"{'q4_0 loses':>12}"]
    tasks = list(dict.fromkeys(task for task, _ in results))
    for task in sorted(tasks, key=list(COUNTS).index):
        hits = [np.array(results[task, runner]) for runner in RUNNERS]
        cells = [f"{h.mean():8.1%} ± {_error(h):.1%} {f'({h.sum()}/{h.size})':>11}" for h in hits]
        lines.append(f"{task:14}" + "".join(f"{cell:>30}" for cell in cells) + f"{hits[0].mean() - hits[-1].mean():+12.1%}")
        if task in NEEDLE_TOKENS:
            for runner, h in zip(RUNNERS, hits, strict=True):
                shares = h.reshape(-1, len(DEPTHS)).mean(0)
                lines.append(f"  {runner:16} " + " ".join(f"{d:.1f}:{s:4.0%}" for d, s in zip(DEPTHS, shares, strict=True)))
    return lines


def _error(hits: np.ndarray) -> float:
    """Standard error of a share; of none or all right, that of one more sample gone the other way."""
    share = min(max(hits.mean(), 1 / (hits.size + 1)), 1 - 1 / (hits.size + 1))
    return float((share * (1 - share) / hits.size) ** 0.5)


def missed(results: dict[tuple[str, str], list[bool]]) -> list[str]:
    """What falls short of its target, one line each."""
    lines = []
    for task in dict.fromkeys(task for task, _ in results):
        reference, *engines = (float(np.mean(results[task, runner])) for runner in RUNNERS)
        if reference < TARGETS.get(task, 0.0):
            lines.append(f"{task}: {reference:.1%} through the reference, the target is {TARGETS[task]:.0%}")
        for runner, share in zip(RUNNERS[1:], engines, strict=True):
            if share < reference - MOST_LOSS:
                lines.append(f"{task}: the {runner} loses {reference - share:.1%}, at most {MOST_LOSS:.0%} may go")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Command line; 1 when a target is missed, 2 for a mistake, told in one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", default=ROOT / "golden" / "tiny")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--scale", type=float, default=1.0, help="more (or fewer) samples than usual")
    parser.add_argument("--tasks", nargs="+", choices=list(COUNTS), default=list(COUNTS))
    args = parser.parse_args(argv)
    begin = time.perf_counter()
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes to come: one for each core
    counts = {task: max(1, round(count * args.scale)) for task, count in COUNTS.items() if task in args.tasks}
    try:
        results = measure(args.checkpoint, counts, args.processes)
    except (FermiError, OSError) as err:
        report.note(f"error: {err}")
        return 2
    short = missed(results)
    print("\n".join([*table(results), *short, f"{time.perf_counter() - begin:.0f} s, {args.processes} processes"]))
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
