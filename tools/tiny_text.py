"""Chats of the small trained model's tasks as a .jsonl file of token ids, for `fermi-engine eval`, `reap` and `calibrate`.

    python tools/tiny_text.py OUT.jsonl [--split held|train] [--seed N] [--each N] [--prompts]

Each line holds the ids of one chat and its right answer; with --prompts those of the chat alone, so that the model answers.
Held-out chats are for measuring, those of the training part for calibrating.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # run as a script, which puts this folder on the path instead of the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.tiny_tasks import Encoder, Sample, drawn

TINY = Path(__file__).resolve().parents[1] / "golden" / "tiny"
TOKENS = {"arithmetic": 64, "tool_call": 400, "turns": 400, "copying": 160, "needle": 416}  # most of a chat, about
MORE_SUMS = 2  # they are short


def samples(encoder: Encoder, split: str, seed: int, each: int) -> Iterator[Sample]:
    """`each` chats of every task, sums twice that; the same arguments give the same chats."""
    for task, tokens in TOKENS.items():
        for index in range(each * (MORE_SUMS if task == "arithmetic" else 1)):
            yield drawn(task, split, seed, index, encoder.measure, tokens)


def write(path: Path, encoder: Encoder, split: str, seed: int, each: int, prompts: bool = False) -> Path:
    """Write the file and return its path."""
    lines = [encoder.prompt(sample) + ([] if prompts else encoder.answer(sample))
             for sample in samples(encoder, split, seed, each)]
    path.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in lines), encoding="ascii")
    return path


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoint", type=Path, default=TINY)
    parser.add_argument("--split", choices=("held", "train"), default="held")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--each", type=int, default=12)
    parser.add_argument("--prompts", action="store_true")
    o = parser.parse_args()
    path = write(o.out, Encoder.from_directory(o.checkpoint), o.split, o.seed, o.each, o.prompts)
    print(f"{path}: {len(path.read_text().splitlines())} chats")
    return 0


if __name__ == "__main__":
    sys.exit(main())
