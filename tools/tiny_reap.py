"""What pruning costs the small trained model: REAP against the most frequent and against random experts.

    python tools/tiny_reap.py [CHECKPOINT] [-o OUT.json]

Each seed draws its own calibration chats (training part) and its own random experts; all are judged on the same held-out
chats: the share of answers of which every token is the likeliest, and of such tokens, on the Q4_0 pack that pruning leaves.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fermi_engine.compression.calibration import watch
from fermi_engine.compression.prune_pack import prune_pack
from fermi_engine.compression.saliency import Saliency, keep_best
from fermi_engine.convert import convert
from fermi_engine.engine import Engine
from fermi_engine.quality.documents import Document
from tools.tiny_tasks import Encoder
from tools.tiny_text import TINY, samples

SEEDS, DROPPED = range(5), (0.25, 0.5, 0.75)
CRITERIA = ("reap", "frequency", "random")
CALIBRATION, TESTS, TEST_SEED = 8, 24, 41  # chats of each task, and the seed of the held-out ones


class Score(NamedTuple):
    """Shares of one pruned model: right answers, and right tokens of answers."""

    answers: float
    tokens: float


def judge(engine: Engine, tests: Sequence[tuple[list[int], list[int]]]) -> Score:
    """(prompt, answer) pairs, the answer fed to the model."""
    whole, tokens = [], []
    for prompt, answer in tests:
        rows = engine.session().logits(prompt + answer[:-1])[-len(answer):]
        hits = rows.argmax(axis=1) == np.array(answer)
        whole.append(bool(hits.all()))
        tokens += hits.tolist()
    return Score(float(np.mean(whole)), float(np.mean(tokens)))


def measure(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Scores of every seed, share and criterion, and of the whole model."""
    encoder = Encoder.from_directory(checkpoint)
    tests = [(encoder.prompt(s), encoder.answer(s)) for s in samples(encoder, "held", TEST_SEED, TESTS)]
    pack = convert(checkpoint, folder / "whole.pack")
    engine = Engine.load(pack, threads=1)
    layers, experts = engine.config.num_hidden_layers, engine.config.num_experts
    rows = []
    for seed in SEEDS:
        saliency = Saliency(layers, experts)
        texts = [Document(np.array(encoder.prompt(s) + encoder.answer(s), np.int32))
                 for s in samples(encoder, "train", 100 + seed, CALIBRATION)]
        tokens = watch(engine, texts, saliency, engine.context).tokens
        scores = {"reap": saliency.scores(), "frequency": saliency.routed.astype(float),
                  "random": np.random.default_rng(seed).random((layers, experts))}
        for share in DROPPED:
            for name in CRITERIA:
                path = prune_pack(pack, folder / "pruned.pack", keep_best(scores[name], round(experts * (1 - share))),
                                  overwrite=True)
                score = judge(Engine.load(path, threads=1), tests)
                rows.append({"seed": seed, "dropped": share, "criterion": name, "calibration_tokens": tokens,
                             **score._asdict()})
                print(rows[-1], file=sys.stderr, flush=True)
    return {"tests": len(tests), "answer_tokens": sum(len(answer) for _, answer in tests),
            "whole": judge(engine, tests)._asdict(), "rows": rows}


def table(found: dict[str, Any]) -> list[str]:
    """Markdown lines: mean over seeds with its standard error, and in how many seeds REAP is ahead of each other."""
    lines = ["| experts dropped | kept by | right answers | right tokens | REAP ahead |", "| --- | --- | --- | --- | --- |"]
    whole = found["whole"]
    lines.append(f"| none | | {whole['answers']:.1%} | {whole['tokens']:.2%} | |")
    for share in DROPPED:
        values = {name: np.array([[row["answers"], row["tokens"]] for row in found["rows"]
                                  if row["dropped"] == share and row["criterion"] == name]) for name in CRITERIA}
        for name in CRITERIA:
            mean, error = values[name].mean(axis=0), values[name].std(axis=0, ddof=1) / len(values[name]) ** 0.5
            ahead = int((values["reap"][:, 0] > values[name][:, 0]).sum())
            lines.append(f"| {share:.0%} | {name} | {mean[0]:.1%} ± {error[0]:.1%} | {mean[1]:.2%} ± {error[1]:.2%} | "
                         f"{'' if name == 'reap' else f'{ahead} of {len(values[name])} seeds'} |")
    return lines


def main() -> int:
    """The command line; 1 where REAP does not keep more than both others at one half, on average."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", default=TINY)
    parser.add_argument("-o", "--output", type=Path, help="JSON of all scores")
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(o.checkpoint, Path(folder))
    if o.output:
        o.output.write_text(json.dumps(found, indent=1) + "\n", encoding="ascii")
    print("\n".join(table(found)))
    half = {name: np.mean([row["answers"] for row in found["rows"] if row["dropped"] == 0.5 and row["criterion"] == name])
            for name in CRITERIA}
    return 0 if half["reap"] > max(half["frequency"], half["random"]) else 1


if __name__ == "__main__":
    sys.exit(main())
