"""Greedy answers to prompts with images on the GPU, held against the CPU engine and the PyTorch reference.

    python tools/greedy_images.py [--model minicpm|dense|moe|CHECKPOINT] [--backend cuda|emulated]

A prompt shows 0, 1 or 3 pictures and asks something. The oracle is the reference in float64, tower and text model, over the
weights of a Q8_0 pack; it says STEPS tokens, the likeliest ones, and every run is fed those: the engine on the GPU (resident if
the model is dense, else its prefill), the engine on the CPU with float32 activations, and the reference in float32. As in
tools/hybrid_greedy.py, a position is compared where the oracle's two best logits lie further apart than twice its prompt's noise:
the most that any of its logits moves in float32 runs of the reference, as it is and with the input of every layer of both halves
moved by one unit in the last place, DRAWS of them; and at least the median prompt's. Exit status 1 where answers differ.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fermi_engine import chat, report
from fermi_engine.config import EngineConfig
from fermi_engine.convert import convert
from fermi_engine.engine import Engine
from fermi_engine.errors import FermiError
from fermi_engine.pack import Pack
from fermi_engine.vision.patches import PreparedImage
from tools import oracle
from tools.hybrid_greedy import SHARE, divergence
from tools.make_checkpoint import make_checkpoint
from tools.noise import one_ulp

MODELS = {"minicpm": {"family": "minicpm", "tied": True}, "dense": {"family": "dense"}, "moe": {"experts": 8}}
COUNTS = (0, 1, 3)  # images of a prompt
PROMPTS, STEPS, DRAWS = 20, 24, 4
SIDES = (16, 96)  # pixels of a picture's sides
WORDS = ("how", "many", "shapes", "are", "there", "and", "which", "colour", "has", "the", "one", "on", "left", "what", "differs")


class Asked(NamedTuple):
    """Ids of a prompt and its images."""

    ids: list[int]
    images: list[PreparedImage]


@dataclass(frozen=True)
class Truth:
    """What the oracle says to a prompt: logits float64 [STEPS, vocab] and tokens; the same logits by float32 runs of the
    reference, the first as it is, the others moved."""

    logits: np.ndarray
    tokens: list[int]
    draws: list[np.ndarray]


@dataclass(frozen=True)
class Report:
    """What `compare` found. Divergences are means over all positions, in nats, of the oracle's distribution from another's."""

    positions: int
    prefilled: int  # tokens, in all prompts
    noise: tuple[float, ...]  # of a logit, by prompt
    compared: int
    noise_divergence: float  # the largest of the draws
    distance: dict[str, float]  # by run: the most that a logit lies from the oracle's
    unlike: dict[str, list[tuple[int, int]]]  # by run: (prompt, step) of compared positions with other tokens
    divergence: dict[str, float]

    @property
    def passed(self) -> bool:
        """Every run is another draw: at most twice the worst divergence of those, the tokens all the same."""
        return (not any(self.unlike.values()) and self.compared >= SHARE * self.positions
                and max(self.divergence.values()) <= 2 * self.noise_divergence)

    def lines(self) -> list[str]:
        """To print."""
        return [f"{self.positions} positions behind {self.prefilled} tokens, compared {self.compared} "
                f"({self.compared / self.positions:.1%}); noise of a logit, median and maximum of prompts: "
                f"{np.median(self.noise):.3g} and {max(self.noise):.3g}, its KL {self.noise_divergence:.3g} at most",
                *(f"{run}: other tokens at {self.unlike[run]}, largest distance of a logit {self.distance[run]:.3g}, KL "
                  f"{self.divergence[run]:.3g}" for run in self.unlike)]


def picture(rng: random.Random) -> np.ndarray:
    """Rectangles on a ground: uint8 [height, width, 3]."""
    height, width = (rng.randint(*SIDES) for _ in range(2))
    found = np.empty((height, width, 3), np.uint8)
    found[:] = [rng.randrange(256) for _ in range(3)]
    for _ in range(rng.randint(1, 4)):
        top, left = rng.randrange(height), rng.randrange(width)
        found[top : top + rng.randint(4, 40), left : left + rng.randint(4, 40)] = [rng.randrange(256) for _ in range(3)]
    return found


def asked(engine: Engine, index: int) -> Asked:
    """Prompt `index`, through the model's own chat template."""
    rng = random.Random(f"greedy images {index}")
    images = [engine.vision.prepare(picture(rng)) for _ in range(COUNTS[index % len(COUNTS)])]
    text = " ".join(rng.choices(WORDS, k=rng.randint(3, 12)))
    content = [{"type": "image"}] * len(images) + [{"type": "text", "text": text}]
    ids = chat.encode(engine.tokenizer, chat.find_template(engine.pack.files()), [{"role": "user", "content": content}],
                      enable_thinking=False)
    return Asked(engine.vision.expand(engine.tokenizer, ids, images), images)


