"""The token loop over stub sessions: budgets, ends, stop strings at any cut, reasoning, cancelling, work done."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_tokenizer import BYTE_IDS, TOKENIZER, byte_ids

from fermi_engine.errors import FermiError, RequestError, TokenizerError
from fermi_engine.generate import Finish, Piece, StopBuffer, greedy, stream
from fermi_engine.sampling import SamplingParams

VOCAB = TOKENIZER.vocab_size
END = TOKENIZER.id_of("<|im_end|>")
MANY = settings.default.max_examples  # of the profile: the cases here are cheap
THINK, UNTHINK = TOKENIZER.id_of("<think>"), TOKENIZER.id_of("</think>")


class Script:
    """A session whose likeliest token is the next of a script; records what it was asked."""

    def __init__(self, ids, vocab_size: int = VOCAB) -> None:
        self.ids, self.vocab_size = list(ids), vocab_size
        self.prefills: list[list[int]] = []
        self.decodes: list[int] = []

    def prefill(self, ids):
        assert all(type(i) is int for i in ids)
        self.prefills.append(list(ids))
        return self._logits()

    def decode(self, token_id):
        assert type(token_id) is int
        self.decodes.append(token_id)
        return self._logits()

    def _logits(self):
        logits = np.zeros(self.vocab_size, np.float32)
        logits[self.ids[len(self.decodes)]] = 9
        return logits


class Nameless(Script):
    """A session that does not say how large its vocabulary is."""

    def __init__(self, ids, vocab_size: int = VOCAB) -> None:
        super().__init__(ids, vocab_size)
        self.rows, self.vocab_size = vocab_size, None

    def _logits(self):
        logits = np.zeros(self.rows, np.float32)
        logits[self.ids[len(self.decodes)]] = 9
        return logits


def run(session, prompt=(1, 2, 3), *, eos_ids=frozenset({END}), context=10_000, tokenizer=TOKENIZER, stop=(),
        reasoning_open=False, cancelled=None, **fields):
    """(pieces, finish) of a greedy run."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 1000, **fields})
    made = stream(session, prompt, params, eos_ids=eos_ids, context=context, tokenizer=tokenizer, stop=stop,
                  reasoning_open=reasoning_open, cancelled=cancelled)
    pieces = list(made)
    return pieces, made.finish


def text_of(pieces) -> str:
    return "".join(piece.text for piece in pieces)


def ids_of(pieces) -> list[int]:
    return [piece.id for piece in pieces if piece.id is not None]


def test_end_of_turn_ends_and_is_not_shown():
    script = [*TOKENIZER.encode("Hello wörld"), END, 5]
    session = Script(script)
    pieces, finish = run(session)
    assert (text_of(pieces), ids_of(pieces)) == ("Hello wörld", script[:-2])
    assert finish == Finish("eos", 3, len(script) - 2)
    assert session.prefills == [[1, 2, 3]]
    assert session.decodes == script[:-2]


def test_end_of_turn_can_be_ignored():
    pieces, finish = run(Script([*byte_ids(b"a"), END, *byte_ids(b"bc")]), ignore_eos=True, max_tokens=3)
    assert (text_of(pieces), finish) == ("ab", Finish("length", 3, 3))


def test_any_of_several_end_ids_ends():
    for end in (7, 9):
        assert run(Script([5, end]), eos_ids=frozenset({7, 9}))[1].reason == "eos"
    assert run(Script([END])) == ([], Finish("eos", 3, 0))


def test_length_makes_exactly_so_many_tokens_and_no_needless_decode():
    for n in (1, 2, 5):
        session = Script(range(10, 20))
        pieces, finish = run(session, max_tokens=n)
        assert ids_of(pieces) == list(range(10, 10 + n))
        assert session.decodes == list(range(10, 10 + n - 1))
        assert finish == Finish("length", 3, n)


def test_no_tokens_asked_for_means_nothing_evaluated():
    session = Script([])
    assert run(session, max_tokens=0) == ([], Finish("length", 3, 0))
    assert run(session, context=3) == ([], Finish("context", 3, 0))
    assert run(session, context=3, max_tokens=0) == ([], Finish("length", 3, 0))
    assert session.prefills == []


def test_context_caps_a_huge_budget():
    session = Script(range(10, 20))
    pieces, finish = run(session, context=8, max_tokens=10**9)
    assert (ids_of(pieces), finish) == (list(range(10, 15)), Finish("context", 3, 5))
    assert len(session.decodes) == 4
    assert run(Script(range(10, 20)), context=8, max_tokens=5)[1] == Finish("length", 3, 5)


