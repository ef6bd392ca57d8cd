"""Snapshots on the CPU: to go on from one equals never having stopped, to the bit, and evaluates no more than it must."""

from __future__ import annotations

import numpy as np
import pytest

from fermi_engine import Engine, EngineConfig, SamplingParams
from fermi_engine.errors import ConfigError, RequestError
from fermi_engine.session import Session
from fermi_engine.sizes import parse_budget
from fermi_engine.stages.runs import ArrayModel
from fermi_engine.timeline import turn_ends
from tests import snapshot_cases as cases
from tests.snapshot_cases import (
    DETOURS,
    Counting,
    engine,
    ids_for,
    outcome,
    poison,
    poisoned,
    snapshot_bytes,
    uninterrupted,
)

LENGTH = 200
SEEDS = range(20)


def asked(session: Session, ids: list[int], marks: tuple[int, ...] = ()) -> bytes:
    return outcome(session, session.prompt(ids, marks=marks))


def check(model: ArrayModel, ids: list[int], session: Session | None = None, marks: tuple[int, ...] = ()) -> int:
    """Ask for a whole prompt, in a ruined session if in none; the outcome is that of a cold run. Tokens that were cached."""
    session = session or poisoned(model)
    assert asked(session, ids, marks) == uninterrupted(model, ids)
    return session.cached_tokens


# resumed equals uninterrupted, and cold


@pytest.mark.parametrize("detour", DETOURS)
@pytest.mark.parametrize(("token_block", "kv_block", "kv_format"),
                         [(5, 8, "f32"), (16, 64, "f32"), (64, 7, "q8_0"), (256, 16, "f16")])
def test_every_cut_resumes_to_the_bit(token_block, kv_block, kv_format, detour):
    """Into a session whose state is ruined or a fork of one, while the session that the snapshot came from moves on."""
    model = engine(None, token_block=token_block, kv_block=kv_block, kv_format=kv_format)
    ids = ids_for(LENGTH)
    right = uninterrupted(model, ids)
    first, other = Session(model), poisoned(model)
    for cut in range(1, LENGTH):
        first.prefill(ids[cut - 1 : cut])
        other.restore(DETOURS[detour](model, first.snapshot()))
        if cut % 8 == 3:
            other = other.fork()
        assert outcome(other, other.prefill(ids[cut:])) == right, cut
        poison(other)
    assert outcome(first, first.prefill(ids[LENGTH - 1 :])) == right


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_prompts_shorter_than_the_convolution(taps):
    model = engine(taps=taps)
    for length in (1, 2, 3, 4, 5):
        for tail in (1, 2, 3):
            ids = ids_for(length, seed=length)
            check(model, ids)
            assert check(model, ids) == length
            assert check(model, [*ids, *ids_for(tail, seed=100 + tail)]) == length


@pytest.mark.parametrize("tail", [1, 2, 3])
def test_short_tails_after_a_hit(tail):
    model = engine()
    for length in (63, 64, 65, 127, 130):
        ids = ids_for(length + tail, seed=length)
        check(model, ids[:length])
        assert check(model, ids) == length


def test_a_fork_goes_its_own_way():
    model, ids = engine(None), ids_for(70)
    session = Session(model)
    session.prefill(ids[:50])
    fork = session.fork()
    grandchild = fork.fork()
    ways = [(session, ids_for(20, 1)), (fork, ids_for(30, 2)), (grandchild, ids_for(25, 3))]
    for step in range(20):  # by turns, token by token, all in the page that they share at first
        for one, tokens in ways:
            logits = one.decode(tokens[step])
            if step == 19:
                assert outcome(one, logits) == uninterrupted(model, [*ids[:50], *tokens[:20]])


def test_what_was_asked_does_not_matter():
    """Chats by turns, an edited last message, reasoning left out of the history: all as if they were the first."""
    model = engine()
    system = ids_for(40, 1)
    for chat in range(3):
        history = [*system, *ids_for(50 + 9 * chat, 10 + chat)]
        for turn in range(3):
            marks = (40, len(history) - 6)
            session = poisoned(model)
            check(model, history, session, marks)
            answer = [int(session.decode(token).argmax()) for token in ids_for(12, 20 + turn)]
            session.keep()
            assert check(model, [*history, *ids_for(12, 20 + turn), *answer], None, marks) == len(history) + 12
            edited = [*history[:-4], *ids_for(9, 30 + turn)]
            assert check(model, edited, None, marks) >= marks[1]
            history = [*history, *answer[5:], *ids_for(15, 40 + turn)]  # the first five were reasoning
            assert check(model, history, None, (40, len(history) - 6)) >= len(history) - 15 - len(answer[5:])


