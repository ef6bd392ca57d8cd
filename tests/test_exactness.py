"""The same bits from every backend, thread count, page size and cut of a prompt: logits and every byte of the state."""

from __future__ import annotations

import numpy as np
import pytest

from fermi_engine import Engine, EngineConfig
from fermi_engine.formats import Experts
from fermi_engine.kernels import dispatch
from fermi_engine.model.decoder import Decoder
from fermi_engine.session import Session
from fermi_engine.state import HybridState
from tools.make_checkpoint import make_checkpoint

LENGTH = 141
KV_BLOCKS = (64, 4)
KV_FORMATS = ("f32", "f16", "q8_0")
STEPS = 30


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
        {"backend": "avx2"},
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
        layer.ffn.gate_up, layer.ffn.down = (
            Experts.join([experts.matrix(e) for e in order]) for experts in (layer.ffn.gate_up, layer.ffn.down)
        )
    assert np.array_equal(Whole(engine).logits, plain.logits)


# The recorded step


class CountedCalls:
    """The C library, counting the calls that run kernels."""

    def __init__(self, lib) -> None:
        self._lib, self.ran = lib, []

    def __getattr__(self, name: str):
        if name.startswith("fermi_run"):
            self.ran.append(name)
        return getattr(self._lib, name)


def eagerly(decoder: Decoder, token: int, state: HybridState) -> np.ndarray:
    """One token, a call into C for each kernel."""
    return decoder.logits(decoder.hidden(np.array([token], np.int32), state))[0]


def one_by_one(engine: Engine, forward, kv_format: str, kv_block: int = 4, steps: int = STEPS) -> dict[str, bytes]:
    """A prompt of 3 tokens, then single ones by forward(decoder, token, state) -> logits of each and the final state.

    Twice the run goes on with a copy of the state, once with the state itself, while the other one takes wrong tokens.
    """
    ids = prompt(engine)
    state = HybridState.fresh(engine.config, kv_block, kv_format)
    engine.decoder.hidden(np.array(ids[:3], np.int32), state)
    seen = []
    for i, token in enumerate(ids[3 : 3 + steps]):
        if i in (5, 11, 20):
            kept, aside = state, state.copy()
            kept, aside = (kept, aside) if i == 11 else (aside, kept)
            for wrong in (1, 2):
                forward(engine.decoder, wrong, aside)
            state = kept
        seen.append(forward(engine.decoder, token, state))
    return {"logits": np.stack(seen).tobytes(), **{name: array.tobytes() for name, array in state.arrays().items()}}


@pytest.fixture(scope="module", params=[(f, kv) for f in ("moe", "dense") for kv in KV_FORMATS], ids=lambda p: "-".join(p))
def eager_run(request, packs):
    family, kv_format = request.param
    engine = Engine.load(packs[family], config=EngineConfig(backend="scalar", threads=1))
    return packs[family], kv_format, one_by_one(engine, eagerly, kv_format)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("backend", ["scalar", "ssse3", "avx2"])
def test_a_recorded_step_gives_the_bits_of_single_calls(eager_run, backend, threads):
    if backend not in dispatch.supported():
        pytest.skip(f"this CPU has no {backend}")
    pack, kv_format, expected = eager_run
    engine = Engine.load(pack, config=EngineConfig(backend=backend, threads=threads))
    assert one_by_one(engine, Decoder.step, kv_format) == expected


def test_formats_of_the_cache_differ(packs):
    engine = Engine.load(packs["moe"])
    runs = [one_by_one(engine, Decoder.step, kv_format)["logits"] for kv_format in KV_FORMATS]
    assert len(set(runs)) == len(runs)


def test_a_step_is_one_call_into_c(packs):
    for family in ("moe", "dense"):
        engine = Engine.load(packs[family])
        state = HybridState.fresh(engine.config, 4)
        engine.kernels._lib = counted = CountedCalls(engine.kernels._lib)
        for token in range(9):
            engine.decoder.step(token, state)
        assert counted.ran == ["fermi_run_steps"] * 9
        counted.ran.clear()
        eagerly(engine.decoder, 9, state)
        assert len(counted.ran) > 10 * engine.config.num_hidden_layers


def test_a_step_follows_pages_that_move(packs):
    """With pages of one token the table of pages is replaced at the 65th."""
    engine = Engine.load(packs["dense"])
    assert one_by_one(engine, Decoder.step, "f32", 1, 90) == one_by_one(engine, eagerly, "f32", 64, 90)


def test_steps_and_prompts_take_turns_on_one_state(packs):
    """A prompt between two steps, and steps of another engine over the same pack, move the arrays that a step reads."""
    engines = [Engine.load(packs["moe"], config=EngineConfig(threads=threads)) for threads in (1, 2)]
    whole = Whole(engines[0])
    state = HybridState.fresh(engines[0].config, 4)
    at = 0
    for count in (1, 1, 5, 1, 9, 1, 1, 64, 1, 1):
        decoder = engines[at % 2].decoder
        ids = np.array(whole.ids[at : at + count], np.int32)
        if count == 1:
            last = decoder.step(int(ids[0]), state)
        else:
            last = decoder.logits(decoder.hidden(ids, state))[-1]
        at += count
        assert np.array_equal(last, whole.logits[at - 1]), f"position {at - 1}"


@pytest.mark.parametrize("format", ["f16", "f32"])
def test_a_step_over_weights_that_are_not_quantised(tmp_path, format):
    from fermi_engine.convert import convert

    checkpoint = make_checkpoint(tmp_path / "c", seed=3, family="moe")
    engine = Engine.load(convert(checkpoint, tmp_path / "m.pack", format))
    assert not engine.decoder.is_recordable
    assert one_by_one(engine, Decoder.step, "f32", steps=12) == one_by_one(engine, eagerly, "f32", steps=12)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_the_cache_in_any_format_forgets_how_it_was_filled(packs, kv_format):
    """Pages, pieces, backend and threads change no bit."""
    plain = Whole(Engine.load(packs["moe"], config=EngineConfig(kv_format=kv_format)))
    for backend in dispatch.supported():
        options = EngineConfig(kv_format=kv_format, backend=backend, threads=3, kv_block=4, token_block=9)
        other = Whole(Engine.load(packs["moe"], config=options))
        assert np.array_equal(plain.logits, other.logits), backend
        assert plain.state == other.state, backend
        other.check([1, 2, 70])