def truth(pack: Path, steps: int, draws: int, index: int) -> Truth:
    """The reference's half of a prompt; runs in a process of its own where there are several."""
    torch.set_num_threads(1)
    engine = _oracle(pack)
    one = asked(engine, index)
    logits, tokens = Both(engine.pack, torch.float64).greedy(one, steps)
    return Truth(logits, tokens, [Both(engine.pack, torch.float32, seed).follow(one, tokens) for seed in (None, *range(draws))])


def _oracle(pack: Path) -> Engine:
    return Engine.load(pack, config=EngineConfig(threads=1, activations="f32", snapshot_ram=0))


class Both:
    """The reference's text model and tower."""

    def __init__(self, pack: Pack, dtype: torch.dtype, seed: int | None = None) -> None:
        """seed: move every layer's input by one unit in the last place."""
        self.text, self.tower = oracle.decoder(pack, "f32", dtype), oracle.Tower(pack, dtype)
        if seed is not None:
            generator, name = np.random.default_rng(seed), "block" if self.tower.is_qwen else "layer"
            self.text.forward_layer = _moved(self.text.forward_layer, generator)
            setattr(self.tower.model, name, _moved(getattr(self.tower.model, name), generator))

    def read(self, ids: Sequence[int], images: Sequence[PreparedImage],
             answer: Sequence[int] = ()) -> tuple[torch.Tensor, Any, int]:
        """Logits of every token, the state, and the position of the token that follows. answer: tokens behind `ids`, words all of
        them: a model of random weights writes the image token, too."""
        text, tower = self.text, self.tower
        positions, following = tower.positions(ids, [image.grids[0] for image in images])
        behind = torch.arange(following, following + len(answer), dtype=positions.dtype)
        x = text.embed(torch.tensor([*ids, *answer]))
        if images:
            rows = torch.cat([tower.rows(image.patches, image.grids) for image in images])
            x[: len(ids)][torch.tensor(ids) == tower.config.image_token_id] = rows
        positions = torch.cat([positions, behind.expand(3, -1)], dim=1)
        return *text.forward([*ids, *answer], None, positions, embedded=x), following + len(answer)

    def greedy(self, one: Asked, steps: int) -> tuple[np.ndarray, list[int]]:
        """Logits [steps, vocab] and the likeliest tokens."""
        with torch.no_grad():
            logits, state, following = self.read(*one)
            rows = [logits[-1]]
            tokens = [int(rows[-1].argmax())]
            while len(tokens) < steps:
                position = torch.full((3, 1), following + len(tokens) - 1)
                logits, state = self.text.forward(tokens[-1:], state, position)
                rows.append(logits[-1])
                tokens.append(int(rows[-1].argmax()))
        return torch.stack(rows).numpy(), tokens

    def follow(self, one: Asked, tokens: Sequence[int]) -> np.ndarray:
        """Logits [steps, vocab] that choose each of `tokens`."""
        with torch.no_grad():
            return self.read(*one, tokens[:-1])[0][len(one.ids) - 1 :].numpy()


def _moved(forward: Callable[..., Any], generator: np.random.Generator) -> Callable[..., Any]:
    """A layer whose input is moved by one unit in the last place."""
    def moved(index: int, x: torch.Tensor, *rest: Any) -> Any:
        return forward(index, torch.from_numpy(one_ulp(x.numpy(), generator)), *rest)
    return moved


