"""Tokenizer: ids against the HF library, what may become a control token, and text without half characters."""

from __future__ import annotations

import json
import random
import sys

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from fermi_engine.errors import RequestError, TokenizerError
from fermi_engine.tokenizer import SHIELD, IncrementalDecoder, Tokenizer

# word forms, one digit at a time, runs of punctuation, line ends, other blanks: the shape of the family's splitter
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_ADDED = ("<think>", "</think>", "<tool_call>", "<fim 中>")  # the last is not spelt in byte characters
SCRIPTS = {
    "latin": "the quick brown fox it's don't naïve façade Straße ﬁn",
    "greek": "καλημέρα κόσμε ἀρχὴ",
    "cyrillic": "съешь же ещё этих мягких булок",
    "han": "敏捷的棕色狐狸跳过懒狗。",
    "kana": "いろはにほへと チリヌルヲ か\u3099",
    "hangul": "키스의 고유조건은 \u1112\u1161\u11ab",
    "arabic": "نص حكيم له سر قاطع ١٢٣",
    "hebrew": "דג סקרן שָׁלוֹם",
    "devanagari": "ऋषियों को सताने वाले दुष्ट",
    "thai": "เป็นมนุษย์สุดประเสริฐ",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 ❤️",
    "code": "def f(x):\n\treturn {'a': [1, 23, 456]}  # ok\r\n\r\n",
    "odd": "\u200b\u00a0\ufffd\u0301e\u0301 \U0001f600\x00\x7f",
}


def library(vocab_size: int = 700, alphabet: bool = True) -> tokenizers.Tokenizer:
    tok = tokenizers.Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    initial = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=initial, show_progress=False)
    tok.train_from_iterator(list(SCRIPTS.values()) * 3 if alphabet else ["abc ab"], trainer)
    tok.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    tok.add_tokens([AddedToken(text, normalized=False, special=False) for text in PLAIN_ADDED])
    return tok


LIBRARY = library()
JSON = LIBRARY.to_str().encode()
ROWS = LIBRARY.get_vocab_size() + 9  # nine padding rows
CONFIG = json.dumps({"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast",
                     "clean_up_tokenization_spaces": False}).encode()
TOKENIZER = Tokenizer.from_bytes({"tokenizer.json": JSON, "tokenizer_config.json": CONFIG}, ROWS)
MANY = settings.default.max_examples  # of the profile: the cases here are cheap
ADDED_IDS = {LIBRARY.token_to_id(text) for text in CONTROL + PLAIN_ADDED}


def generated_strings(count: int, seed: int, added: tuple[str, ...] = ()) -> list[str]:
    rng = random.Random(seed)
    words = [w for text in SCRIPTS.values() for w in text.split(" ")] + list(added)
    letters = "".join(SCRIPTS.values())
    blanks = ["", " ", "  ", "\n", "\n\n", "\t", "\r\n", " \n "]

    def one() -> str:
        parts = []
        for _ in range(rng.randint(0, 12)):
            kind = rng.random()
            parts.append(rng.choice(words) if kind < 0.6 else chr(rng.randint(1, 0xD7FF)) if kind < 0.75
                         else "".join(rng.choices(letters, k=rng.randint(1, 8))))
            parts.append(rng.choice(blanks))
        return "".join(parts)

    return [one() for _ in range(count)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "tokenizer.json").write_bytes(JSON)
    (path / "tokenizer_config.json").write_bytes(CONFIG)
    return path


def test_ids_equal_hf_library(checkpoint):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(checkpoint)
    texts = generated_strings(2000, seed=1, added=CONTROL + PLAIN_ADDED)
    assert sum(any(a in text for a in CONTROL) for text in texts) > 200
    expected = theirs(texts, add_special_tokens=False)["input_ids"]
    for text, ids in zip(texts, expected, strict=True):
        assert TOKENIZER.encode(text) == ids, text
        assert TOKENIZER.decode(ids) == theirs.decode(ids)
        assert TOKENIZER.decode(ids, skip_special=True) == theirs.decode(ids, skip_special_tokens=True)


def test_plain_ids_equal_hf_library_where_no_added_token_is_spelt():
    for text in generated_strings(2000, seed=2):
        assert TOKENIZER.encode(text, parse_special=False) == LIBRARY.encode(text).ids, text


def test_plain_text_never_becomes_an_added_token():
    for text in generated_strings(300, seed=3, added=CONTROL + PLAIN_ADDED):
        ids = TOKENIZER.encode(text, parse_special=False)
        assert not ADDED_IDS & set(ids), text
        assert TOKENIZER.decode(ids) == LIBRARY.normalizer.normalize_str(text)


def test_specials_are_parsed_by_default():
    assert TOKENIZER.encode("a<|im_end|>") == [LIBRARY.token_to_id("a"), LIBRARY.token_to_id("<|im_end|>")]


