"""Prefill on the (emulated) GPU: the same bits however it is cut, scheduled and placed. What they are worth: test_hybrid_*.py."""

from __future__ import annotations

import itertools
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from fermi_engine import Engine
from fermi_engine.gpu import stream as gpu_stream
from fermi_engine.gpu.prefill import HybridPrefill, few_are_hit
from fermi_engine.gpu.report import busy
from fermi_engine.kernels.emulated import EmulatedDevice
from fermi_engine.kernels.schedule import EmulatedStream
from tests.gpu_cases import LENGTH, engines, fresh, hybrid, ids_for, outcome, packs, plain, run
from tools.lab import timeline_svg

SEEDS = range(200)


# the same bits


@pytest.mark.parametrize(("name", "slots", "token_block", "room"), [
    *itertools.product(["moe"], [1, 2, 3], [None, 64, 256], ["resident", "streamed"]),
    ("dense", 2, 256, "streamed"), ("dense", 1, 64, "resident"), ("dense", 3, 64, "streamed"),
])
def test_slots_blocks_and_residence_change_no_bit(engines, plain, name, slots, token_block, room):
    engine, ids = engines[name], ids_for(engines[name])
    options = {"slots": slots, "token_block": token_block}
    vram = None
    if room == "streamed":  # a byte too little for everything, at this cut: some layers have to go
        vram = hybrid(engine, **options).plan(0, len(ids)).total - 1
    device = EmulatedDevice()
    prefill = hybrid(engine, device, vram=vram, **options)
    state = fresh(engine)
    assert outcome(prefill.run(ids, state), state) == plain[name]
    plan = prefill.last.plan
    assert (plan.resident < 4) == (room == "streamed")
    assert plan.slots == slots
    assert len(plan.blocks) == (3 if token_block == 64 else 1)
    assert prefill.last.copied_bytes == expected_copies(prefill)


def expected_copies(prefill: HybridPrefill) -> int:
    """Resident layers once, the others and all experts once a block."""
    plan = prefill.last.plan
    dense = [sum(piece.nbytes for _, piece in w.pieces()) for w in prefill.dense]
    streamed = sum(dense[plan.resident :]) + sum(w.nbytes for w in prefill.experts)
    return sum(dense[: plan.resident]) + len(plan.blocks) * streamed


def test_few_tokens_copy_only_the_experts_they_hit(engines):
    engine = engines["trained"]
    c = engine.config
    ids = ids_for(engine, 2)
    assert few_are_hit(c.num_experts, c.num_experts_per_tok, 2)
    assert not few_are_hit(c.num_experts, c.num_experts_per_tok, 3)
    assert [few_are_hit(128, 8, tokens) for tokens in (10, 11)] == [True, False]
    prefill = hybrid(engine)
    state = fresh(engine)
    few = outcome(prefill.run(ids, state), state)
    copied = prefill.last.copied_bytes - sum(piece.nbytes for w in prefill.dense for _, piece in w.pieces())
    assert c.num_hidden_layers * c.num_experts_per_tok <= copied / prefill.experts[0].expert_bytes \
        <= c.num_hidden_layers * c.num_experts_per_tok * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fermi_engine.gpu.prefill.few_are_hit", lambda *_: False)
        assert run(engine, ids) == few


@pytest.mark.parametrize("cuts", [(1,), (63, 64), (5, 70, 71), (64, 128), (149,)])
def test_a_prompt_in_pieces_gives_the_bits_of_one(engines, plain, cuts):
    engine, ids = engines["moe"], ids_for(engines["moe"])
    prefill, state = hybrid(engine), fresh(engine)
    for begin, end in itertools.pairwise((0, *cuts, len(ids))):
        state = state.copy()  # as a snapshot does
        hidden = prefill.run(ids[begin:end], state)
    assert outcome(hidden, state) == plain["moe"]


@pytest.mark.parametrize("kv_format", ["f16", "q8_0"])
@pytest.mark.parametrize("cut", [1, 64, 149])
def test_rounded_keys_know_no_cuts_either(engines, kv_format, cut):
    """What a pass attends to is what the host keeps, so that a pass that finds it there sees the same."""
    engine, ids = engines["moe"], ids_for(engines["moe"])
    whole, state = fresh(engine, kv_format), fresh(engine, kv_format)
    expected = outcome(hybrid(engine).run(ids, whole), whole)
    prefill = hybrid(engine)
    prefill.run(ids[:cut], state)
    assert outcome(prefill.run(ids[cut:], state), state) == expected


