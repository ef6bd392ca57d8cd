"""How much of its speed decoding keeps when one other process wants a core: `python tools/bench/busy.py --model PACK`.

Rounds of a quiet and a disturbed measurement in turn; the medians are compared. Pools that only spin at barriers keep a few
percent here, because the thread that everybody waits for shares its core.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fermi_engine import report
from fermi_engine.config import EngineConfig
from fermi_engine.engine import Engine
from fermi_engine.errors import FermiError
from fermi_engine.session import Session

LEAST_SHARE = 0.45  # of the quiet speed; two cores shared fairly by three threads would give two thirds
SPIN = [sys.executable, "-c", "while True: pass"]


def rate(session: Session, tokens: int, rng: np.random.Generator) -> float:
    """Tokens per second of `tokens` decoded with random ids: the mean, because a stall counts."""
    ids = rng.integers(0, session.vocab_size, tokens).tolist()
    start = time.perf_counter()
    for token in ids:
        session.decode(token)
    return tokens / (time.perf_counter() - start)


def shares(session: Session, tokens: int, rounds: int) -> tuple[list[float], list[float]]:
    """Quiet and disturbed tokens per second, round by round."""
    rng = np.random.default_rng(0)
    rate(session, 2, rng)
    quiet, disturbed = [], []
    for _ in range(rounds):
        quiet.append(rate(session, tokens, rng))
        with subprocess.Popen(SPIN) as other:
            time.sleep(0.2)  # its interpreter starts
            disturbed.append(rate(session, tokens, rng))
            other.kill()
    return quiet, disturbed


def main() -> int:
    """The command line; exit status 1 when less than LEAST_SHARE is kept."""
    parser = argparse.ArgumentParser(description="Decoding beside one busy process.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    try:
        session = Engine.load(o.model, config=EngineConfig(threads=o.threads)).session()
    except FermiError as err:
        print(err, file=sys.stderr)
        return 2
    quiet, disturbed = shares(session, o.tokens, o.rounds)
    kept = statistics.median(disturbed) / statistics.median(quiet)
    found = {"threads": o.threads, "quiet": quiet, "disturbed": disturbed, "kept": kept}
    if o.json:
        report.json_document(found)
    else:
        rows = [(i, f"{a:.2f}", f"{b:.2f}") for i, (a, b) in enumerate(zip(quiet, disturbed, strict=True), 1)]
        report.table(f"{o.threads} threads beside a busy process: {100 * kept:.0f} % kept",
                     ("round", "quiet tok/s", "disturbed tok/s"), rows, right=("round", "quiet tok/s", "disturbed tok/s"))
    return int(kept < LEAST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
