"""Memory and disk together, process after process: what is asked after a restart has the bits of a run that never stopped.

Every cut of a prompt through a file: tests/test_snapshots.py and tests/test_gpu_snapshots.py, by the detour "disk".
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from fermi_engine.session import Session
from fermi_engine.snapshots.prefix import Prefix
from fermi_engine.stages.runs import ArrayModel
from tests import snapshot_cases as cases
from tests.conftest import SOAK
from tests.snapshot_cases import ids_for, outcome, poisoned, snapshot_bytes, uninterrupted
from tests.test_snapshot_disk import held_bytes
from tests.test_snapshot_machine import GPU_SIZE, SIZE, GpuSnapshotMachine, SnapshotMachine


class Restarts:
    """A model whose process ends and begins again, with nothing left but a directory."""

    def __init__(self, directory: Path, budget: int = cases.PLENTY, make: Callable[..., ArrayModel] = cases.engine,
                 **options: object) -> None:
        self.directory, self.budget, self.make, self.options, self.notes = directory, budget, make, options, []
        self.begin()

    def begin(self) -> ArrayModel:
        model = self.make(self.budget, **self.options)
        self.tier = cases.tier(model, self.directory, notes=self.notes)
        model.snapshots.tier = self.tier
        self.model = model
        return model

    def again(self) -> ArrayModel:
        self.tier.flush()
        return self.begin()


def check(model: ArrayModel, ids: list[int], marks: tuple[int, ...] = ()) -> int:
    """Ask for a whole prompt in a ruined session; the outcome is that of the same calls, on the CPU that of a cold run. Tokens
    that were cached."""
    session = poisoned(model)
    found = outcome(session, session.prompt(ids, marks=marks))
    assert found == uninterrupted(model, ids, session.trail)
    assert model.gpu is not None or found == uninterrupted(model, ids)
    return session.cached_tokens


@pytest.mark.parametrize(("make", "options"), [(cases.engine, {"kv_format": "f32"}), (cases.engine, {"kv_format": "q8_0"}),
                                               (cases.gpu_engine, {})])
def test_chats_go_on_after_each_restart(tmp_path, make, options):
    """By turns, with an edited last message, with reasoning left out of the history, and the same again."""
    process = Restarts(tmp_path, make=make, **options)
    system = ids_for(40, 1)
    for chat in range(2):
        history = [*system, *ids_for(50 + 9 * chat, 10 + chat)]
        for turn in range(3):
            marks = (40, len(history) - 6)
            assert check(process.again(), history, marks) >= (40 if chat or turn else 0)
            assert check(process.again(), history, marks) == len(history)
            assert check(process.again(), [*history[:-4], *ids_for(9, 30 + turn)], marks) >= marks[1]
            session = Session(process.again())
            session.prompt(history, marks=marks)
            answer = [int(session.decode(token).argmax()) for token in ids_for(12, 20 + turn)]
            session.keep()
            more = [*history, *ids_for(12, 20 + turn), *answer]
            assert check(process.again(), more, marks) == len(history) + 12
            history = [*history, *answer[5:], *ids_for(15, 40 + turn)]  # the first five were reasoning
    assert process.notes == []


def test_what_memory_has_no_room_for_comes_from_the_disk(tmp_path):
    process = Restarts(tmp_path, budget=int(2.5 * snapshot_bytes(90)))
    prompts = [ids_for(60 + 7 * i, i) for i in range(5)]
    for ids in prompts:
        assert check(process.model, ids) == 0
        process.tier.flush()
    model = process.model
    for ids in [*prompts, *prompts[::-1]]:
        assert check(model, ids) == len(ids)
    assert model.snapshots.stats.evicted > 0
    assert process.tier.stats.loaded >= 5


def test_a_damaged_file_gives_way_to_the_next_best(tmp_path):
    process, ids = Restarts(tmp_path), ids_for(120)
    check(process.model, ids, (50, 90))
    model = process.again()
    files = {info.position: info.path for info in process.tier.infos() if info.digest == Prefix(
        ids, info.numeric).digest(info.position)}
    assert sorted(files) == [50, 90, 120]
    for position in (90, 120):
        data = bytearray(files[position].read_bytes())
        data[-1500] ^= 1  # keys and values
        files[position].write_bytes(data)
    assert check(process.again(), ids, (50, 90)) == 50
    assert len(process.notes) == 2
    assert check(model, ids) >= 50


def flipped(data: bytes, order: random.Random) -> bytes:
    """With one wrong bit."""
    if not data:
        return data
    wrong = bytearray(data)
    wrong[order.randrange(len(data))] ^= 1 << order.randrange(8)
    return bytes(wrong)


class Restarting:
    """What makes a machine one of restarts: a disk tier, files that are damaged, lost or of others, another process beside."""

    def make(self, budget: int) -> ArrayModel:
        model = super().make(budget)
        if not hasattr(self, "directory"):
            self.directory, self.budget = Path(tempfile.mkdtemp()), budget
            self.disk = int(0.8 * model.snapshots.holdings.budget)
        model.snapshots.tier = cases.tier(model, self.directory, self.disk)
        return model

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.snapshots.tier.flush()
        super().teardown()
        if hasattr(self, "directory"):
            shutil.rmtree(self.directory)

    @rule()
    def restart(self) -> None:
        """Nothing is left but the directory."""
        self.model.snapshots.tier.flush()
        self.patch.undo()
        self.patch = pytest.MonkeyPatch()
        self.model = self.make(self.budget)
        self.trace = cases.Tracer(self.model, self.patch)
        self.sessions = [Session(self.model) for _ in self.sessions]
        self.kept = []

    @rule(which=st.integers(0, 9), how=st.sampled_from(["flip", "cut", "lose", "swap", "empty"]), seed=st.integers(0, 9))
    def spoil(self, which: int, how: str, seed: int) -> None:
        paths = sorted(self.directory.glob("*.safetensors"))
        if not paths:
            return
        path, other, order = paths[which % len(paths)], paths[(which + 1) % len(paths)], random.Random(seed)
        data = path.read_bytes()
        if how == "lose":
            path.unlink()
        elif how == "swap":
            path.write_bytes(other.read_bytes())
            other.write_bytes(data)
        else:
            path.write_bytes({"flip": flipped(data, order), "cut": data[: order.randrange(len(data) + 1)], "empty": b""}[how])

    @rule(seed=st.integers(0, 99))
    def spoil_all_and_restart(self, seed: int) -> None:
        """And ask for the last prompt again, which only the disk could have."""
        order = random.Random(seed)
        for path in self.directory.glob("*.safetensors"):
            path.write_bytes(flipped(path.read_bytes(), order))
        self.restart()
        self.request(0, len(self.asked) - 1, 1.0, 0, 0, [])

    @rule(source=st.integers(0, 5), keep=st.floats(0.1, 1))
    def another_process(self, source: int, keep: float) -> None:
        """It saves a state of its own, and makes room for it."""
        ids = self.prompt(source, keep, 0, 0)
        session = Session(replace(self.model, snapshots=None))
        logits = session.prefill(ids)
        other = cases.tier(self.model, self.directory, self.disk)
        other.put(replace(session.snapshot(), logits=logits), lambda: None)
        other.flush()

    @invariant()
    def stays_in_its_budget(self) -> None:
        if hasattr(self, "trace"):
            self.model.snapshots.tier.flush()
            assert held_bytes(self.directory) <= self.disk
        super().stays_in_its_budget()


class RestartMachine(Restarting, SnapshotMachine):
    """On the CPU."""


class GpuRestartMachine(Restarting, GpuSnapshotMachine):
    """Where the GPU reads prompts."""


TestRestarts = RestartMachine.TestCase
TestRestarts.settings = settings(SIZE, deadline=None, max_examples=SIZE.max_examples if SOAK else 20)
TestGpuRestarts = GpuRestartMachine.TestCase
TestGpuRestarts.settings = settings(GPU_SIZE, deadline=None, max_examples=GPU_SIZE.max_examples if SOAK else 4)