def follow(engine: Engine, one: Asked, tokens: Sequence[int]) -> np.ndarray:
    """Logits [steps, vocab] that choose each of `tokens`, one token after the other."""
    session = engine.session()
    rows = [session.prefill(one.ids, images=one.images)]
    rows += [session.decode(token) for token in tokens[:-1]]
    return np.stack(rows)


def gpu_engine(pack: Path, backend: str, gemm: str = "own") -> Engine:
    """The way that the model has on a GPU."""
    way = {"prefill": "gpu"} if _oracle(pack).config.num_experts else {"decode": "gpu"}
    return Engine.load(pack, config=EngineConfig(activations="f32", device=backend, gemm=gemm, snapshot_ram=0, **way))


def compare(pack: Path, gpu: Engine, prompts: int = PROMPTS, steps: int = STEPS, draws: int = DRAWS,
            apply: Callable[..., Iterable[Truth]] = map) -> Report:
    """The engine `gpu` over `pack`, and the CPU's, against the reference. apply: `map`, or a pool's."""
    right = list(apply(partial(truth, pack, steps, draws), range(prompts)))
    cpu = _oracle(pack)
    given = [asked(cpu, index) for index in range(prompts)]
    engines = {"GPU": gpu, "CPU engine": cpu}
    runs = {name: [follow(engine, one, found.tokens) for one, found in zip(given, right, strict=True)]
            for name, engine in engines.items()}
    runs["reference in float32"] = [found.draws[0] for found in right]
    return _report(right, {name: np.array(rows) for name, rows in runs.items()}, sum(len(one.ids) for one in given))


def _report(right: list[Truth], runs: dict[str, np.ndarray], prefilled: int) -> Report:
    """runs: logits [prompts, steps, vocab]."""
    exact = np.array([found.logits for found in right])
    moved = np.array([found.draws for found in right])  # [prompts, draws, steps, vocab]
    noise = np.abs(moved - exact[:, None]).max(axis=(1, 2, 3))
    second, first = np.moveaxis(np.sort(exact, axis=-1)[..., -2:], -1, 0)
    counted = first - second > 2 * np.maximum(noise, np.median(noise))[:, None]
    unlike = {name: counted & (rows.argmax(-1) != exact.argmax(-1)) for name, rows in runs.items()}
    return Report(
        counted.size, prefilled, tuple(noise.tolist()), int(counted.sum()),
        max(float(divergence(exact, moved[:, draw]).mean()) for draw in range(moved.shape[1])),
        {name: float(np.abs(rows - exact).max()) for name, rows in runs.items()},
        {name: [(int(a), int(b)) for a, b in np.argwhere(mask)] for name, mask in unlike.items()},
        {name: float(divergence(exact, rows).mean()) for name, rows in runs.items()})


def made(model: str, folder: Path) -> Path:
    """A Q8_0 pack of one of MODELS, with random weights, or of a checkpoint."""
    source = Path(model)
    if model in MODELS:
        source = make_checkpoint(folder / "checkpoint", seed=6, **{"layers": 4, "key_dim": 32, **MODELS[model]})
    return convert(source, folder / "pack", format="q8_0")


def main(argv: list[str] | None = None) -> int:
    """The command line; 1 where answers differ, 2 for a mistake, told in one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", help=f"{', '.join(MODELS)} (default: all) or a checkpoint's directory")
    parser.add_argument("--backend", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--gemm", choices=("own", "vendor"), default="own")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    try:
        return _judged(args)
    except (FermiError, OSError) as err:
        report.note(f"error: {err}")
        return 2


def _judged(args: argparse.Namespace) -> int:
    """Prints what is found of each model; -> exit status."""
    failed = 0
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        for model in args.model or MODELS:
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                pack = made(model, Path(folder))
                engine = gpu_engine(pack, args.backend, args.gemm)
                found = compare(pack, engine, args.prompts, args.steps, apply=pool.map)
            failed += not found.passed
            print(f"{model}: {'passed' if found.passed else 'FAILED'}, {time.perf_counter() - start:.0f} s", *found.lines(),
                  sep="\n  ", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
