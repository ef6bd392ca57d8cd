"""What snapshots cost and save at full size: `python tools/bench/snapshots.py PACK [--prefill gpu] [--edits] [--check]`.

One run: a cold prompt with and without leaving snapshots, the same prompt again, a restore beside a plain copy of as many bytes,
and a chat of five turns whose evaluated tokens are counted. --edits: a prompt of 1,500 tokens that is changed near its end, in
its last third and at its beginning. --check: every logits row that came from a snapshot against a run that was never
interrupted. Tokens are random, and no two prompts share a beginning unless they should.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fermi_engine import report
from fermi_engine.config import EngineConfig
from fermi_engine.engine import Engine
from fermi_engine.errors import FermiError
from fermi_engine.kept_memory import copy_arrays
from fermi_engine.session import Session
from fermi_engine.sizes import parse_budget
from fermi_engine.state import DeltaState

REPEATS = 7  # of what takes milliseconds; the median counts
TURNS, SYSTEM_TOKENS, MESSAGE_TOKENS, ANSWER_TOKENS = 5, 200, 40, 16
EDITED_TOKENS = 1500


class Measured:
    """Prompts on one engine: times, tokens evaluated, and whether the logits are those of a run without snapshots."""

    def __init__(self, engine: Engine, check: bool) -> None:
        self.engine, self.check = engine, check
        self.compared: list[bool] = []
        self._rng = np.random.default_rng(1)

    def ids(self, count: int) -> list[int]:
        """Random tokens."""
        return self._rng.integers(0, self.engine.config.vocab_size, count).tolist()

    def ask(self, session: Session, ids: list[int], marks: tuple[int, ...] = ()) -> tuple[float, int]:
        """Seconds for a prompt, and how many of its tokens were evaluated."""
        seconds, logits = timed(lambda: session.prompt(ids, marks=marks))
        if self.check and session.cached_tokens:
            self.compared.append(np.array_equal(logits, self.uninterrupted(ids, session.trail)))
        return seconds, len(ids) - session.cached_tokens

    def uninterrupted(self, ids: list[int], trail: tuple[tuple[int, str], ...]) -> np.ndarray:
        """Logits of the same calls in a session that has no snapshots."""
        cache, self.engine.snapshots = self.engine.snapshots, None
        try:
            session, begin = self.engine.session(), 0
            for end, way in trail:
                if way == "cpu" and self.engine.gpu is not None:
                    logits = [session.decode(token) for token in ids[begin:end]][-1]
                else:
                    logits = session.prompt(ids[:end])
                begin = end
            return logits
        finally:
            self.engine.snapshots = cache


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = call()
    return time.perf_counter() - start, found


def median(call: Callable[[], Any]) -> float:
    call()
    return float(np.median([timed(call)[0] for _ in range(REPEATS)]))


def cold_and_again(m: Measured, tokens: int, rounds: int) -> dict[str, Any]:
    """Prompts without snapshots and with them by turns, the fastest of each, and one again after another one."""
    engine, cache, session = m.engine, m.engine.snapshots, m.engine.session()
    plain_s = cold_s = float("inf")
    engine.snapshots = None
    session.prompt(m.ids(64))  # weights in memory, kernels loaded
    for _ in range(rounds):
        ids, engine.snapshots = m.ids(tokens), None
        plain_s = min(plain_s, timed(lambda: session.prompt(ids))[0])  # noqa: B023
        engine.snapshots, before, ids = cache, cache.stats.saved, m.ids(tokens)
        session = engine.session()
        seconds, evaluated = m.ask(session, ids)
        cold_s, taken = min(cold_s, seconds), cache.stats.saved - before

    def again() -> float:
        session.prompt([ids[0] + 1 if ids[0] == 0 else ids[0] - 1, *ids[:7]])
        return m.ask(session, ids)[0]

    again()
    repeat_s = float(np.median([again() for _ in range(REPEATS)]))
    return {"tokens": tokens, "cold without snapshots, s": plain_s, "cold, s": cold_s, "evaluated": evaluated, "snapshots": taken,
            "spacing": cache.costs.spacing(tokens), "save, ms": 1e3 * cache.stats.save_s / max(1, cache.stats.saved),
            "again, ms": 1e3 * repeat_s, "again, % of cold": 100 * repeat_s / cold_s,
            "again evaluates": tokens - session.cached_tokens, **restoring(session)}


def restoring(session: Session) -> dict[str, float]:
    """A restore beside a copy of as many bytes, by the same threads."""
    snapshot = session.snapshot()
    sizes = [array.nbytes for layer in snapshot.state.layers if isinstance(layer, DeltaState) for array in vars(layer).values()]
    source, target = (np.ones(sum(sizes), np.uint8) for _ in "12")
    edges = np.linspace(0, len(source), len(sizes) + 1).astype(int)
    pairs = [(target[a:b], source[a:b]) for a, b in pairwise(edges)]
    copy_s, restore_s = median(lambda: copy_arrays(pairs)), median(lambda: session.restore(snapshot))
    return {"restored, MB": sum(sizes) / 1e6, "restore, ms": 1e3 * restore_s, "copy of as many bytes, ms": 1e3 * copy_s,
            "restore : copy": restore_s / copy_s}


def chat(m: Measured) -> list[dict[str, Any]]:
    """Five turns, each asked in a session that has served another prompt meanwhile."""
    history, rows, held = m.ids(SYSTEM_TOKENS), [], 0
    session = m.engine.session()
    for turn in range(TURNS):
        history = [*history, *m.ids(MESSAGE_TOKENS)]
        seconds, evaluated = m.ask(session, history, (SYSTEM_TOKENS, len(history) - 4))
        rows.append({"turn": turn + 1, "prompt": len(history), "new": len(history) - held, "evaluated": evaluated, "s": seconds})
        answer = m.ids(ANSWER_TOKENS)
        for token in answer:
            session.decode(token)
        history, held = [*history, *answer], len(history) + len(answer)
        session.prompt(m.ids(5))
    return rows


def edits(m: Measured) -> list[dict[str, Any]]:
    """A prompt changed from some place on; `at most` as is promised: 1.15 times what changes, or a spacing more."""
    ids, rows, spacing = m.ids(EDITED_TOKENS), [], m.engine.snapshots.costs.spacing(EDITED_TOKENS)
    session = m.engine.session()
    session.prompt(ids)
    for what, count in (("nothing", 0), ("last 20 tokens", 20), ("last third", EDITED_TOKENS // 3),
                        ("all from token 16", EDITED_TOKENS - 16)):
        place, most = EDITED_TOKENS - count, min(EDITED_TOKENS, max(int(1.15 * count), count + spacing)) if count else 0
        changed = [*ids[:place], *[(token + 1) % m.engine.config.vocab_size for token in ids[place:]]]
        seconds, evaluated = m.ask(session, changed)
        rows.append({"changed": what, "evaluated": evaluated, "at most": most, "s": seconds})
    return rows


def main() -> int:
    """The command line; exit status 1 when a figure or a bit is not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=1, help="of cold prompts; 3 for a GPU, whose first locks memory")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prefill", default="cpu")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gemm", default="own")
    parser.add_argument("--load", default="mmap")
    parser.add_argument("--activations", default="q8_0")
    parser.add_argument("--snapshot-ram")
    parser.add_argument("--edits", action="store_true")
    parser.add_argument("--fine", action="store_true", help="boundaries as near as 64 tokens, whatever they cost")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    try:
        m = Measured(Engine.load(o.pack, config=EngineConfig(
            threads=o.threads, prefill=o.prefill, device=o.device, gemm=o.gemm, load=o.load, activations=o.activations,
            snapshot_ram=parse_budget("--snapshot-ram", o.snapshot_ram))), o.check)
        m.engine.snapshots.costs.frozen = o.fine
        found = {"prompt": cold_and_again(m, o.tokens, o.rounds), "chat": chat(m), "edits": edits(m) if o.edits else [],
                 "equal": f"{sum(m.compared)} of {len(m.compared)}", "totals": m.engine.snapshots.line()}
    except FermiError as err:
        print(err, file=sys.stderr)
        return 2
    show(found, o.json)
    good = (found["prompt"]["again, % of cold"] <= 1 and found["prompt"]["restore : copy"] <= 2 and all(m.compared)
            and all(row["new"] == row["evaluated"] for row in found["chat"])
            and all(row["evaluated"] <= row["at most"] for row in found["edits"]))
    return int(not good)


def show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        report.json_document(found)
        return
    report.facts("prompt", {name: f"{value:.4g}" for name, value in found["prompt"].items()})
    for title in ("chat", "edits"):
        if found[title]:
            names = list(found[title][0])
            report.table(title, names, [[f"{value:.3f}" if isinstance(value, float) else value for value in row.values()]
                                        for row in found[title]], right=names)
    print(f"logits equal to those without snapshots: {found['equal']}\n{found['totals']}")


if __name__ == "__main__":
    sys.exit(main())