def test_evicted_and_made_again():
    """Room for three: prompts push each other out and come back."""
    model = engine(3 * snapshot_bytes(120) + 20_000)
    prompts = [ids_for(90 + 7 * i, i) for i in range(5)]
    for i in (0, 1, 2, 3, 4, 0, 1, 4, 4, 2, 0):
        check(model, prompts[i])
    assert model.snapshots.stats.evicted > 0
    assert model.snapshots.stats.hits > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_an_abort_leaves_nothing_behind(seed):
    """At a random block of a prefill, or after some answer tokens."""
    rng = np.random.default_rng(seed)
    model = engine(token_block=8)
    session, ids = poisoned(model), ids_for(150, seed)
    check(model, ids[:70], session, (30,))
    before = {snapshot.prefix.digest() for snapshot in model.snapshots.entries()}
    used, stop = model.snapshots.holdings.used, int(rng.integers(1, 10))

    def progress(done: int, total: int) -> None:
        if done >= 8 * stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.prompt([*ids[:60], *ids_for(90, 50 + seed)], progress, marks=(30, 61, 140))
    assert {snapshot.prefix.digest() for snapshot in model.snapshots.entries()} == before
    assert model.snapshots.holdings.used == used
    with pytest.raises(RequestError, match="interrupted"):
        session.decode(1)
    assert check(model, ids[: 75 + seed], session, (30,)) == 70  # the same session serves the next request
    cancelled = Session(model)
    stream = cases.answers(cancelled, ids[:100], after=int(rng.integers(1, 5)))
    assert stream.finish.reason == "cancelled"
    check(model, ids, cancelled)


def test_a_prompt_longer_than_the_session_goes_on_from_it():
    model = engine()
    session, ids = Session(model), ids_for(100)
    session.prefill(ids[:40])
    assert check(model, ids, session) == 40
    session.decode(3)
    assert check(model, [*ids, 3, 4], session) == 101


def test_results_do_not_depend_on_the_budget():
    for budget in (None, snapshot_bytes(100), cases.PLENTY):
        model = engine(budget)
        for ids in (ids_for(100), ids_for(100), ids_for(90) + ids_for(20, 5)):
            check(model, ids)


# what is evaluated


