"""Text to ids and back through the `tokenizers` library (imported late), and text from ids as they come."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from fermi_engine.errors import RequestError, TokenizerError

# A Unicode noncharacter: never part of interchanged text, so it can mark spots in a rendered chat.
SHIELD = "\ufdd0"


def _byte_of_character() -> dict[str, int]:
    """The byte each character of a byte-level vocabulary stands for.

    Printable Latin-1 bytes stand for themselves; the other 68 are numbered upwards from U+0100 in byte order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_of_character()


class Tokenizer:
    """A byte-level BPE vocabulary as a checkpoint's tokenizer.json defines it.

    `vocab_size` is the model's number of embedding rows, which may exceed the ids the tokenizer knows (padding
    rows): such ids decode to nothing. Ids are Python ints. Two kinds of added tokens exist: control tokens
    (`special`, say `<|im_end|>`) and plain ones (`<think>` in some checkpoints).
    """

    def __init__(self, library: Any, vocab_size: int, eos_tokens: Iterable[str] = ()) -> None:
        """`library` is a `tokenizers.Tokenizer` with a ByteLevel decoder; use `from_bytes` for files."""
        self._library = library
        self.vocab_size = vocab_size
        self._eos_tokens = tuple(eos_tokens)
        added = library.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = _any_of(token.content for token in added.values())
        self._control = _any_of(token.content for token in added.values() if token.special)
        self._missing_bytes = frozenset() if getattr(library.model, "unk_token", None) else frozenset(
            byte for character, byte in _BYTE_OF.items() if library.token_to_id(character) is None)

    @classmethod
    def from_bytes(cls, files: Mapping[str, bytes], vocab_size: int, library: Any = None) -> Tokenizer:
        """Build from the contents of tokenizer.json and, for the end-of-turn token, tokenizer_config.json; `library` is what
        `parse` made of the former, where that has been done.

        Raises TokenizerError when tokenizer.json is missing, damaged, not byte-level, or has ids beyond `vocab_size`.
        """
        if "tokenizer.json" not in files:
            raise TokenizerError("the model carries no tokenizer.json, so text cannot be read or written; add the file "
                                 "to the checkpoint and convert again, or work on token ids (--ids)")
        library = library or parse(files["tokenizer.json"])
        top = max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        if top < 0:
            raise TokenizerError("tokenizer.json holds no tokens; fetch the file again or work on token ids (--ids)")
        if top >= vocab_size:
            raise TokenizerError(f"vocabulary mismatch: tokenizer.json has ids up to {top}, the model has {vocab_size} "
                                 "rows (vocab_size); take both from the same checkpoint or work on token ids (--ids)")
        config = json_object(files, "tokenizer_config.json")
        eos = token_text(config.get("eos_token"))
        return cls(library, vocab_size, () if eos is None else (eos,))

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        """Ids of `text`; nothing is added at either end.

        `parse_special=False` reads every character as plain text, so that no added token can come from it.
        Raises RequestError for text that has no UTF-8 form or needs a byte the vocabulary lacks.
        """
        self._check_text(text)
        if parse_special:
            return self._library.encode(text, add_special_tokens=False).ids
        return self._encode_plain(text)

    def shield(self, texts: list[str]) -> list[str]:
        """Mark every control token spelt out in `texts`, read end to end, so that `encode_shielded` keeps it text.

        A token cut across two texts is marked as well. Marks already in the text do no harm: they can only keep more
        of it text, and `encode_shielded` drops them.
        """
        spots = {match.start() + 1 for match in self._control.finditer("".join(texts))}
        shielded, start = [], 0
        for text in texts:
            cuts = [0, *sorted(s - start for s in spots if start < s <= start + len(text)), len(text)]
            shielded.append(SHIELD.join(text[a:b] for a, b in pairwise(cuts)))
            start += len(text)
        return shielded

    def encode_shielded(self, text: str) -> list[int]:
        """Ids of a rendered chat: added tokens are parsed except where a mark of `shield` splits them."""
        if SHIELD not in text:
            return self.encode(text)
        ids: list[int] = []
        start = 0
        for match in self._added.finditer(text):
            ids += self.encode(text[start:match.start()].replace(SHIELD, ""), parse_special=False)
            ids.append(self._library.token_to_id(match.group()))
            start = match.end()
        return ids + self.encode(text[start:].replace(SHIELD, ""), parse_special=False)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that form no character become U+FFFD. Raises RequestError for ids off the vocabulary."""
        ids = list(ids)
        check_ids(ids, self.vocab_size)
        return self._library.decode(ids, skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that one id adds to the text; empty for padding rows the tokenizer does not know."""
        token = self._library.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:  # an added token is stored as it reads, not in byte characters
            return token.encode("utf-8")

    def id_of(self, token: str) -> int | None:
        """Id of one token as tokenizer.json spells it, or None."""
        return self._library.token_to_id(token)

    def eos_ids(self) -> set[int]:
        """Ids of tokenizer_config.json's eos_token: empty when it names none or the vocabulary lacks it."""
        return {i for i in map(self.id_of, self._eos_tokens) if i is not None}

    def _encode_plain(self, text: str) -> list[int]:
        library = self._library
        if library.normalizer is not None:
            text = library.normalizer.normalize_str(text)
        pre = library.pre_tokenizer
        pieces = [(text, None)] if pre is None else pre.pre_tokenize_str(text)
        model = library.model
        return [token.id for piece, _ in pieces for token in model.tokenize(piece)]

    def _check_text(self, text: str) -> None:
        if not isinstance(text, str):
            raise RequestError(f"text to encode is {type(text).__name__}, expected a string")
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as err:
            raise RequestError(f"text has a lone surrogate {text[err.start]!r} at character {err.start}, which no "
                               "UTF-8 text holds; remove it") from None
        if self._missing_bytes and not self._missing_bytes.isdisjoint(data):
            self._refuse_missing(text)

    def _refuse_missing(self, text: str) -> None:
        for character in self._added.sub("", text):
            if not self._missing_bytes.isdisjoint(character.encode("utf-8")):
                raise RequestError(f"tokenizer.json has no token for {character!r} (its vocabulary lacks "
                                   f"{len(self._missing_bytes)} of the 256 bytes); remove the character or use --ids")


