"""The same bits from every backend, thread count, page size and cut of a prompt: logits and every byte of the state."""

from __future__ import annotations

import numpy as np
import pytest

from fermi_engine import Engine, EngineConfig
from fermi_engine.kernels import dispatch
from fermi_engine.session import Session
from tools.make_checkpoint import make_checkpoint

LENGTH = 141
KV_BLOCKS = (64, 4)


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """A mixture-of-experts and a dense pack, by family."""
    from fermi_engine.convert import convert

    directory = tmp_path_factory.mktemp("packs")
    found = {}
    for family in ("moe", "dense"):
        checkpoint = make_checkpoint(directory / family, seed=3, family=family)
        found[family] = convert(checkpoint, directory / f"{family}.pack")
    return found


def prompt(engine: Engine) -> list[int]:
    return np.random.default_rng(5).integers(0, engine.config.vocab_size, LENGTH).tolist()


def fingerprint(session: Session) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in session.state.arrays().items()}


class Whole:
    """A prompt in one pass: its logits and final state."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.ids = engine, prompt(engine)
        session = engine.session()
        self.logits, self.state = session.logits(self.ids), fingerprint(session)

    def check(self, cuts: list[int]) -> None:
        """Prefill in the given pieces ends in the same last logits and state."""
        session = self.engine.session()
        for begin, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
            last = session.prefill(self.ids[begin:end])
            assert np.array_equal(last, self.logits[end - 1]), f"logits after a piece {begin}..{end} of cuts {cuts}"
        assert fingerprint(session) == self.state, f"state after cuts {cuts}"


@pytest.fixture(scope="module", params=KV_BLOCKS, ids=lambda size: f"kv_block={size}")
def whole(request, packs):
    return Whole(Engine.load(packs["moe"], config=EngineConfig(kv_block=request.param)))


def test_every_two_way_split(whole):
    for cut in range(1, LENGTH):
        whole.check([cut])


def test_random_four_way_splits(whole):
    generator = np.random.default_rng(11)
    for _ in range(20):
        whole.check(sorted(generator.choice(np.arange(1, LENGTH), 3, replace=False).tolist()))


def test_all_one_token_steps(whole):
    session = whole.engine.session()
    for i, token in enumerate(whole.ids):
        assert np.array_equal(session.decode(token), whole.logits[i]), f"position {i}"
    assert fingerprint(session) == whole.state


@pytest.mark.parametrize("head", [1, 2, 3, 4, 63, 64, 65, 128])
def test_prefill_then_decode_to_the_end(whole, head):
    session = whole.engine.session()
    session.prefill(whole.ids[:head])
    for i in range(head, LENGTH):
        assert np.array_equal(session.decode(whole.ids[i]), whole.logits[i]), f"position {i}"
    assert fingerprint(session) == whole.state


@pytest.mark.parametrize("family", ["moe", "dense"])
@pytest.mark.parametrize("activations", ["q8_0", "f32"])
@pytest.mark.parametrize(
    "change",
    [
        {"backend": "scalar"},
        {"backend": "ssse3"},
        {"threads": 1},
        {"threads": 2},
        {"threads": 7},
        {"threads": 12},
        {"kv_block": 1},
        {"kv_block": 100},
        {"token_block": 9},
    ],
    ids=lambda change: "-".join(f"{k}={v}" for k, v in change.items()),
)
def test_how_it_runs_changes_no_bit(packs, family, activations, change):
    if change.get("backend") not in (None, *dispatch.supported()):
        pytest.skip(f"this CPU has no {change['backend']}")
    plain = Whole(Engine.load(packs[family], config=EngineConfig(activations=activations)))
    other = Whole(Engine.load(packs[family], config=EngineConfig(activations=activations, **change)))
    assert np.array_equal(plain.logits, other.logits)
    assert plain.state == other.state


def test_a_forced_backend_runs_every_op(packs):
    for backend in dispatch.supported():
        engine = Engine.load(packs["moe"], backend=backend)
        Whole(engine)
        assert set(engine.kernels.ran.values()) == {backend}


def test_snapshot_resumes_to_the_bit(packs):
    engine = Engine.load(packs["moe"])
    whole = Whole(engine)
    session = engine.session()
    for cut in (1, 3, 64, 77):
        session = engine.session()
        session.prefill(whole.ids[:cut])
        kept = session.snapshot()
        session.prefill(whole.ids[cut:])  # moving on must not move the snapshot
        other = engine.session()
        other.prefill([1, 2, 3])
        for array in other.state.arrays().values():
            if array.dtype == np.float32 and array.flags.writeable:
                array.fill(np.nan)  # what was there before must not shine through
        other.restore(kept)
        last = other.prefill(whole.ids[cut:])
        assert np.array_equal(last, whole.logits[-1])
        assert fingerprint(other) == whole.state == fingerprint(session)


def test_later_tokens_change_no_earlier_logits(packs):
    whole = Whole(Engine.load(packs["moe"]))
    assert np.array_equal(whole.engine.session().logits(whole.ids[:50]), whole.logits[:50])


def test_permuting_experts_with_their_router_rows_changes_nothing(packs):
    engine = Engine.load(packs["moe"])
    plain = Whole(engine)
    for seed, layer in enumerate(engine.decoder.layers):
        order = np.random.default_rng(seed).permutation(engine.config.num_experts)
        layer.ffn.gate = np.ascontiguousarray(layer.ffn.gate[order])
        layer.ffn.experts = [layer.ffn.experts[e] for e in order]
    assert np.array_equal(Whole(engine).logits, plain.logits)