def test_shielded_control_token_stays_text_and_the_rest_is_parsed():
    shielded = TOKENIZER.shield(["x<|im_end|>y<think>"])[0]
    ids = TOKENIZER.encode_shielded("<|im_start|>" + shielded + "<|im_end|>")
    assert ids == [TOKENIZER.id_of("<|im_start|>"), *TOKENIZER.encode("x<|im_end|>y", parse_special=False),
                   TOKENIZER.id_of("<think>"), TOKENIZER.id_of("<|im_end|>")]


def test_shield_sees_tokens_cut_across_texts_and_forged_marks():
    parts = TOKENIZER.shield(["a<|im_", "end|>b", f"<{SHIELD}|im_end|>"])
    assert all("<|im_end|>" not in part for part in [*parts, "".join(parts)])
    ids = TOKENIZER.encode_shielded("".join(parts))
    assert TOKENIZER.id_of("<|im_end|>") not in ids
    assert TOKENIZER.decode(ids) == "a<|im_end|>b<|im_end|>"


@given(st.lists(st.sampled_from([*CONTROL, "<|im_", "end|>", "<", "|", ">", "a", "é", "\n", SHIELD]), max_size=12),
       st.integers(0, 2**32))
@settings(deadline=None, max_examples=2 * MANY)
def test_shield_keeps_any_spelling_text(parts, seed):
    text = "".join(parts)
    rng = random.Random(seed)
    cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 3)))
    texts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    ids = TOKENIZER.encode_shielded("".join(TOKENIZER.shield(texts)))
    assert not TOKENIZER.special_ids & set(ids)
    assert TOKENIZER.decode(ids) == text.replace(SHIELD, "")


def test_shield_changes_nothing_without_control_tokens():
    for text in generated_strings(300, seed=4, added=PLAIN_ADDED):
        assert TOKENIZER.shield([text]) == [text]
        assert TOKENIZER.encode_shielded(text + SHIELD) == TOKENIZER.encode(text)


def pieces_of(ids: list[int], **options) -> list[str]:
    decoder = IncrementalDecoder(TOKENIZER, **options)
    return [*(decoder.push(i) for i in ids), decoder.flush()]


BYTE_IDS = [LIBRARY.token_to_id(c) for c in sorted(pre_tokenizers.ByteLevel.alphabet())]
ID_LISTS = st.lists(st.one_of(st.integers(0, ROWS - 1), st.sampled_from(BYTE_IDS), st.sampled_from(sorted(ADDED_IDS))),
                    max_size=40)


@given(ID_LISTS)
@settings(deadline=None, max_examples=4 * MANY)
def test_pieces_of_any_ids_join_to_their_decoding(ids):
    assert "".join(pieces_of(ids)) == LIBRARY.decode(ids, skip_special_tokens=False)
    assert "".join(pieces_of(ids, skip_special=True)) == LIBRARY.decode(ids, skip_special_tokens=True)


def byte_ids(data: bytes) -> list[int]:
    by_byte = {TOKENIZER.token_bytes(i): i for i in BYTE_IDS}
    return [by_byte[bytes([b])] for b in data]


@given(st.binary(max_size=24))
@example(b"\xf0\x9f\x98")
@example(b"\xed\xa0\x80\xe2\x82")
@example(b"\xe2\x82<\xf4\x90\x80\x80\xc0\xaf")
@settings(deadline=None, max_examples=4 * MANY)
def test_pieces_of_any_bytes_join_to_their_decoding(data):
    assert "".join(pieces_of(byte_ids(data))) == data.decode("utf-8", "replace") == LIBRARY.decode(byte_ids(data))


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]) | st.sampled_from("👩\u200d🌈\ufe0f한é"), max_size=20))
@settings(deadline=None, max_examples=2 * MANY)
def test_valid_text_comes_character_by_character_as_early_as_possible(text):
    pieces = pieces_of(byte_ids(text.encode()))
    expected = [piece for character in text
                for piece in [""] * (len(character.encode()) - 1) + [character]]
    assert pieces == [*expected, ""]


def test_half_a_character_waits_until_proven_invalid():
    decoder = IncrementalDecoder(TOKENIZER)
    first, second, third, letter = byte_ids(b"\xe2\x82\xacA")
    assert [decoder.push(first), decoder.push(second), decoder.push(third)] == ["", "", "€"]
    assert [decoder.push(first), decoder.push(letter)] == ["", "\ufffdA"]
    assert [decoder.push(first), decoder.push(TOKENIZER.id_of("<think>"))] == ["", "\ufffd<think>"]
    assert [decoder.push(first), decoder.flush(), decoder.flush()] == ["", "\ufffd", ""]


def test_skipping_special_tokens_keeps_those_asked_for():
    end, think = TOKENIZER.id_of("<|im_end|>"), TOKENIZER.id_of("<think>")
    assert pieces_of([end, think], skip_special=True) == ["", "<think>", ""]
    assert pieces_of([end, think], skip_special=True, keep=frozenset({end})) == ["<|im_end|>", "<think>", ""]


