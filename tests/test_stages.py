"""Every stage that the CPU has, on every backend it runs, against the reference: fermi_engine/stages/table.py meets
tests/stages.py.

test_sm20_stages.py does the same for the GPU's half."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fermi_engine.compare import Arrays, Case, Exact
from fermi_engine.kernels import dispatch
from fermi_engine.kernels._build import kernels as declared_kernels
from fermi_engine.stages.table import STAGES, Stage, find_stage
from tests.guarded import GuardedKernels, misplaced
from tests.oracle import tensors
from tests.stages import ORACLES

CSRC = Path(__file__).resolve().parent.parent / "csrc"
each_stage = pytest.mark.parametrize("stage", [stage for stage in STAGES if stage.cpu], ids=lambda stage: stage.name)
seeds = st.integers(0, 2**32 - 1)


def examples(stage: Stage, share: float = 1.0) -> settings:
    """Examples of the profile; rows above kernels take longer and build on kernels that have been tested, so fewer."""
    return settings(max_examples=max(3, int(settings().max_examples * share * (1 if stage.cpu.ops else 0.4))))


def drawn(stage: Stage):
    """Decorator: the test runs on (inputs) of the stage's structure."""
    oracle = ORACLES[stage.name]

    def decorate(test):
        @given(seeds, st.fixed_dictionaries(dict(oracle.structure)))
        def run(seed, structure):
            inputs = oracle.inputs(seed, **structure)
            assume(oracle.usable(tensors(inputs)))
            test(inputs)
        return run
    return decorate


def same_bits(a: Arrays, b: Arrays) -> list[str]:
    """Outputs that differ in a byte; all NaN count as one, since IEEE 754 leaves their bits open."""
    assert a.keys() == b.keys()
    return [name for name in a if not Exact().judge(a, Case({}, {name: b[name]}, {})).passed]


def test_both_halves_of_the_table_have_the_same_rows():
    assert [stage.name for stage in STAGES] == list(ORACLES)


def test_every_kernel_has_a_row_of_its_name():
    about = {stage.name: stage.cpu.ops for stage in STAGES if stage.cpu and stage.cpu.ops}
    assert about == {name: (name,) for name in about}
    assert sorted(about) == sorted(op for op, _, _ in declared_kernels(CSRC))


@each_stage
def test_stage(stage):
    """Within the row's rule of the reference; nothing written outside, nothing left unwritten, inputs as they were; the
    op's own kernel ran; and every backend gives the same bits."""
    oracle = ORACLES[stage.name]

    @examples(stage)
    @drawn(stage)
    def holds(inputs):
        case, given_to = oracle.case(inputs), misplaced(inputs)
        results = []
        for backend in dispatch.supported():
            k = GuardedKernels(backend)
            results.append(stage.cpu.compute(k, given_to))
            verdict = stage.cpu.judge(results[-1], case)
            assert verdict.passed, f"{backend}: {verdict}"
            assert k.overruns() == 0, backend
            assert same_bits(given_to, inputs) == [], backend
            assert set(k.ran.values()) <= {backend}
            assert not stage.cpu.ops or k.ran == dict.fromkeys(stage.cpu.ops, backend)
        assert all(same_bits(result, results[0]) == [] for result in results), dispatch.supported()
    holds()


@each_stage
def test_threads_and_grain_change_no_bit(stage):
    """One item at a time on 2, 3 and 7 threads, and three at a time, against the whole in one call."""
    @examples(stage, 0.2)
    @drawn(stage)
    def holds(inputs):
        for backend in dispatch.supported():
            whole = stage.cpu.compute(GuardedKernels(backend, 1), inputs)
            for threads, grain in ((1, 1), (2, 1), (3, 3), (7, 1)):
                k = GuardedKernels(backend, threads, grain if threads > 1 else 1)
                assert same_bits(stage.cpu.compute(k, inputs), whole) == [], (backend, threads, grain)
                assert k.overruns() == 0
    holds()


@pytest.mark.parametrize("name", ["decoder", "decoder_q4_0"])
def test_any_cut_and_page_size_give_the_same_bits(name):
    stage = find_stage(name)

    @examples(stage, 0.4)
    @drawn(stage)
    def holds(inputs):
        k = GuardedKernels(dispatch.supported()[0])
        whole = stage.cpu.compute(k, inputs)
        for cut in range(len(inputs["ids"]) + 1):
            moved = {**inputs, "cut": np.array(cut), "page_tokens": np.array(1 + cut)}
            assert same_bits(stage.cpu.compute(k, moved), whole) == [], cut
    holds()


def test_permuted_experts_change_nothing():
    """Without ties the order of experts is the order of logits, whatever their numbers."""
    stage, oracle = find_stage("sparse_moe"), ORACLES["sparse_moe"]
    inputs = oracle.inputs(1, tokens=6, hidden=40, intermediate=12, experts=9, top_k=3)
    order = np.random.RandomState(0).permutation(9)
    permuted = {name: array[order] if "experts" in name or name.endswith("mlp.gate.weight") else array
                for name, array in inputs.items()}
    k = GuardedKernels(dispatch.supported()[0])
    plain, moved = stage.cpu.compute(k, inputs), stage.cpu.compute(k, permuted)
    assert same_bits({"y": plain["y"]}, {"y": moved["y"]}) == []
    np.testing.assert_array_equal(order[moved["ids"]], plain["ids"])


class LeavesOneOut(GuardedKernels):
    """Kernels that forget the last item, or write one element too many."""

    def __init__(self, backend: str, extra: int) -> None:
        super().__init__(backend)
        self._extra = extra

    def _run(self, op, struct, items, grain, fields):
        super()._run(op, struct, items + self._extra, grain, fields)


def test_a_forgotten_item_and_an_overrun_are_noticed():
    stage, inputs = find_stage("swiglu"), {"gate_up": np.ones((3, 10), np.float32)}
    short, long = LeavesOneOut("scalar", -1), LeavesOneOut("scalar", 1)
    assert np.isnan(stage.cpu.compute(short, inputs)["y"][2]).all()
    assert not short.overruns()
    bigger = {"gate_up": np.ones((4, 10), np.float32)[:3]}  # what the extra item reads is there
    stage.cpu.compute(long, bigger)
    assert long.overruns() == 5 * 4
