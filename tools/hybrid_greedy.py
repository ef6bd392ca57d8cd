"""Greedy answers of GPU prefill with CPU decode, held against the CPU alone over chats with the small trained model.

    python tools/hybrid_greedy.py [--device cuda|emulated] [--length short|full]

A chat begins with a question of golden/tiny's tasks; each answer that ends is followed by another question, until 64 tokens
have been generated. Every run is fed the tokens of the oracle: a CPU run with float32 activations in prefill and the engine's
own (8-bit) ones in decode, which is what the hybrid engine computes in another order. A position is compared where the oracle's
two best logits lie further apart than twice its chat's noise, since both of them may move. The noise of a chat is the most that
any of its logits moves when the oracle's layers get their inputs moved by one unit in the last place in prefill, in DRAWS runs;
one number for all its positions, because rounding shows where it flips an 8-bit code or an expert, and then in steps that no few
draws find in each place; and at least the median chat's, because where no draw has met a flip the hybrid run still may. Format
loss is the plain CPU run, 8-bit activations throughout, beside the hybrid one. Exit status 1 where the answers differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fermi_engine.config import EngineConfig
from fermi_engine.convert import convert
from fermi_engine.engine import Engine
from fermi_engine.model.decoder import Decoder
from fermi_engine.model.gpu_inputs import TEXT, TextInputs
from fermi_engine.state import HybridState
from tools.noise import nudge
from tools.tiny_tasks import Encoder, drawn

TINY = Path(__file__).resolve().parents[1] / "golden" / "tiny"
CHATS, STEPS, DRAWS = 20, 64, 8
SHARE = 0.95  # of all positions that must be compared
SEED = 3  # apart from the samples that training, the recorded accuracies and test_tiny look at
LENGTHS = {  # about how many tokens a chat's first question has, by task
    "short": {"arithmetic": 64, "needle": 64, "copying": 64, "turns": 64, "tool_call": 160},
    "full": {"arithmetic": 64, "needle": 1000, "copying": 160, "turns": 400, "tool_call": 400},
}
LATER = {"copying": 60, "arithmetic": 64, "needle": 64}


class Float32Prefill:
    """Stands in the place of an engine's GPU: prefill with float32 activations, by the CPU; decode is the engine's own."""

    def __init__(self, engine: Engine, seed: int | None = None) -> None:
        """seed: move every layer's input by one unit in the last place."""
        self.decoder = Decoder(engine.pack, engine.kernels, "f32")
        if seed is not None:
            nudge(self.decoder, seed)

    def hidden(self, ids: np.ndarray, state: HybridState, progress: Any = None, stops: Any = None,
               is_rest: bool = False, inputs: TextInputs = TEXT) -> np.ndarray | None:
        """The last token's hidden row [1, H]; None for a token by itself (gpu.choice.GpuChoice.hidden)."""
        return self.decoder.hidden(ids, state, shift=inputs.shift)[-1:] if len(ids) > 1 or is_rest else None


@dataclass(frozen=True)
class Run:
    """Logits [positions, vocab] that chose each token, the tokens, and how many went through prefill."""

    logits: np.ndarray
    tokens: list[int]
    prefilled: int


@dataclass(frozen=True)
class Report:
    """What `compare` found. Divergences are means over all positions, in nats, of the oracle's distribution from another's."""

    positions: int
    prefilled: int  # tokens, in all chats
    noise: tuple[float, ...]  # of a logit, in the oracle, by chat
    distance: tuple[float, ...]  # the most that a logit of the hybrid run lies from the oracle's, by chat
    compared: int
    unlike: tuple[tuple[int, int], ...]  # (chat, step) of compared positions with different tokens
    left_out: tuple[tuple[int, int], ...]
    divergence: float
    noise_divergence: float  # the largest of the draws
    format_divergence: float  # of the plain CPU run from the hybrid one
    format_agreement: float  # share of positions with the same likeliest token

    @property
    def passed(self) -> bool:
        """The hybrid run is another draw: at most twice the worst divergence of those, the tokens all the same."""
        return (not self.unlike and self.compared >= SHARE * self.positions
                and self.divergence <= 2 * self.noise_divergence)

    def lines(self) -> list[str]:
        """To print."""
        share = self.compared / self.positions
        return [
            f"{self.positions} positions, {self.prefilled} tokens prefilled; largest distance of a logit from the oracle, median "
            f"and maximum of chats: {_both(self.noise)} with the last place of layer inputs, {_both(self.distance)} hybrid",
            f"compared {self.compared} ({share:.1%}), other tokens at {list(self.unlike)}",
            f"not compared, margin under twice the noise: {list(self.left_out)}",
            f"KL from the oracle: hybrid {self.divergence:.3g}, with the last place {self.noise_divergence:.3g} at most",
            f"format loss of 8-bit prefill: KL {self.format_divergence:.3g}, the same likeliest token at "
            f"{self.format_agreement:.2%}",
        ]