@pytest.mark.parametrize(("prompt", "options", "error", "found"), [
    ([], {}, RequestError, "prompt is empty"), (np.array([], np.int64), {}, RequestError, "prompt is empty"),
    ([1] * 9, {"context": 8}, RequestError, "has 9 tokens, the context holds 8"),
    ([1, VOCAB], {}, RequestError, f"token id {VOCAB} at position 1.*0..{VOCAB - 1}"),
    ([1, -1], {}, RequestError, "token id -1 at position 1"), ([1, 2.0], {}, RequestError, "2.0 at position 1"),
    ([True], {}, RequestError, "True at position 0"), (["1"], {}, RequestError, "'1' at position 0"),
    ([1], {"stop": ["x"], "tokenizer": None}, TokenizerError, "no tokenizer"),
    ([1], {"stop": [""]}, RequestError, "stop"), ([1], {"logit_bias": {VOCAB: 1.0}}, RequestError, "logit_bias"),
])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_what_cannot_be_served_is_refused_before_any_work(prompt, options, error, found, max_tokens):
    session = Script([5])
    with pytest.raises(error, match=found) as info:
        run(session, prompt, max_tokens=max_tokens, **options)
    assert session.prefills == []
    assert "\n" not in str(info.value)


def test_refusals_do_not_wait_for_the_first_piece():
    with pytest.raises(RequestError, match="empty"):
        stream(Script([5]), [], SamplingParams(), eos_ids=frozenset(), context=9)


def test_prompts_of_numpy_ids_are_taken():
    assert run(Script([10, END]), prompt=np.array([1, 2], np.int32))[1] == Finish("eos", 2, 1)


def test_sessions_that_name_no_vocabulary():
    pieces, finish = run(Nameless([5, 6, 0], vocab_size=8), tokenizer=None, max_tokens=2)
    assert pieces == [Piece(5), Piece(6)]
    assert finish == Finish("length", 3, 2)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        run(Nameless([1], vocab_size=2), tokenizer=None)
    session = Nameless([5])
    with pytest.raises(RequestError, match="token id -1 "):
        run(session, prompt=[-1], tokenizer=None)
    with pytest.raises(RequestError, match=f"token id {VOCAB} "):  # the tokenizer knows it
        run(session, prompt=[VOCAB])
    assert session.prefills == []


def test_ids_only_models_stream_ids():
    pieces, finish = run(Script([5, 6, 7]), tokenizer=None, eos_ids=frozenset({7}))
    assert (pieces, finish) == ([Piece(5), Piece(6)], Finish("eos", 3, 2))


@pytest.mark.parametrize("after", [0, 1, 3])
def test_cancelling_stops_before_the_next_step_of_the_model(after):
    session, seen = Script(byte_ids(b"abcdefgh")), []
    params = SamplingParams(temperature=0, max_tokens=8)
    made = stream(session, [1], params, eos_ids=frozenset(), context=99, tokenizer=TOKENIZER,
                  cancelled=lambda: len(seen) >= after)
    for piece in made:
        seen.append(piece)
    assert made.finish == Finish("cancelled", 1, after)
    assert len(session.prefills) + len(session.decodes) == after


def test_finish_is_the_return_value_too():
    def outer():
        return (yield from stream(Script([5, 6]), [1], SamplingParams(max_tokens=2, temperature=0),
                                  eos_ids=frozenset(), context=9))

    generator = outer()
    next(generator), next(generator)
    with pytest.raises(StopIteration) as info:
        next(generator)
    assert info.value.value == Finish("length", 1, 2)
    made = stream(Script([5]), [1], SamplingParams(max_tokens=1, temperature=0), eos_ids=frozenset(), context=9)
    assert made.finish is None
    assert (list(made), list(made)) == ([Piece(5)], [])
    assert made.finish.reason == "length"


def test_penalties_see_the_prompt_and_what_was_generated():
    flat = Script([5] * 20, vocab_size=8)
    assert ids_of(run(flat, prompt=[1], tokenizer=None, presence_penalty=100, max_tokens=3)[0]) == [5, 0, 1]
    flat = Script([5] * 20, vocab_size=8)
    assert ids_of(run(flat, prompt=[5], tokenizer=None, repetition_penalty=1e9, max_tokens=1,
                      logit_bias={2: 1.0})[0]) == [2]


