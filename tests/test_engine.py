"""Engine and session at their borders: loading, limits, interruption, continuing a session."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fermi_engine import Engine, EngineConfig, FermiError, SamplingParams, tokenizer_ahead
from fermi_engine.convert import convert
from fermi_engine.errors import BackendError, ConfigError, PackError, RequestError
from fermi_engine.generate import Stream
from tools.make_checkpoint import make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("engine") / "checkpoint", seed=2)


@pytest.fixture(scope="module")
def pack(checkpoint):
    return convert(checkpoint, checkpoint.parent / "model.pack")


@pytest.fixture(scope="module")
def engine(pack):
    return Engine.load(pack)


def test_a_directory_and_its_pack_give_the_same_engine(checkpoint, engine, tmp_path, monkeypatch):
    monkeypatch.setenv("FERMI_CACHE", str(tmp_path))
    ids = [1, 2, 3]
    assert np.array_equal(Engine.load(checkpoint).session().prefill(ids), engine.session().prefill(ids))
    assert Engine.load(checkpoint).pack_hash == engine.pack_hash


def test_a_text_only_checkpoint_gives_the_same_logits(engine, tmp_path):
    plain = make_checkpoint(tmp_path / "text", seed=2, text_only=True)
    other = Engine.load(convert(plain, tmp_path / "text.pack"))
    assert other.config.model_type == "qwen3_5_moe_text"
    assert np.array_equal(other.session().prefill([5, 6, 7]), engine.session().prefill([5, 6, 7]))


@pytest.mark.parametrize(
    ("options", "error", "found"),
    [
        ({"format": "q8_0"}, ConfigError, "is a q4_0 pack; format='q8_0' was asked for"),
        ({"format": "q5_k"}, ConfigError, "unknown format 'q5_k'; choose from q4_0, q8_0, f16, f32"),
        ({"backend": "avx9"}, BackendError, "unknown backend 'avx9'; this build has avx2, ssse3, scalar"),
    ],
)
def test_what_cannot_be_loaded(pack, options, error, found):
    with pytest.raises(error, match=found):
        Engine.load(pack, **options)


def test_an_unknown_backend_in_the_environment_raises(pack, monkeypatch):
    monkeypatch.setenv("FERMI_BACKEND", "sse9")
    with pytest.raises(BackendError, match="unknown backend 'sse9'"):
        Engine.load(pack)


@pytest.mark.parametrize(
    "options",
    [{"activations": "int8"}, {"threads": 0}, {"threads": 257}, {"kv_block": -1}, {"token_block": 1.5}, {"ctx_size": 0}],
)
def test_settings_out_of_range(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([], "no tokens"),
        (np.zeros(0, np.int32), "no tokens"),
        ([[1, 2]], r"one flat list, got shape \[1, 2\]"),
        ([[1], [2, 3]], "one flat list, got lists of different lengths"),
        ("12", r"one flat list, got text: engine\.tokenizer\.encode"),
        (7, "one flat list, got int"),
        ([1.5], "whole numbers, got float"),
        (["1"], "whole numbers, got str"),
        ([1, None], "whole numbers, got NoneType"),
        ([True], "whole numbers, got bool"),
        ([2**70], f"token id {2**70} is outside the vocabulary of 338"),
        ([2**63, -1], f"token id {2**63} is outside the vocabulary of 338"),
        ([10**5000], "token id of 16610 bits is outside the vocabulary of 338"),
        ([-1], "token id -1 is outside the vocabulary of 338"),
        ([3, 338], "token id 338 is outside the vocabulary of 338"),
    ],
)
def test_prompts_that_cannot_be_served(engine, ids, found):
    session = engine.session()
    for call in (session.prefill, session.logits):
        with pytest.raises(RequestError, match=found):
            call(ids)
    assert session.position == 0
    session.prefill([1])  # a refusal leaves the session usable


def test_ids_may_come_as_objects(engine):
    expected = engine.session().prefill([1, 2, 3])
    for ids in (np.array([1, 2, 3], object), (1, 2, 3), range(1, 4), np.array([1, 2, 3], np.uint8)):
        assert np.array_equal(engine.session().prefill(ids), expected)


def test_a_generation_is_a_stream_with_a_finish(engine):
    assert Engine.generate.__annotations__["return"] == "Stream"
    stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    assert isinstance(stream, Stream)
    assert stream.finish is None
    assert len([piece for piece in stream if piece.id is not None]) == 2
    assert (stream.finish.reason, stream.finish.completion_tokens) == ("length", 2)


def test_the_context_is_a_limit_with_both_numbers(pack):
    engine = Engine.load(pack, config=EngineConfig(ctx_size=10))
    session = engine.session()
    session.prefill(list(range(8)))
    with pytest.raises(RequestError, match="11 tokens exceed the context of 10"):
        session.prefill([1, 2, 3])
    with pytest.raises(RequestError, match="11 tokens exceed the context of 10"):
        list(engine.generate(list(range(11))))
    with pytest.raises(RequestError, match="12 tokens exceed the context of 10"):
        list(engine.generate([1, 2, 3, 4], session=session))
    session.prefill([1, 2])
    with pytest.raises(RequestError, match="11 tokens exceed"):
        session.decode(1)


def test_an_interrupted_call_leaves_nothing_behind(pack):
    engine = Engine.load(pack, config=EngineConfig(token_block=16))
    session = engine.session()
    session.prefill([1, 2, 3])
    kept = session.snapshot()
    expected = engine.session().prefill([1, 2, 3, 4])

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.prefill(list(range(40)), progress=stop)
    with pytest.raises(RequestError, match="interrupted inside a call; restore a snapshot"):
        session.prefill([4])
    session.restore(kept)
    assert session.tokens == (1, 2, 3)
    assert np.array_equal(session.prefill([4]), expected)
    assert np.array_equal(engine.session().prefill([1, 2, 3, 4]), expected)


def test_a_snapshot_of_another_model_is_refused(engine, tmp_path):
    other = Engine.load(convert(make_checkpoint(tmp_path / "c", seed=9), tmp_path / "other.pack")).session()
    other.prefill([1])
    with pytest.raises(RequestError, match="states of different models do not mix"):
        engine.session().restore(other.snapshot())


def test_progress_is_reported_per_block(pack):
    engine = Engine.load(pack, config=EngineConfig(token_block=16))
    seen = []
    engine.session().prefill(list(range(40)), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(16, 40), (32, 40), (40, 40)]


def test_generation_continues_a_session(engine):
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    whole = [piece.id for piece in engine.generate([7, 8, 9, 10], greedy)]
    session = engine.session()
    session.prefill([7, 8])
    assert [piece.id for piece in engine.generate([9, 10], greedy, session=session)] == whole


def test_penalties_see_what_the_session_holds(engine):
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, repetition_penalty=1.9)
    whole = [piece.id for piece in engine.generate(list(range(60, 120)), params)]
    session = engine.session()
    session.prefill(list(range(60, 119)))
    assert [piece.id for piece in engine.generate([119], params, session=session)] == whole


def test_text_without_a_tokenizer_says_what_is_missing(tmp_path):
    engine = Engine.load(convert(make_checkpoint(tmp_path / "c", tokenizer=False), tmp_path / "ids.pack"))
    assert not engine.has_tokenizer
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    assert [len(p.text) for p in engine.generate([1, 2], params)] == [0, 0, 0]
    with pytest.raises(FermiError, match=r"tokenizer\.json"):
        _ = engine.tokenizer
    with pytest.raises(FermiError, match=r"tokenizer\.json"):
        list(engine.generate([1], params, stop=["x"]))


def test_end_of_turn_ids_are_a_union(engine):
    ids = engine.eos_ids
    assert ids >= {engine.tokenizer.id_of("<|im_end|>"), engine.tokenizer.id_of("<|endoftext|>")}


def test_a_tokenizer_parsed_ahead_is_the_same(tmp_path):
    converted = convert(Path(__file__).parents[1] / "golden/tiny", tmp_path / "tiny.pack")
    parsed = tokenizer_ahead.begin(converted)
    engine, plain = Engine.load(converted), Engine.load(converted)
    engine.prefetch(parsed)
    text = "The wind took the letters from the table"
    assert engine.tokenizer.encode(text) == plain.tokenizer.encode(text)
    assert engine.tokenizer._library is parsed.result()
    assert engine.eos_ids == plain.eos_ids


def test_what_cannot_be_parsed_ahead(tmp_path):
    assert tokenizer_ahead.begin(tmp_path) is None
    (tmp_path / "x").write_bytes(b"no pack at all")
    with pytest.raises(PackError, match="x is not a safetensors file"):
        tokenizer_ahead.begin(tmp_path / "x").result()
