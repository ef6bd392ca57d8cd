"""Texts that a model is measured on, as token ids: a plain text file is one document, a .jsonl file has one a line.

A line of a .jsonl file is an object with one of `text`, `ids` (token ids) or `messages` (a chat through the model's own
template; `tools` and `enable_thinking` may stand beside it). A chat whose last message is the user's ends where the answer
begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fermi_engine import chat
from fermi_engine.errors import FermiError, RequestError
from fermi_engine.tokenizer import Tokenizer

KINDS = ("text", "ids", "messages")
FEWEST = 2  # tokens of a window: one to read and one to predict


class Reader:
    """Files to token ids. `tokenizer` is asked for on first need, so that ids work without one; `files` are the model's
    own (its chat template), `vocab_size` its number of ids."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], files: dict[str, bytes], vocab_size: int) -> None:
        self._tokenizer, self._files, self._vocab_size = tokenizer, files, vocab_size

    def read(self, paths: Sequence[Path]) -> list[np.ndarray]:
        """Documents, int32 [n] each, in the order of the files.

        Raises RequestError naming file and line for what is no text, no document or no token of this model; TokenizerError
        where the model has no tokenizer.
        """
        return [document for path in paths for document in self._file(path)]

    def _file(self, path: Path) -> list[np.ndarray]:
        try:
            text = path.read_bytes().decode("utf-8")
        except OSError as err:
            raise RequestError(f"cannot read {path}: {err.strerror}; give a text file or a .jsonl file") from None
        except UnicodeDecodeError as err:
            raise RequestError(f"{path} is no UTF-8 text (byte {err.start}); give a text file or a .jsonl file") from None
        if path.suffix != ".jsonl":
            return [self._ids(self._tokenizer().encode(text), str(path))]
        lines = [(f"{path}, line {n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        return [self._ids(self._line(where, line), where) for where, line in lines]

    def _line(self, where: str, line: str) -> Any:
        try:
            item = json.loads(line)
        except (ValueError, RecursionError):
            raise RequestError(f"{where} is no JSON; a line is an object such as {{\"text\": \"...\"}}") from None
        kinds = [kind for kind in KINDS if isinstance(item, dict) and kind in item]
        if len(kinds) != 1:
            raise RequestError(f"{where} has {' and '.join(kinds) or 'none'} of {', '.join(KINDS)}; a line is an object "
                               "with exactly one of them")
        try:
            return item["ids"] if kinds[0] == "ids" else self._encoded(item)
        except FermiError as err:
            raise type(err)(f"{where}: {err}") from None

    def _encoded(self, item: dict[str, Any]) -> list[int]:
        if "text" in item:
            return self._tokenizer().encode(item["text"])
        thinking = item.get("enable_thinking", True)
        asked = isinstance(item["messages"], list) and item["messages"] and isinstance(item["messages"][-1], dict) \
            and item["messages"][-1].get("role") in ("user", "tool")
        return chat.encode(self._tokenizer(), chat.find_template(self._files), item["messages"], tools=item.get("tools"),
                           enable_thinking=thinking, add_generation_prompt=asked, extra=chat.special_tokens(self._files))

    def _ids(self, ids: Any, where: str) -> np.ndarray:
        whole = isinstance(ids, list) and all(type(i) is int for i in ids)
        if not whole or any(not 0 <= i < self._vocab_size for i in ids):
            raise RequestError(f"{where}: ids are no list of token ids in 0..{self._vocab_size - 1}")
        return np.array(ids, np.int32)


def windows(documents: Sequence[np.ndarray], length: int, what: str) -> list[np.ndarray]:
    """Documents cut into pieces of at most `length` tokens, each to be read from an empty state; pieces of a single token
    are left out. RequestError where nothing is left; `what` names the files in it."""
    pieces = [document[begin:begin + length] for document in documents for begin in range(0, len(document), length)]
    kept = [piece for piece in pieces if len(piece) >= FEWEST]
    if not kept:
        total = sum(map(len, documents))
        raise RequestError(f"{what} holds no usable text: {total} token{'s' if total != 1 else ''} in {len(documents)} "
                           f"documents, a window needs {FEWEST}; give more text")
    return kept