def test_sampling_uses_the_given_exp_and_seed():
    session = Script(range(300), vocab_size=300)
    made = [piece.id for piece in stream(session, [1], SamplingParams(max_tokens=20, seed=4, temperature=5.0),
                                         eos_ids=frozenset(), context=99, exp=np.exp)]
    again = [piece.id for piece in stream(Script(range(300), vocab_size=300), [1],
                                          SamplingParams(max_tokens=20, seed=4, temperature=5.0),
                                          eos_ids=frozenset(), context=99, exp=np.exp)]
    assert made == again != list(range(20))


def test_damaged_logits_end_in_an_error():
    session = Script([5])
    session.prefill = lambda ids: np.full(VOCAB, np.nan, np.float32)
    with pytest.raises(FermiError, match="NaN"):
        run(session)


def test_greedy():
    assert greedy(Script(range(200)), [1], 150) == list(range(150))  # a draw would stray from it
    assert greedy(Script([5, 6, 7, 8]), [1], 3, frozenset({6})) == [5]
    assert greedy(Script([]), [1], 0) == []
    with pytest.raises(RequestError, match="empty"):
        greedy(Script([5]), [], 1)


def test_characters_cut_by_tokens_come_whole():
    script = byte_ids("né 👩‍👩‍👧 日本".encode())
    pieces, _ = run(Script(script), max_tokens=len(script))
    assert text_of(pieces) == "né 👩‍👩‍👧 日本"
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert len(pieces) == len(script)


def test_a_character_never_finished_is_shown_as_such_at_the_end():
    pieces, finish = run(Script(byte_ids(b"a\xe2\x82")), max_tokens=3)
    assert [piece.text for piece in pieces] == ["a", "", "", "\ufffd"]
    assert pieces[-1].id is None
    assert finish == Finish("length", 3, 3)


def cut_at_stop(text: str, stops) -> tuple[str, str | None]:
    """(text before the stop string, that string): the first place where one ends, and there the earliest start."""
    for end in range(len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return text[:start], text[start:end]
    return text, None


def random_pieces(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, len(text))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


AB = st.text(alphabet="ab", max_size=14)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=8), max_size=3)


@given(AB, STOPS, st.integers(0, 2**32))
@example("aaab", ["aab"], 0)
@example("abc", ["abc", "b"], 0)
@example("xabab", ["bab", "abab"], 0)
@example("aabaaab", ["aabaab", "aaab"], 0)
@example("aabaaabaaaa", ["aabaaaa"], 0)
@settings(deadline=None, max_examples=8 * MANY)
def test_stop_strings_do_not_depend_on_the_cuts(text, stops, seed):
    buffer, out, found = StopBuffer(stops), "", None
    for piece in random_pieces(text, random.Random(seed)):
        ready, found = buffer.push(piece)
        out += ready
        if found is not None:
            break
    else:
        out += buffer.flush()
    assert (out, found) == cut_at_stop(text, stops)


@given(AB, STOPS)
@settings(deadline=None, max_examples=4 * MANY)
def test_no_more_is_held_back_than_could_become_a_stop_string(text, stops):
    buffer, out = StopBuffer(stops), ""
    for n, character in enumerate(text, start=1):
        ready, found = buffer.push(character)
        out += ready
        if found is not None:
            return
        waiting = max((k for stop in stops for k in range(1, len(stop)) if text[:n].endswith(stop[:k])), default=0)
        assert out == text[:n - waiting]


def test_a_stop_buffer_starts_afresh_after_a_hit():
    buffer = StopBuffer(["ab"])
    assert buffer.push("xaby") == ("x", "ab")
    assert buffer.push("b") == ("b", None)
    assert (buffer.push("a"), buffer.flush(), buffer.push("b")) == (("", None), "a", ("b", None))
    with pytest.raises(RequestError, match="stop"):
        StopBuffer([""])


WORDS = ["a", "ab", "aab", "é", "日", "<", "|im_end|>", "\n", "hello ", "👍🏽", "\ufffd"]


@given(st.lists(st.sampled_from(WORDS), max_size=8).map("".join),
       st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map("".join), min_size=1, max_size=3),
       st.integers(0, 2**32), st.binary(max_size=3))
