"""Parses a pack's tokenizer while the rest of the engine is still being imported: with 248,000 tokens it takes 0.7 s, longer
than all the rest of what comes before a first token, and the library lets other threads run meanwhile.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fermi_engine.errors import PackError
from fermi_engine.safetensors_header import read_header
from fermi_engine.tokenizer import parse

ENTRY = "_file.tokenizer.json"  # in a pack: pack.FILE_PREFIX and the file's name


def begin(path: Path) -> Future[Any] | None:
    """The parsed `tokenizers.Tokenizer` to come, or None where `path` is no file.

    Its `result()` is None where the file holds no tokenizer, and raises PackError or TokenizerError for damage.
    """
    if not path.is_file():
        return None
    executor = ThreadPoolExecutor(1)
    future = executor.submit(_read, path)
    executor.shutdown(wait=False)
    return future


def _read(path: Path) -> Any:
    header = read_header(path, PackError)
    entry = header.tensors.get(ENTRY)
    if entry is None:
        return None
    with path.open("rb") as file:
        file.seek(header.data_start + entry.begin)
        return parse(file.read(entry.end - entry.begin))