def cost_of(model: ArrayModel, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> int:
    session = Session(model)
    count = Counting(model, monkeypatch).of(lambda: session.prompt(ids))
    assert count == len(ids) - session.cached_tokens
    return count


def test_an_edit_costs_little_more_than_what_it_changes(monkeypatch):
    """The figures of a 1,500-token prompt; llama-server evaluates 4, 516, 516 and 1,500."""
    ids = ids_for(1500)
    for changed, most in ((0, 2), (20, 128), (500, 575), (1484, 1500)):
        model = engine(token_block=256)
        cost_of(model, ids, monkeypatch)
        assert 15 <= len(model.snapshots) <= 22
        edited = [*ids[: 1500 - changed], *[(token + 1) % cases.VOCAB for token in ids[1500 - changed :]]]
        found = cost_of(model, edited, monkeypatch)
        assert changed <= found <= most
    assert found == 1500
    for changed in range(1, 1500, 37):
        model.snapshots.discard([])  # one model for all: each edit is evaluated once
        edited = [*ids[: 1500 - changed], *[(token + 2) % cases.VOCAB for token in ids[1500 - changed :]]]
        assert cost_of(model, edited, monkeypatch) <= max(1.15 * changed, changed + 64)


def test_five_turns_evaluate_only_what_is_new(monkeypatch):
    model = engine()
    counting, history, held = Counting(model, monkeypatch), ids_for(60, 1), 0
    session = Session(model)
    for turn in range(5):
        other = Session(model)  # each turn is asked from a new session, as a server may do
        assert counting.of(lambda: other.prompt(history, marks=(20,))) == len(history) - held  # noqa: B023
        answer = ids_for(10, 60 + turn)
        assert counting.of(lambda: [other.decode(token) for token in answer]) == len(answer)  # noqa: B023
        other.keep()
        session.prompt(history)
        held = len(history) + len(answer)
        history = [*history, *answer, *ids_for(12, 70 + turn)]


def test_the_end_of_a_system_prompt_serves_other_chats(monkeypatch):
    model, system = engine(), ids_for(90, 1)
    for chat in range(4):
        cost = cost_with_marks(model, [*system, *ids_for(30, 10 + chat)], (90,), monkeypatch)
        assert cost == (120 if chat == 0 else 30)
    roots = [snapshot for snapshot in model.snapshots.entries() if snapshot.kind == "root"]
    assert [snapshot.position for snapshot in roots] == [90]


def cost_with_marks(model: ArrayModel, ids: list[int], marks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    return Counting(model, monkeypatch).of(lambda: Session(model).prompt(ids, marks=marks))


def test_marks_are_where_messages_end():
    assert turn_ends([5, 1, 7, 7, 1, 1, 3], frozenset({1})) == [2, 5, 6]
    assert turn_ends([5], frozenset()) == []
    model = engine()
    Session(model).prompt(ids_for(100), marks=(0, 3, 20, 22, 61, 100, 130))
    kinds = {snapshot.position: snapshot.kind for snapshot in model.snapshots.entries()}
    assert kinds == {3: "root", 22: "turn", 61: "turn", 64: "block", 100: "end"}


# sessions


def test_a_snapshot_of_other_numbers_is_refused():
    snapshot = Session(engine(None)).snapshot()
    with pytest.raises(RequestError, match="kv_format 'f32', here 'f16' cannot be restored"):
        Session(engine(None, kv_format="f16")).restore(snapshot)
    with pytest.raises(RequestError, match="activations 'q8_0', here 'f32'"):
        Session(engine(None, activations="f32")).restore(snapshot)
    with pytest.raises(RequestError, match="states of different models do not mix"):
        Session(engine(None, seed=4)).restore(snapshot)
    with pytest.raises(RequestError, match="pages of 8 positions, here 16"):
        Session(engine(None, kv_block=16)).restore(snapshot)


def test_a_snapshot_cannot_be_written():
    session = Session(engine(None))
    session.prefill(ids_for(20))
    snapshot = session.snapshot()
    before = {name: array.tobytes() for name, array in snapshot.state.arrays().items()}
    poison(session)
    session.restore(snapshot)
    session.prefill(ids_for(20))
    assert {name: array.tobytes() for name, array in snapshot.state.arrays().items()} == before
    for layer in snapshot.state.layers:
        for array in (layer.keys[-1], layer.values[0]) if hasattr(layer, "keys") else (layer.conv, layer.recurrent):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


def test_recorded_calls_survive_a_restore():
    """The decoder's program over a session's arrays goes on with the restored ones, pages and tables included."""
    model, ids = engine(None, kv_block=1), ids_for(150)
    session = Session(model)
    session.prefill(ids[:100])
    session.decode(ids[100])
    snapshot, program = session.snapshot(), session.state.program
    assert program is not None
    other = Session(model)
    other.decode(ids[0])
    other.restore(snapshot)  # more pages than its table had room for
    for one in (session, other):
        for token in ids[101:]:
            logits = one.decode(token)
        assert outcome(one, logits) == uninterrupted(model, ids)
    session.restore(snapshot)
    session.decode(ids[101])
    assert session.state.program is not None


def test_cached_tokens_reach_the_finish_record(tmp_path):
    from fermi_engine.convert import convert
    from tools.make_checkpoint import make_checkpoint

    pack = convert(make_checkpoint(tmp_path / "c", seed=3), tmp_path / "a.pack")
    loaded = Engine.load(pack, config=EngineConfig(threads=1))
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    said = []
    for _ in range(2):
        stream = loaded.generate(list(range(1, 31)), params)
        said.append([piece.id for piece in stream])
        counts = stream.finish.cached_tokens, stream.finish.prompt_tokens
    assert said[0] == said[1]
    assert counts == (30, 30)
    history = [*range(1, 31), *said[0][:4], 7, 8]  # the last answer token was never evaluated
    stream = loaded.generate(history, params)
    assert len(list(stream)) >= 5
    assert stream.finish.cached_tokens == 34
    assert "3 hits" not in loaded.snapshots.line()
    assert "64 tokens of 2 prompts not evaluated again" in loaded.snapshots.line()


def test_snapshots_are_off_below_one(tmp_path, capsys):
    from fermi_engine.convert import convert
    from tools.make_checkpoint import make_checkpoint

    pack = convert(make_checkpoint(tmp_path / "c", seed=3), tmp_path / "a.pack")
    loaded = Engine.load(pack, config=EngineConfig(snapshot_ram=1000))
    assert loaded.snapshots is None
    assert "snapshots are off: 1.00 kB do not hold one, which takes" in capsys.readouterr().err
    assert np.array_equal(loaded.session().prompt([1, 2, 3]), Engine.load(pack).session().prefill([1, 2, 3]))
    assert Engine.load(pack, config=EngineConfig(snapshot_ram=parse_budget("--snapshot-ram", "0"))).snapshots is None
    assert capsys.readouterr().err == ""


def test_a_budget_is_a_size_or_nothing():
    assert [parse_budget("--snapshot-ram", text) for text in ("2GiB", " 0 ", None)] == [2 << 30, 0, None]
    with pytest.raises(RequestError, match="--snapshot-ram 'much' is not a size"):
        parse_budget("--snapshot-ram", "much")
    for wrong in (-1, 1.5, "2GiB"):
        with pytest.raises(ConfigError, match=r"snapshot_ram = .* must be a number of bytes, 0 for none"):
            EngineConfig(snapshot_ram=wrong)
