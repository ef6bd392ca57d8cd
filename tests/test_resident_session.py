"""Sessions of an engine whose model lives on the (emulated) GPU, and the command line over it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from fermi_engine import Engine, EngineConfig
from fermi_engine.cli.app import app
from fermi_engine.errors import ConfigError, DeviceError, DeviceMemoryError, RequestError
from fermi_engine.generate import greedy
from fermi_engine.session import Session
from tests.resident_cases import dense, ids_for

GPU = EngineConfig(threads=1, decode="gpu", device="emulated", gemm="own")


@pytest.fixture(scope="module")
def engine(dense) -> Engine:
    """The model of 8-bit weights on the GPU."""
    return Engine.load(dense["q8_0"].pack.path, config=GPU)


def test_products_are_the_vendors_unless_the_cpu_decodes():
    assert EngineConfig().gemm == EngineConfig(prefill="gpu").gemm == "own"
    assert EngineConfig(decode="gpu").gemm == "vendor"
    assert EngineConfig(decode="gpu", gemm="own").gemm == "own"


@pytest.mark.parametrize(("options", "message"), [
    ({"decode": "both"}, "decode = 'both'; choose 'cpu' or 'gpu'"),
    ({"decode": "gpu", "kv_format": "f16"}, "kv_format = 'f16' with decode = 'gpu', which keeps keys and values as 'f32'"),
])
def test_wrong_options_are_one_line(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_pieces_of_a_prompt_and_one_prompt_end_alike(engine):
    ids = ids_for(engine, 100).tolist()
    first, second = engine.session(), engine.session()
    whole = first.prefill(ids)
    second.prefill(ids[:30])
    assert np.array_equal(second.prefill(ids[30:]), whole)
    assert first.tokens == second.tokens == tuple(ids)
    assert first.state.position == 100


def test_a_snapshot_goes_on_as_its_session_does(engine):
    ids = ids_for(engine, 80).tolist()
    session = engine.session()
    session.prefill(ids)
    session.decode(3)
    snapshot = session.snapshot()
    right = [session.decode(4), session.prefill(ids[:20])]
    other = engine.session()
    other.restore(snapshot)
    assert all(np.array_equal(a, b) for a, b in zip([other.decode(4), other.prefill(ids[:20])], right, strict=True))
    session.restore(snapshot)
    assert np.array_equal(session.decode(4), right[0])


def everything(session: Session, logits: np.ndarray) -> tuple[bytes, ...]:
    """Logits and the whole state."""
    state = session.state
    opened = state.open_chunks.layers if state.open_chunks else {}
    rows = [array for _, arrays in sorted(opened.items()) for _, array in sorted(arrays.items())]
    return tuple(array.tobytes() for array in (logits, *(array for _, array in sorted(state.arrays().items())), *rows))


@pytest.fixture(scope="module")
def caching(dense) -> Engine:
    """The same with room for snapshots, which lie close together."""
    return Engine.load(dense["q8_0"].pack.path, config=replace(GPU, snapshot_ram=64 << 20))


@pytest.fixture(scope="module")
def bare(dense) -> Engine:
    """The same without snapshots."""
    return Engine.load(dense["q8_0"].pack.path, config=replace(GPU, snapshot_ram=0))


@pytest.mark.parametrize("cut", [20, 64, 90])
def test_prompts_go_on_from_snapshots(caching, bare, cut):
    """At marks, at the end of a prompt and at that of an answer; to the bit what the same calls without snapshots give."""
    ids, answer = ids_for(caching, 150, cut).tolist(), [3, 4, 5]
    session, plain = caching.session(), bare.session()
    session.prompt(ids[:140], marks=[cut, 120])
    assert everything(session, session.prompt(ids)) == everything(plain, plain.prefill(ids))
    assert session.cached_tokens == 140
    logits = [s.decode(token) for token in answer for s in (session, plain)]
    assert np.array_equal(logits[-2], logits[-1])  # the host has not seen the states yet
    other = [*ids[:cut], *ids_for(caching, 40, cut + 1).tolist()]
    fresh = bare.session()
    assert everything(session, session.prompt(other)) == everything(fresh, fresh.prefill(other))
    assert session.cached_tokens == cut
    again, rest = caching.session(), [7, 8]
    assert everything(again, again.prompt([*ids, *answer, *rest])) == everything(plain, plain.prefill(rest))
    assert again.cached_tokens == len(ids) + len(answer)
    assert again.trail == ((150, "gpu"), (153, "gpu token"), (155, "gpu"))


def test_a_prompt_one_token_longer(caching, bare):
    """Goes the way that prompts go, and has the bits of one in one piece."""
    ids = ids_for(caching, 33, 5).tolist()
    session, plain = caching.session(), bare.session()
    session.prompt(ids[:-1])
    assert everything(session, session.prompt(ids)) == everything(plain, plain.prefill(ids))
    assert session.cached_tokens == 32


def test_a_prompt_from_its_first_token(bare):
    """A session whose state the host has never seen begins anew."""
    session, other, ids = bare.session(), bare.session(), ids_for(bare, 30, 6).tolist()
    session.prefill([1, 2, 3])
    assert everything(session, session.prompt(ids)) == everything(other, other.prefill(ids))


def test_a_fork_goes_on_by_itself(bare):
    session, ids = bare.session(), ids_for(bare, 70, 7).tolist()
    session.prefill(ids)
    session.decode(3)
    fork = session.fork()
    first = [session.decode(token) for token in (4, 5)]
    second = [fork.decode(token) for token in (4, 5)]
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert everything(session, first[-1]) == everything(fork, second[-1])


def test_states_of_the_cpu_are_refused(bare, dense):
    plain = Engine.load(dense["q8_0"].pack.path, config=EngineConfig(threads=1, snapshot_ram=0)).session()
    plain.prefill([1, 2])
    with pytest.raises(RequestError, match="snapshot of a session with prefill 'cpu', here 'resident own emulated' cannot be"):
        bare.session().restore(plain.snapshot())


def test_logits_of_every_token(engine):
    """Each row is the last of a prefill that ends there, to the bit."""
    ids = ids_for(engine, 70).tolist()
    rows = engine.session().logits(ids)
    assert rows.shape == (70, engine.config.vocab_size)
    for end in (2, 64, 70):
        assert np.array_equal(rows[end - 1], engine.session().prefill(ids[:end]))
    with pytest.raises(RequestError, match="has no trace of its layers; run with --decode cpu"):
        engine.session().logits(ids, lambda name, array: None)


def test_greedy_generation_is_the_same_alone_and_in_turns(engine):
    prompts = [ids_for(engine, 12, seed).tolist() for seed in range(2)]
    alone = [greedy(engine.session(), prompt, 5) for prompt in prompts]
    sessions = [engine.session() for _ in prompts]
    last = [int(s.prefill(p).argmax()) for s, p in zip(sessions, prompts, strict=True)]
    got = [[token] for token in last]
    for _ in range(4):
        for which, session in enumerate(sessions):
            got[which].append(int(session.decode(got[which][-1]).argmax()))
    assert got == alone


def test_a_device_that_fails_costs_the_session_it_had(engine):
    session, other = engine.session(), engine.session()
    session.prefill([1, 2, 3])
    engine.resident.device.faults.fail("launch", 2)
    with pytest.raises(DeviceError, match="injected"):
        session.decode(4)
    with pytest.raises(RequestError, match="was interrupted inside a call"):
        session.decode(4)
    assert np.isfinite(other.prefill([1, 2, 3])).all()


def test_what_does_not_fit_leaves_the_session_whole(dense):
    engine = Engine.load(dense["q8_0"].pack.path, config=GPU)
    session: Session = engine.session()
    session.prefill([1, 2, 3])
    ledger = engine.resident.ledger
    ledger.limit = ledger.used - ledger.held()["activations"] + 1000  # a smaller cache does not free enough either
    with pytest.raises(DeviceMemoryError, match="raise --vram, or run with --decode cpu"):
        session.prefill(ids_for(engine, 300).tolist())
    assert session.position == 3
    assert np.isfinite(session.decode(4)).all()


def test_the_command_line(dense):
    pack = str(dense["q8_0"].pack.path)
    command = ["generate", "--model", pack, "--ids", "5,6,7", "--max-tokens", "4", "--temp", "0", "--threads", "1"]
    resident = CliRunner().invoke(app, [*command, "--decode", "gpu", "--device", "emulated", "--gemm", "own", "--timing"])
    assert resident.exit_code == 0, resident.output
    plain = CliRunner().invoke(app, [*command, "--activations", "f32"])
    assert resident.stdout.strip() == plain.stdout.strip()
    assert "the model is on the GPU, products of prefill by own kernels, room for 1024 tokens" in resident.stderr