# streams


class Deaf(EmulatedDevice):
    """A device on which the nth wait of every stream called `stream` is lost."""

    def __init__(self, seed: int | None, stream: str, nth: int | None) -> None:
        super().__init__(seed=seed)
        self._which, self._nth = stream, nth

    def stream(self, name: str) -> EmulatedStream:
        made = super().stream(name)
        if name == self._which:
            count, wait = itertools.count(), made.wait
            made.wait = lambda event: None if next(count) == self._nth else wait(event)
        return made


@pytest.fixture(scope="module")
def small(engines) -> tuple[Engine, np.ndarray, dict[str, bytes]]:
    """A case for many runs: few tokens, all experts copied ahead."""
    engine = engines["moe"]
    ids = ids_for(engine, 6)
    assert not few_are_hit(engine.config.num_experts, engine.config.num_experts_per_tok, len(ids))
    return engine, ids, run(engine, ids)


def wrong(small: tuple[Engine, np.ndarray, dict[str, bytes]], seeds: Any, make: Any, **options: Any) -> int:
    engine, ids, right = small
    return sum(run(engine, ids, make(seed), **options) != right for seed in seeds)


def test_every_schedule_gives_the_same_bits(small, monkeypatch):
    monkeypatch.setattr(gpu_stream, "RING_BYTES", 10_000)
    vram = hybrid(small[0]).plan(0, 6).total - 1
    assert wrong(small, SEEDS, lambda seed: EmulatedDevice(seed=seed), vram=vram) == 0


@pytest.mark.parametrize("seed", range(8))
def test_blocks_give_the_same_bits_in_every_schedule(engines, plain, seed):
    """The host fills the same memory with each block's embedding rows."""
    assert run(engines["moe"], ids_for(engines["moe"]), EmulatedDevice(seed=seed), token_block=64) == plain["moe"]


# On stream `compute` wait 0 is for the first layer's experts, on `copies` waits 0 and 1 find fresh slots and wait 2 the first
# slot in use, on `results` wait 1 is for the second layer.
@pytest.mark.parametrize(("stream", "nth"), [("compute", 0), ("compute", 2), ("copies", 2), ("results", 1)])
def test_a_missing_wait_is_caught(small, stream, nth):
    seeds = range(16)
    assert wrong(small, seeds, lambda seed: Deaf(seed, stream, None)) == 0
    assert wrong(small, seeds, lambda seed: Deaf(seed, stream, nth)) >= 2


def test_copies_overlap_the_layer_before(engines):
    device = EmulatedDevice()
    prefill = hybrid(engines["moe"], device, timing=True)
    prefill.run(ids_for(engines["moe"]), fresh(engines["moe"]))
    spans = prefill.last.spans
    kernels = busy(spans, "compute")
    for layer in (1, 2):
        copy = next(span for span in spans if span.label == f"experts {layer}")
        assert any(begin < copy.end_s and copy.begin_s < end for begin, end in kernels)
    assert "of it at once" in prefill.last.line()
    picture = ElementTree.fromstring(timeline_svg.draw(timeline_svg.rows_of(spans), prefill.last.line()))
    drawn = [box.get("fill") for box in picture.iter("{http://www.w3.org/2000/svg}rect")]
    assert {colour for _, colour, _ in timeline_svg.KINDS} <= set(drawn)
    prefill.timing = False
    prefill.run(ids_for(engines["moe"]), fresh(engines["moe"]))
    assert prefill.last.spans == ()
    assert "at once" not in prefill.last.line()


def test_progress_counts_up_to_all_tokens(engines):
    seen: list[tuple[int, int]] = []
    hybrid(engines["moe"], token_block=64).run(ids_for(engines["moe"]), fresh(engines["moe"]), lambda *now: seen.append(now))
    assert seen[-1] == (LENGTH, LENGTH)
    assert len(seen) > 4
    assert seen == sorted(seen)
