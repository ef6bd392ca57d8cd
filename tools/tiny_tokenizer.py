"""A byte-level BPE tokenizer of 1024 ids, trained on the text of the tasks; digits always stay single tokens."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from fermi_engine import chat
from fermi_engine.vision.plans import QwenImages
from tools import byte_tokenizer
from tools import tiny_words as w
from tools.tiny_tasks import Encoder, drawn

VOCAB_SIZE = 1024
SPECIALS = byte_tokenizer.SPECIALS
MERGES = VOCAB_SIZE - 256 - len(SPECIALS)
IMAGES = QwenImages(patch_size=8, min_pixels=64**2, max_pixels=112**2)  # up to 49 tokens
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def token_id(special: str) -> int:
    """Id of one of SPECIALS: they follow the bytes and the merges."""
    return 256 + MERGES + SPECIALS.index(special)


def tokenizer_files() -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja: the same bytes on every machine."""
    config = {"add_bos_token": False, "add_prefix_space": False, "bos_token": None, "clean_up_tokenization_spaces": False,
              "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": 16384, "pad_token": "<|endoftext|>",
              "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None}
    return {"tokenizer.json": _text(tokenizer_json()), "tokenizer_config.json": _text(config),
            "chat_template.jinja": TEMPLATE.read_bytes()}


def encoder(files: dict[str, bytes]) -> Encoder:
    """The encoder over files as `tokenizer_files` gives them."""
    return Encoder(files, VOCAB_SIZE, IMAGES)


def _text(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def tokenizer_json() -> dict[str, Any]:
    """The tokenizer in the format of the `tokenizers` library: byte b has the id b, then merges, then SPECIALS."""
    frame = byte_tokenizer.tokenizer_json()
    vocab = frame["model"]["vocab"]
    alphabet = sorted(vocab, key=vocab.get)[:256]
    merges = train([[alphabet[b] for b in piece.encode()] for piece in _pieces()], MERGES, _syllables(alphabet[32]))
    frame["model"]["vocab"] = {letter: b for b, letter in enumerate(alphabet)} | {
        left + right: 256 + i for i, (left, right) in enumerate(merges)}
    frame["model"]["merges"] = [list(pair) for pair in merges]
    frame["added_tokens"] = [{**token, "id": token_id(token["content"])} for token in frame["added_tokens"]]
    return frame


def _pieces() -> list[str]:
    """What BPE may merge within: the corpus cut as the tokenizer cuts, without special tokens."""
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(byte_tokenizer.SPLIT), "isolated")
    texts = re.split("|".join(map(re.escape, SPECIALS)), "\n".join(_corpus()))
    return [piece for text in texts for piece, _ in split.pre_tokenize_str(text)]


def _corpus() -> list[str]:
    """Sentences, names and rendered samples of every task, in proportions that leave merges for each language."""
    rng = Random("tokenizer")
    template = TEMPLATE.read_text(encoding="utf-8")
    texts = [w.sentence(rng, language) for language in w.LANGUAGES for _ in range(2000 if language == "en" else 500)]
    texts += [chosen.statement.format(name="", code="") for chosen in w.LANGUAGES.values() for _ in range(200)]
    for task, count in (("needle", 100), ("arithmetic", 50), ("turns", 150), ("tool_call", 250)):
        for i in range(count):
            sample = drawn(task, "train", 0, i, _rough_measure, 200)
            texts.append(chat.render(template, sample.messages, tools=sample.tools, enable_thinking=sample.thinking))
            texts.append(sample.answer)
    return texts


def _rough_measure(text: str) -> int:
    """Tokens of a text before there is a tokenizer, about."""
    return 1 + len(text) // 3


def _syllables(space: str) -> list[tuple[str, str]]:
    """Merges that make a token of each syllable of the names, so that every name after a space is three tokens.

    Consonant and vowel first, then more consonants before them, those after them, the space: in this order no merge
    reaches across the end of a syllable.
    """
    steps: list[dict[tuple[str, str], None]] = [{}, {}, {}, {}]
    for syllable in (*w.FIRST, *w.SECOND, *w.THIRD):
        at = next(i for i, letter in enumerate(syllable.lower()) if letter in "aeiouy")
        for i in range(at - 1, -1, -1):
            steps[0 if i == at - 1 else 1][syllable[i], syllable[i + 1 : at + 1]] = None
        for i in range(at + 1, len(syllable)):
            steps[2][syllable[:i], syllable[i]] = None
        if syllable in w.FIRST:
            steps[3][space, syllable] = None
    return [pair for step in steps for pair in step]


def train(pieces: list[list[str]], count: int, first: Sequence[tuple[str, str]] = ()) -> list[tuple[str, str]]:
    """`count` merges: `first`, then each time the most frequent neighbouring pair, of equals the first in order.

    Raises ValueError when the pieces hold fewer pairs than that.
    """
    weights = Counter(map(tuple, pieces))
    words = [list(piece) for piece in weights]
    times = list(weights.values())
    counts: Counter[tuple[str, str]] = Counter()
    homes: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for i, word in enumerate(words):
        _count(word, i, times[i], counts, homes)
    merges: list[tuple[str, str]] = []
    for i in range(count):
        best = first[i] if i < len(first) else min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if best is None or (counts[best] <= 0 and i >= len(first)):
            raise ValueError(f"the text holds pairs for {len(merges)} merges, {count} were asked for")
        merges.append(best)
        for home in list(homes[best]):
            _count(words[home], home, -times[home], counts, homes)
            words[home] = _merged(words[home], best)
            _count(words[home], home, times[home], counts, homes)
    return merges


def _count(word: list[str], i: int, times: int, counts: Counter[tuple[str, str]],
           homes: defaultdict[tuple[str, str], set[int]]) -> None:
    for pair in pairwise(word):
        counts[pair] += times
        if times > 0:
            homes[pair].add(i)


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    at = 0
    while at < len(word):
        if tuple(word[at : at + 2]) == pair:
            merged.append(word[at] + word[at + 1])
            at += 2
        else:
            merged.append(word[at])
            at += 1
    return merged