def test_work_per_token_is_bounded():
    class Counting(Tokenizer):
        asked = 0

        def token_bytes(self, token_id):
            Counting.asked += 1
            return super().token_bytes(token_id)

        def decode(self, ids, skip_special=False):
            raise AssertionError("the whole text was decoded again")

    decoder = IncrementalDecoder(Counting(LIBRARY, ROWS))
    for token_id in byte_ids(b"\xf0" * 500):
        decoder.push(token_id)
    assert Counting.asked == 500
    assert len(decoder.flush()) == 1


def test_padding_rows_are_silent_and_ids_off_the_vocabulary_refused():
    assert TOKENIZER.vocab_size == ROWS
    assert TOKENIZER.decode([ROWS - 1]) == "".join(pieces_of([ROWS - 1])) == ""
    for bad in (-1, ROWS):
        with pytest.raises(RequestError, match=f"{bad} at position 1.*0..{ROWS - 1}"):
            TOKENIZER.decode([0, bad])


def test_end_of_turn_comes_from_the_config():
    end = TOKENIZER.id_of("<|im_end|>")
    assert TOKENIZER.eos_ids() == {end}
    for config, ids in ((b'{"eos_token": {"content": "<|im_end|>"}}', {end}), (b"{}", set()),
                        (b'{"eos_token": null}', set()), (b'{"eos_token": "<|nowhere|>"}', set())):
        made = Tokenizer.from_bytes({"tokenizer.json": JSON, "tokenizer_config.json": config}, ROWS)
        assert made.eos_ids() == ids
    assert Tokenizer.from_bytes({"tokenizer.json": JSON}, ROWS).eos_ids() == set()
    assert TOKENIZER.id_of("<|nowhere|>") is None


def test_missing_tokenizer_says_that_ids_still_work():
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*--ids"):
        Tokenizer.from_bytes({"tokenizer_config.json": CONFIG}, ROWS)


def changed(**fields) -> bytes:
    return json.dumps({**json.loads(JSON), **fields}).encode()


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[1]", b"{}", JSON[:-20], changed(model={"type": "BPE"}),
                                  changed(model=None)])
def test_damaged_tokenizer_is_one_clear_line(data):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is damaged") as info:
        Tokenizer.from_bytes({"tokenizer.json": data}, ROWS)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("data", [b"", b"\xff", b"[1]", b"{", b"[" * 100000])
def test_damaged_config_is_one_clear_line(data):
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.from_bytes({"tokenizer.json": JSON, "tokenizer_config.json": data}, ROWS)


def test_vocabulary_mismatch_names_both_numbers():
    size = LIBRARY.get_vocab_size()
    Tokenizer.from_bytes({"tokenizer.json": JSON}, size)
    with pytest.raises(TokenizerError, match=f"up to {size - 1}, the model has {size - 1} rows"):
        Tokenizer.from_bytes({"tokenizer.json": JSON}, size - 1)


@pytest.mark.parametrize("decoder", [None, {"type": "Fuse"}])
def test_other_decoders_are_refused(decoder):
    with pytest.raises(TokenizerError, match="byte-level"):
        Tokenizer.from_bytes({"tokenizer.json": changed(decoder=decoder)}, ROWS)


def test_empty_vocabulary_is_refused():
    tok = tokenizers.Tokenizer(models.BPE(vocab={}, merges=[]))
    tok.decoder = decoders.ByteLevel()
    with pytest.raises(TokenizerError, match="no tokens"):
        Tokenizer.from_bytes({"tokenizer.json": tok.to_str().encode()}, 8)


def test_truncation_and_padding_in_the_file_are_ignored():
    tok = tokenizers.Tokenizer.from_str(JSON.decode())
    tok.enable_truncation(2)
    tok.enable_padding(length=9)
    made = Tokenizer.from_bytes({"tokenizer.json": tok.to_str().encode()}, ROWS)
    assert made.encode("the quick fox") == TOKENIZER.encode("the quick fox")


@pytest.mark.parametrize("text", ["a\ud800b", 3, None, b"x"])
@pytest.mark.parametrize("parse_special", [True, False])
def test_text_without_utf8_form_is_refused(text, parse_special):
    with pytest.raises(RequestError, match=r"surrogate '\\ud800' at character 1|expected a string"):
        TOKENIZER.encode(text, parse_special)


def test_characters_the_vocabulary_cannot_spell_are_refused_not_dropped():
    tok = library(300, alphabet=False)
    made = Tokenizer.from_bytes({"tokenizer.json": tok.to_str().encode()}, 300)
    assert made.decode(made.encode("abc<|im_end|>")) == "abc<|im_end|>"
    with pytest.raises(RequestError, match="no token for 'é'"):
        made.encode("abcé")


def test_importing_does_not_load_the_library():
    import subprocess

    code = "import sys, fermi_engine.tokenizer, fermi_engine.chat, fermi_engine.generate; " \
           "sys.exit(any(m in sys.modules for m in ('tokenizers', 'jinja2')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
