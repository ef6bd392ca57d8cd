"""Hit rate of the snapshot cache's eviction against plain LRU, in tokens not evaluated again, on generated chats.

    python tools/lab/snapshot_policy.py [--requests N] [--seeds N]

Chats over a few system prompts, picked up again the sooner the more recent they are; some requests ask for another answer, change
the last message, or come without the reasoning of earlier answers. Everything but the states is real: prefixes, boundaries,
accounting and index. States are small, in the proportions of the full model (66 MB, and 2.6 MB of keys and values for 64 tokens).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fermi_engine.snapshots.budget import Costs
from fermi_engine.snapshots.cache import SnapshotCache
from fermi_engine.snapshots.prefix import NumericPath, Prefix
from fermi_engine.snapshots.prefix_tree import Entry
from fermi_engine.snapshots.taking import Taking
from fermi_engine.state import DeltaState, HybridState, KVPages

PATH = NumericPath("none", "q8_0", "f32")
STATE_FLOATS = 3200  # beside 512 bytes of keys and values for 64 tokens, as 66 MB beside 2.6 MB
STATE_BYTES = 4 * STATE_FLOATS
COSTS = Costs(save_s=0.015, token_s=0.02, frozen=True)  # of the full model on the CPU


@dataclass
class Request:
    """ids of the whole history, and where its messages end."""

    ids: np.ndarray
    marks: list[int]


@dataclass
class Chat:
    """Messages so far, user and assistant in turn after the system prompt; `reasoning` tokens stand before each answer when it is
    made, and not in the history if `strips`."""

    messages: list[np.ndarray]
    strips: bool
    ages: int = 0
    answers: list[np.ndarray] = field(default_factory=list)


def trace(seed: int, requests: int) -> Iterator[tuple[Request, np.ndarray]]:
    """(request, the answer's tokens that are decoded after it) one after another."""
    rng = np.random.default_rng(seed)

    def words(low: int, high: int) -> np.ndarray:
        return rng.integers(0, 200_000, int(np.exp(rng.uniform(np.log(low), np.log(high))))).astype(np.int32)

    systems = [words(200, 2000) for _ in range(5)]
    popularity = 1.0 / np.arange(1, 6)
    chats: list[Chat] = []
    for _ in range(requests):
        for chat in chats:
            chat.ages += 1
        recency = np.array([np.exp(-chat.ages / 6) for chat in chats])
        if not chats or rng.random() < max(0.12, 1 - recency.sum()):
            system = systems[rng.choice(5, p=popularity / popularity.sum())]
            chats.append(Chat([system], strips=rng.random() < 0.5))
            chat, kind = chats[-1], "next"
        else:
            chat = chats[rng.choice(len(chats), p=recency / recency.sum())]
            kind = rng.choice(["next", "again", "edit"], p=[0.8, 0.1, 0.1])
        chat.ages = 0
        if kind == "next" or len(chat.messages) < 3:
            chat.messages.append(words(15, 500))
        else:
            chat.messages.pop()  # the answer that was not liked
            if kind == "edit":
                last = chat.messages[-1]
                chat.messages[-1] = np.concatenate([last[: int(rng.integers(1, len(last)))], words(5, 100)])
        ids = np.concatenate(chat.messages)
        answer, reasoning = words(30, 500), words(50, 600) if chat.strips else words(1, 2)[:0]
        yield Request(ids, np.cumsum([len(m) for m in chat.messages])[:-1].tolist()), np.concatenate([reasoning, answer])
        chat.messages.append(answer if chat.strips else np.concatenate([reasoning, answer]))


class Lru(SnapshotCache):
    """The same with the least recently used going first."""

    _clock = 0

    def _touch(self, entry: Entry) -> None:
        self._clock += 1
        entry.start = self._clock

    def _worth(self, entry: Entry) -> float:
        return entry.start


def state_at(found: HybridState | None) -> HybridState:
    """A small live state, empty or a copy."""
    if found is not None:
        return found.copy()
    delta = DeltaState(np.zeros((1, 1), np.float32), np.zeros((1, 1, STATE_FLOATS), np.float32))
    return HybridState(0, [delta, KVPages(1, 64, 1)])


def evaluated(cache: SnapshotCache, requests: Iterator[tuple[Request, np.ndarray]]) -> tuple[int, int]:
    """Tokens of all prompts, and those that had to be evaluated."""
    total = again = 0
    for request, answer in requests:
        prefix = Prefix(request.ids, PATH)
        found = cache.lookup(prefix)
        state = state_at(found and found.state)
        total, again = total + len(prefix), again + len(prefix) - state.position
        if state.position < len(prefix):
            taking = Taking.plan(cache, prefix, state, request.marks)
            for stop in (*taking.stops, len(prefix)):
                move(state, stop)
                taking.take(state, (), np.zeros(1, np.float32) if stop == len(prefix) else None)
            taking.commit()
        whole = Prefix(np.concatenate([request.ids, answer]), PATH)
        move(state, len(whole))
        entry = cache.save(state, whole, "answer", ())
        if entry is not None:
            cache.publish([entry])
    return total, again


def move(state: HybridState, position: int) -> None:
    state.reserve(position)
    state.position = position


def compare(requests: int, seeds: range, snapshots: float) -> dict[str, float]:
    """Share of prompt tokens that were not evaluated again, by policy, within room for so many snapshots of 4000 tokens."""
    budget = int(snapshots * STATE_BYTES + 512 * 4000 / 64)
    shares = {}
    for name, kind in (("lru", Lru), ("worth", SnapshotCache)):
        counts = [evaluated(kind(budget, costs=COSTS), trace(seed, requests)) for seed in seeds]
        shares[name] = 1 - sum(again for _, again in counts) / sum(total for total, _ in counts)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    for snapshots in (3.5, 8, 16, 32, 64):
        shares = compare(args.requests, range(args.seeds), snapshots)
        print(f"{snapshots:5} snapshots: " + ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items()))


if __name__ == "__main__":
    main()