@example("aaab", ["aab"], 0, b"")
@example("日", ["\ufffd"], 0, b"\xe6\x97")
@settings(deadline=None, max_examples=2 * MANY)
def test_text_equals_the_truncated_text_whatever_the_tokens(text, stops, seed, tail):
    rng = random.Random(seed)
    script = []
    for piece in random_pieces(text, rng):
        script += byte_ids(piece.encode()) if rng.random() < 0.5 else TOKENIZER.encode(piece, parse_special=False)
    script += byte_ids(tail)
    whole = TOKENIZER.decode(script)
    session = Script([*script, END])
    pieces, finish = run(session, stop=stops)
    expected, hit = cut_at_stop(whole, stops)
    assert (text_of(pieces), finish.stop_string) == (expected, hit)
    assert finish.reason == ("eos" if hit is None else "stop")
    assert finish.completion_tokens == len(ids_of(pieces))
    if hit is not None and "\ufffd" not in hit:
        assert len(session.decodes) == finish.completion_tokens - 1


def test_stop_strings_of_both_sources_count():
    for fields in ({"stop": ["lo"]}, {}):
        params = SamplingParams(temperature=0, stop=("lo",) if not fields else ("zz",))
        made = stream(Script([*byte_ids(b"hello!"), END]), [1], params, eos_ids=frozenset({END}), context=99,
                      tokenizer=TOKENIZER, **fields)
        assert (text_of(made), made.finish) == ("hel", Finish("stop", 1, 5, "lo"))


def test_a_partial_stop_string_is_released_in_full_at_the_end():
    for script, fields in (([*byte_ids(b"ab"), END], {}), (byte_ids(b"ab"), {"max_tokens": 2})):
        pieces, finish = run(Script(script), stop=["abc"], **fields)
        assert [(piece.id is None, piece.text) for piece in pieces] == [(False, ""), (False, ""), (True, "ab")]
        assert finish.reason in ("eos", "length")


def test_special_tokens_are_not_shown_but_think_tags_are_read():
    start = TOKENIZER.id_of("<|im_start|>")
    script = [start, *byte_ids(b"a"), TOKENIZER.id_of("<tool_call>"), *byte_ids(b"b"), END]
    assert text_of(run(Script(script))[0]) == "a<tool_call>b"


def reasoning_of(pieces) -> tuple[str, str]:
    return "".join(piece.reasoning for piece in pieces), text_of(pieces)


def test_reasoning_is_split_from_the_answer():
    so, yes = byte_ids(b"so\n"), byte_ids(b"\n\nYes")
    assert reasoning_of(run(Script([*so, UNTHINK, *yes, END]), reasoning_open=True)[0]) == ("so\n", "\n\nYes")
    assert reasoning_of(run(Script([THINK, *so, UNTHINK, *yes, END]))[0]) == ("so\n", "\n\nYes")
    assert reasoning_of(run(Script([*so, END]), reasoning_open=True)[0]) == ("so\n", "")
    assert reasoning_of(run(Script([*so, END]))[0]) == ("", "so\n")
    spelt = byte_ids(b"so</think>Yes</th")
    assert reasoning_of(run(Script([*spelt, END]), reasoning_open=True)[0]) == ("so", "Yes</th")


def test_text_before_a_stop_string_inside_a_tag_is_kept():
    pieces, finish = run(Script([*byte_ids(b"a</thX"), END]), reasoning_open=True, stop=["X"])
    assert (reasoning_of(pieces), finish.stop_string) == (("a</th", ""), "X")


def test_without_think_tags_in_the_vocabulary_nothing_is_split():
    class Plain:
        vocab_size, special_ids = VOCAB, frozenset()

        def id_of(self, token):
            return None

        def token_bytes(self, token_id):
            return TOKENIZER.token_bytes(token_id)

    pieces, _ = run(Script([*byte_ids(b"a</think>b"), END]), tokenizer=Plain(), reasoning_open=True)
    assert reasoning_of(pieces) == ("", "a</think>b")


def test_think_tags_marked_special_still_split():
    class Special:
        vocab_size, special_ids = VOCAB, frozenset({THINK, UNTHINK, END})

        def __getattr__(self, name):
            return getattr(TOKENIZER, name)

    pieces, _ = run(Script([THINK, *byte_ids(b"a"), UNTHINK, *byte_ids(b"b"), END]), tokenizer=Special())
    assert reasoning_of(pieces) == ("a", "b")


def test_every_byte_has_a_token():
    assert len(set(BYTE_IDS)) == 256  # what the scripts above are spelt with
