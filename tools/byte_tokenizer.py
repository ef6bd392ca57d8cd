"""A byte-level BPE tokenizer of a few hundred ids, in the manner of the Qwen3.5 family's: for generated checkpoints."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import Any

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
            "<|video_pad|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
            "</think>")
VIEW_TAGS = ("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")  # of MiniCPM-V: control tokens, too
CONTROL = 7  # the release marks this many as control tokens, hidden from text; the others are shown
MERGES = 64
CORPUS = """The wind took the letters from the table and the old man ran after them through the open door. There were
seven of them, and none of them had been answered. When he came back he put a stone on each one, lit the lamp and
began to write. "It is winter," he wrote, "and the river under the ice never stops talking." """
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
SIZE = 256 + MERGES + len(SPECIALS)


def token_id(special: str) -> int:
    """Id of one of SPECIALS: they follow the bytes and the merges."""
    return 256 + MERGES + SPECIALS.index(special)


def tokenizer_json(extra: tuple[str, ...] = ()) -> dict[str, Any]:
    """The tokenizer in the format of the `tokenizers` library: byte b has the id b, then merges, then SPECIALS, then further
    control tokens `extra`."""
    alphabet = _byte_letters()
    merges = _train([[alphabet[b] for b in word.encode()] for word in re.findall(r" ?[A-Za-z]+", CORPUS)])
    vocab = {letter: b for b, letter in enumerate(alphabet)}
    vocab |= {left + right: 256 + i for i, (left, right) in enumerate(merges)}
    added = [{"id": token_id(token), "content": token, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": i < CONTROL} for i, token in enumerate(SPECIALS)]
    added += [{**added[0], "id": SIZE + i, "content": token} for i, token in enumerate(extra)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}, "post_processor": byte_level,
            "decoder": byte_level, "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                "vocab": vocab, "merges": [list(pair) for pair in merges]}}


def _byte_letters() -> list[str]:
    """The printable stand-in of each byte: itself where Latin-1 prints it, else the next letter from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(stand_ins)) for b in range(256)]


def _train(words: list[list[str]]) -> list[tuple[str, str]]:
    """MERGES merges: each time the most frequent neighbouring pair, of equally frequent ones the first in order."""
    merges: list[tuple[str, str]] = []
    for _ in range(MERGES):
        counts = Counter(pair for word in words for pair in pairwise(word))
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        words = [_merge(word, best) for word in words]
    return merges


def _merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for letter in word:
        if merged and (merged[-1], letter) == pair:
            merged[-1] += letter
        else:
            merged.append(letter)
    return merged