class IncrementalDecoder:
    """Text of a growing list of ids, each piece as soon as its characters are complete.

    All pieces and the flush together equal `Tokenizer.decode` of all ids. Bytes of an unfinished character (at
    most three) wait until they are completed or can no longer be; the work per id is that of its own bytes.
    `skip_special` leaves out control tokens other than those in `keep`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False, keep: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - keep if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Characters that `token_id` completes; may be empty."""
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """U+FFFD for a character left unfinished, or nothing; the decoder is then as new."""
        return self._utf8.decode(b"", final=True)


def check_ids(ids: Iterable[int], vocab_size: int | None) -> None:
    """Raise RequestError naming the first of `ids` outside 0..vocab_size-1 (None: no upper end is known)."""
    for position, token_id in enumerate(ids):
        if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            span = "0 or more" if vocab_size is None else f"0..{vocab_size - 1}"
            raise RequestError(f"token id {token_id} at position {position} is outside the vocabulary, expected {span}")


def json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The JSON object in `files[name]`, or {} without that file. Raises TokenizerError when it is damaged."""
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except (ValueError, RecursionError) as err:
        raise TokenizerError(f"{name} is damaged ({one_line(err)}); fetch the file again") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{name} holds a {type(value).__name__}, expected an object; fetch the file again")
    return value


def token_text(entry: Any) -> str | None:
    """Text of a token entry in tokenizer_config.json: a string, an object with `content`, or nothing."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def parse(data: bytes) -> Any:
    """tokenizer.json as a `tokenizers.Tokenizer`. Raises TokenizerError when it is damaged or not byte-level."""
    try:
        import tokenizers
    except ImportError:
        raise TokenizerError("text needs the 'tokenizers' package: pip install tokenizers, "
                             "or work on token ids (--ids)") from None
    try:
        library = tokenizers.Tokenizer.from_buffer(bytes(data))
    except Exception as err:  # the library raises bare Exception for some damage
        raise TokenizerError(f"tokenizer.json is damaged ({one_line(err)}); fetch the file again, "
                             "or work on token ids (--ids)") from None
    kind = "none" if library.decoder is None else json.loads(library.decoder.__getstate__())["type"]
    if kind != "ByteLevel":
        raise TokenizerError(f"tokenizer.json has decoder {kind!r}; this engine reads byte-level BPE ('ByteLevel') "
                             "only, work on token ids (--ids)")
    library.no_truncation()
    library.no_padding()
    return library


def _any_of(contents: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `contents`, the longest first; never matches when there is none."""
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def one_line(err: BaseException) -> str:
    """The message of `err` without line breaks."""
    return " ".join(str(err).split())
