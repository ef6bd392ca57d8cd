"""The CPU engine on float32 packs against transformers: both families, both expert layouts, logits and greedy tokens.

Errors are relative L2 norms over all logits of a prompt.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from fermi_engine import Engine
from fermi_engine.generate import greedy
from reference.decoder import Decoder
from tests import hf

LENGTHS = (1, 2, 3, 4, 63, 64, 65, 129)
LOGITS_CEILING = 1e-4
GREEDY_TOKENS, GREEDY_COMPARED = 64, 60

# (mixture of experts, value heads per key head, tied head, image-and-text class, fused experts)
CASES = [
    (True, 1, True, True, True),
    (True, 2, False, True, False),
    (True, 3, False, False, True),
    (False, 1, True, True, True),
    (False, 2, False, True, True),
    (False, 3, False, False, True),
]
IDS = [
    f"{'moe' if c[0] else 'dense'}-{c[1]}x{'-tied' if c[2] else ''}{'' if c[3] else '-text'}{'' if c[4] else '-per-expert'}"
    for c in CASES
]


class Pair:
    """transformers (eager and sdpa) and our engine over one checkpoint."""

    def __init__(self, case: tuple, directory) -> None:
        moe, ratio, tied, wrapped, fused = case
        options = {"moe": moe, "value_head_ratio": ratio, "tied": tied, "wrapped": wrapped, "seed": ratio}
        self.eager, self.sdpa = hf.build(**options), hf.build(**options, attention="sdpa")
        hf.save(self.eager, directory, fused=fused)
        self.engine = Engine.load(directory, format="f32")
        self.truth = Decoder(hf.text_config(self.eager), hf.canonical_params(self.eager, torch.float64))

    def spread(self, ids: list[int]) -> tuple[float, Tensor]:
        """Largest difference of transformers with itself: 1 against 2 threads, eager against sdpa; and its plain logits."""
        runs = []
        for count in (1, 2):
            with hf.threads(count):
                runs += [hf.logits(self.eager, ids), hf.logits(self.sdpa, ids)]
        return max(error(a, b) for a, b in itertools.combinations(runs, 2)), runs[0]


def error(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


def prompt(length: int) -> list[int]:
    return torch.randint(0, hf.VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.fixture(scope="module", params=CASES, ids=IDS)
def pair(request, tmp_path_factory, monkeypatch_module):
    directory = tmp_path_factory.mktemp("checkpoint")
    monkeypatch_module.setenv("FERMI_CACHE", str(tmp_path_factory.mktemp("cache")))
    with hf.threads(1), torch.no_grad():
        yield Pair(request.param, directory / "model")


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_logits_are_within_the_spread_of_transformers(pair, capsys):
    """And no further from the float64 truth than twice what transformers itself is: the spread alone does not see the
    error of layers that its settings share."""
    spreads, apart, ours, own = [], [], [], []
    for length in LENGTHS:
        ids = prompt(length)
        spread, theirs = pair.spread(ids)
        mine, exact = torch.from_numpy(pair.engine.session().logits(ids)), pair.truth.forward(ids)[0]
        spreads.append(spread)
        apart.append(error(mine, theirs))
        ours.append(error(mine, exact))
        own.append(error(theirs, exact))
        with capsys.disabled():
            print(f"\nT {length:3d}: transformers with itself {spread:.1e}, engine to it {apart[-1]:.1e}; "
                  f"to float64: transformers {own[-1]:.1e}, engine {ours[-1]:.1e}", end="")
    assert max(apart) <= min(2 * max(spreads), LOGITS_CEILING)
    assert max(ours) <= 2 * max(own)


def test_greedy_tokens_are_those_of_transformers(pair):
    """Equal up to the first position whose top-2 margin is within twice the largest logit difference seen."""
    ids = prompt(5)
    theirs = hf.greedy(pair.eager, ids, GREEDY_TOKENS)
    logits = hf.logits(pair.eager, ids + theirs)[len(ids) - 1 : -1]
    ours = torch.from_numpy(pair.engine.session().logits(ids + theirs))[len(ids) - 1 : -1]
    noise = 2 * float((ours - logits).abs().max())
    best = logits.topk(2).values
    unsure = (best[:, 0] - best[:, 1] <= noise).nonzero()
    compared = int(unsure[0]) if len(unsure) else GREEDY_TOKENS
    assert compared >= GREEDY_COMPARED, f"only {compared} positions are decided by more than the noise {noise:.1e}"
    assert greedy(pair.engine.session(), ids, GREEDY_TOKENS)[:compared] == theirs[:compared]
    assert len(set(theirs)) > 8, "a text that repeats itself compares nothing"


def test_both_expert_layouts_make_one_pack(tmp_path, monkeypatch):
    monkeypatch.setenv("FERMI_CACHE", str(tmp_path / "cache"))
    model = hf.build(True, 2)
    logits = []
    for fused in (True, False):
        hf.save(model, tmp_path / str(fused), fused=fused)
        logits.append(Engine.load(tmp_path / str(fused), format="q4_0").session().logits(prompt(9)))
    assert np.array_equal(*logits)
