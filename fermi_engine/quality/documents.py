"""Texts that a model is measured on, as token ids: a plain text file is one document, a .jsonl file has one a line.

A line of a .jsonl file is an object with one of `text`, `ids` (token ids) or `messages` (a chat through the model's own
template; `tools` and `enable_thinking` may stand beside it). A chat whose last message is the user's ends where the answer
begins. A part {"type": "image", "path": "a.png"} of a message shows an image file; the path counts from the .jsonl file's place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fermi_engine import chat
from fermi_engine.errors import FermiError, RequestError
from fermi_engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fermi_engine.engine import Engine
    from fermi_engine.vision.encoder import Vision
    from fermi_engine.vision.patches import PreparedImage

KINDS = ("text", "ids", "messages")
FEWEST = 2  # tokens of a window: one to read and one to predict


class ImageFile(NamedTuple):
    """An image that a document shows: where it lies, and the digest of what a tower reads of it."""

    path: Path
    digest: bytes

    def prepared(self, vision: Vision) -> PreparedImage:
        """What the tower reads. RequestError where the file has changed since, ImageError where it cannot be read any more."""
        image = vision.prepare(self.path)
        if image.digest != self.digest:
            raise RequestError(f"{self.path} has changed since the documents were read; start again")
        return image


class Document(NamedTuple):
    """Token ids int32 [n] and, in order, the images whose tokens are among them; `where` names it in messages."""

    ids: np.ndarray
    images: tuple[ImageFile, ...] = ()
    where: str = ""


class Reader:
    """Files to documents. `tokenizer` and `vision` are asked for on first need, so that ids work without either; `files` are
    the model's own (its chat template), `vocab_size` its number of ids."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], files: dict[str, bytes], vocab_size: int,
                 vision: Callable[[], Vision]) -> None:
        self._tokenizer, self._files, self._vocab_size, self._vision = tokenizer, files, vocab_size, vision

    @classmethod
    def of(cls, engine: Engine) -> Reader:
        """For an engine's model."""
        return cls(lambda: engine.tokenizer, engine.pack.files(), engine.config.vocab_size, lambda: engine.vision)

    def read(self, paths: Sequence[Path]) -> list[Document]:
        """Documents in the order of the files.

        Raises RequestError naming file and line for what is no text, no document or no token of this model; TokenizerError
        where the model has no tokenizer; ImageError for a file that is no image, RequestError where the model sees none.
        """
        return [document for path in paths for document in self._file(path)]

    def _file(self, path: Path) -> list[Document]:
        try:
            text = path.read_bytes().decode("utf-8")
        except OSError as err:
            raise RequestError(f"cannot read {path}: {err.strerror}; give a text file or a .jsonl file") from None
        except UnicodeDecodeError as err:
            raise RequestError(f"{path} is no UTF-8 text (byte {err.start}); give a text file or a .jsonl file") from None
        if path.suffix != ".jsonl":
            return [self._document(self._tokenizer().encode(text), str(path))]
        lines = [(f"{path}, line {n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        return [self._line(where, line, path.parent) for where, line in lines]

    def _line(self, where: str, line: str, folder: Path) -> Document:
        try:
            item = json.loads(line)
        except (ValueError, RecursionError):
            raise RequestError(f"{where} is no JSON; a line is an object such as {{\"text\": \"...\"}}") from None
        kinds = [kind for kind in KINDS if isinstance(item, dict) and kind in item]
        if len(kinds) != 1:
            raise RequestError(f"{where} has {' and '.join(kinds) or 'none'} of {', '.join(KINDS)}; a line is an object "
                               "with exactly one of them")
        try:
            if kinds[0] == "messages":
                return self._chat(item, where, folder)
            ids = item["ids"] if kinds[0] == "ids" else self._tokenizer().encode(item["text"])
        except FermiError as err:
            raise type(err)(f"{where}: {err}") from None
        return self._document(ids, where)

    def _chat(self, item: dict[str, Any], where: str, folder: Path) -> Document:
        messages, paths = _without_paths(item["messages"])
        last = messages[-1] if isinstance(messages, list) and messages else None
        asked = isinstance(last, dict) and last.get("role") in ("user", "tool")
        images = [self._vision().prepare(folder / path) for path in paths]
        ids = chat.encode(self._tokenizer(), chat.find_template(self._files), messages, tools=item.get("tools"),
                          enable_thinking=item.get("enable_thinking", True), add_generation_prompt=asked,
                          extra=chat.special_tokens(self._files))
        if images:
            ids = self._vision().expand(self._tokenizer(), ids, images)
        shown = (ImageFile(folder / path, image.digest) for path, image in zip(paths, images, strict=True))
        return self._document(ids, where)._replace(images=tuple(shown))

    def _document(self, ids: Any, where: str) -> Document:
        whole = isinstance(ids, list) and all(type(i) is int for i in ids)
        if not whole or any(not 0 <= i < self._vocab_size for i in ids):
            raise RequestError(f"{where}: ids are no list of token ids in 0..{self._vocab_size - 1}")
        return Document(np.array(ids, np.int32), where=where)


def _without_paths(messages: Any) -> tuple[Any, list[str]]:
    """Messages as a chat template takes them, and the paths of the images they show; what is malformed stays as it is."""
    paths: list[str] = []

    def part(given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") == "image" and isinstance(given.get("path"), str):
            paths.append(given["path"])
            return {name: value for name, value in given.items() if name != "path"}
        if given == {"type": "image"}:
            raise RequestError("a message shows an image and says not which; a part is "
                               "{\"type\": \"image\", \"path\": \"a.png\"}")
        return given

    def message(given: Any) -> Any:
        shows = isinstance(given, dict) and isinstance(given.get("content"), list)
        return {**given, "content": [part(one) for one in given["content"]]} if shows else given

    return ([message(one) for one in messages] if isinstance(messages, list) else messages), paths


def windows(documents: Sequence[Document], length: int, what: str) -> list[Document]:
    """Documents cut into pieces of at most `length` tokens, each to be read from an empty state; pieces of a single token
    are left out. RequestError where nothing is left, and for a document with images that would have to be cut; `what` names
    the files in it."""
    pieces = []
    for document in documents:
        if document.images and len(document.ids) > length:
            raise RequestError(f"{document.where}: {len(document.ids)} tokens with images among them do not fit a window of "
                               f"{length}; raise --window, or show fewer or smaller images")
        pieces += [document._replace(ids=document.ids[begin:begin + length]) for begin in range(0, len(document.ids), length)]
    kept = [piece for piece in pieces if len(piece.ids) >= FEWEST]
    if not kept:
        total = sum(len(document.ids) for document in documents)
        raise RequestError(f"{what} holds no usable text: {total} token{'s' if total != 1 else ''} in {len(documents)} "
                           f"documents, a window needs {FEWEST}; give more text")
    return kept


def texts(documents: Sequence[Document], what: str) -> list[np.ndarray]:
    """Token ids of documents that show no image. RequestError naming one that does, and `what` takes text only."""
    shown = next((document for document in documents if document.images), None)
    if shown is not None:
        raise RequestError(f"{shown.where} shows an image; {what} reads text only")
    return [document.ids for document in documents]


def identity(documents: Sequence[Document]) -> list[object]:
    """What tells these documents from others, for resume.digest_of: tokens, where each ends, images."""
    return [np.concatenate([document.ids for document in documents]), [len(document.ids) for document in documents],
            [image.digest.hex() for document in documents for image in document.images]]