def chat(encoder: Encoder, index: int, length: str) -> Iterator[list[int]]:
    """Ids of one question after the other; from the second on with the end of the answer before."""
    budgets = LENGTHS[length]
    first, later = list(budgets)[index % len(budgets)], list(LATER)
    yield encoder.prompt(drawn(first, "held", SEED, index, encoder.measure, budgets[first]))
    for turn in count(1):
        task = later[(index + turn) % len(later)]
        sample = drawn(task, "held", SEED, 1000 * (index + 1) + turn, encoder.measure, LATER[task])
        yield [encoder.end, *encoder.tokenizer.encode("\n"), *encoder.prompt(sample)]


def follow(engine: Engine, encoder: Encoder, index: int, length: str, tokens: Sequence[int] | None = None) -> Run:
    """STEPS tokens of a chat: `tokens` whatever the logits say, or the likeliest ones."""
    session, questions = engine.session(), chat(encoder, index, length)
    rows: list[np.ndarray] = []
    said: list[int] = []
    prefilled = 0
    while len(said) < STEPS:
        question = next(questions)
        prefilled += len(question)
        row = session.prefill(question)
        while True:
            rows.append(row)
            said.append(int(row.argmax()) if tokens is None else tokens[len(said)])
            if len(said) == STEPS or said[-1] == encoder.end:
                break
            row = session.decode(said[-1])
    return Run(np.array(rows), said, prefilled)


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q) of softmax over logits [..., vocab], in nats."""
    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64) - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    p, q = log_softmax(p), log_softmax(q)
    return (np.exp(p) * (p - q)).sum(-1)


def compare(pack: Path, mixed: Engine, length: str, chats: int = CHATS) -> Report:
    """The hybrid engine `mixed` over `pack` against the CPU."""
    encoder = Encoder.from_directory(TINY)

    def cpu(prefill: Any = None, *seed: int) -> Engine:
        engine = Engine.load(pack, config=EngineConfig(threads=mixed.options.threads))
        engine.gpu = prefill and prefill(engine, *seed)
        return engine

    oracle = cpu(Float32Prefill)
    right = [follow(oracle, encoder, index, length) for index in range(chats)]

    def logits(engine: Engine) -> np.ndarray:
        return np.array([follow(engine, encoder, i, length, run.tokens).logits for i, run in enumerate(right)])

    return _report(right, logits(mixed), [logits(cpu(Float32Prefill, seed)) for seed in range(DRAWS)], logits(cpu()))


def _report(right: list[Run], hybrid: np.ndarray, draws: list[np.ndarray], plain: np.ndarray) -> Report:
    """hybrid, draws, plain: logits [chats, STEPS, vocab]."""
    truth = np.array([run.logits for run in right])
    noise = np.max([_by_chat(draw, truth) for draw in draws], axis=0)
    second, first = np.moveaxis(np.sort(truth, axis=-1)[..., -2:], -1, 0)
    counted = first - second > 2 * np.maximum(noise, np.median(noise))[:, None]
    unlike = counted & (hybrid.argmax(-1) != truth.argmax(-1))
    places = [tuple((int(chat), int(step)) for chat, step in np.argwhere(mask)) for mask in (unlike, ~counted)]
    return Report(counted.size, sum(run.prefilled for run in right), tuple(noise.tolist()),
                  tuple(_by_chat(hybrid, truth).tolist()), int(counted.sum()), *places, float(divergence(truth, hybrid).mean()),
                  max(float(divergence(truth, draw).mean()) for draw in draws), float(divergence(hybrid, plain).mean()),
                  float((hybrid.argmax(-1) == plain.argmax(-1)).mean()))


def _by_chat(logits: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The largest difference of a logit in each chat."""
    return np.abs(logits - truth).max(axis=(1, 2))


def _both(values: tuple[float, ...]) -> str:
    return f"{np.median(values):.3g} and {max(values):.3g}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--length", choices=tuple(LENGTHS), default="full")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pack = convert(TINY, Path(folder) / "tiny.pack", "q4_0")
        report = compare(pack, Engine.load(pack, config=EngineConfig(prefill="gpu", device=args.device)), args.length)
    print("\n".join(report.lines()))
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
