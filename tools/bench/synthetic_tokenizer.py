"""A byte-level BPE tokenizer of realistic size with made-up merges: loads as slowly as a released one, means nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tools.byte_tokenizer import SPECIALS, tokenizer_json

RELEASED = 248_044  # BPE entries of the Qwen3.6 tokenizer: 256 bytes and the merges
LONGEST = 16  # bytes of a token made here; released vocabularies average some 7
OLDEST = 6000  # merges build on this many of the first tokens, so that most parts are short


def write(directory: Path, vocab_size: int, seed: int) -> dict[str, Path]:
    """tokenizer.json and tokenizer_config.json in `directory`, by file name; ids stay below `vocab_size`.

    The released number of entries where the vocabulary holds them, else as many as fit. ValueError below 256 bytes.
    """
    entries = min(RELEASED, vocab_size - len(SPECIALS))
    if entries < 256:
        raise ValueError(f"a vocabulary of {vocab_size} holds no byte-level tokenizer; at least {256 + len(SPECIALS)}")
    values = {
        "tokenizer.json": document(entries, seed),
        "tokenizer_config.json": {"add_bos_token": False, "add_prefix_space": False, "eos_token": SPECIALS[2],
                                  "pad_token": SPECIALS[0], "tokenizer_class": "Qwen2Tokenizer", "unk_token": None},
    }
    paths = {name: directory / name for name in values}
    for name, path in paths.items():
        path.write_text(json.dumps(values[name], indent=1, ensure_ascii=False), encoding="utf-8")
    return paths


def document(entries: int, seed: int) -> dict[str, Any]:
    """The tokenizer in the form of the `tokenizers` library: bytes 0..255, `entries` - 256 merges, then SPECIALS."""
    made = tokenizer_json()
    letters = sorted(made["model"]["vocab"], key=made["model"]["vocab"].__getitem__)[:256]
    vocab, merges = _grow(letters, entries, np.random.default_rng(seed))
    made["model"] |= {"vocab": vocab, "merges": merges}
    for i, token in enumerate(made["added_tokens"]):
        token["id"] = entries + i
    return made


def _grow(letters: list[str], entries: int, rng: np.random.Generator) -> tuple[dict[str, int], list[list[str]]]:
    """Join random parts until there are enough tokens; of a join that exists or is too long, nothing comes.

    The parts are ASCII, so that nearly every id is whole text: a streamed token shows at once.
    """
    vocab = {token: i for i, token in enumerate(letters)}
    parts = letters[0x20:0x7F]
    merges: list[list[str]] = []
    while len(vocab) < entries:
        for left, right in rng.integers(0, min(len(parts), OLDEST), (4096, 2)).tolist():
            joined = parts[left] + parts[right]
            if len(joined) <= LONGEST and joined not in vocab and len(vocab) < entries:
                vocab[joined] = len(vocab)
                merges.append([parts[left], parts[right]])
                parts.append(joined)
    return vocab, merges
