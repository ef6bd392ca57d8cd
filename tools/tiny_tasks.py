"""Tasks whose right answers are known by construction: prompts as chats, answers, and checks of answers.

Each sample is drawn from a `random.Random`; names, sums, calls and texts fall by a hash into a part for training and a
held-out part. An answer is what a model writes after the generation prompt, so it begins with the reasoning where
thinking is on.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from fermi_engine import chat
from fermi_engine.tokenizer import Tokenizer
from fermi_engine.vision.config import VisionConfig
from fermi_engine.vision.patches import PreparedImage, prepare
from fermi_engine.vision.plans import QwenImages
from fermi_engine.vision.prompt import expand, placeholder
from tools import tiny_calls as calls
from tools import tiny_words as w
from tools.tiny_scenes import Scene

Messages = list[dict[str, Any]]
Measure = Callable[[str], int]  # tokens of a text
DEPTHS = tuple(d / 10 for d in range(1, 10))
TURN_TOKENS = 14  # tags, role words and line ends of a question and its answer
ROW_TOKENS = 90  # the longest question and answer with their tags
CODE_TOKENS, MOST_CODES, MOST_QUESTIONS = 40, 48, 16  # how dense codes may stand: dense ones teach that the name decides
THINKING_SHARE = 0.15
FILLERS = ("I see.", "All right.")
PETS = ("dog", "cat", "boat", "street", "teacher", "sister", "horse", "village", "bakery", "ship", "parrot", "doctor",
        "garden", "school", "team", "robot")
NUMBERED = ("room", "locker", "seat", "bus", "flight", "ticket", "door", "shelf")


@dataclass(frozen=True)
class Sample:
    """One prompt and what should follow it.

    messages: up to the user turn to be answered; answer: reasoning and reply, without the end-of-turn token;
    expected: what the checker compares with; images: those of the messages, in order.
    """

    task: str
    messages: Messages
    answer: str
    expected: Any
    thinking: bool = False
    tools: list[dict[str, Any]] | None = None
    images: tuple[Scene, ...] = ()


@dataclass(frozen=True)
class Fact:
    """A code, the language it is told in, and how deep in the context (share of the context's tokens before it)."""

    name: str
    code: str
    language: str
    depth: float

    @property
    def statement(self) -> str:
        """How the context tells it, and the right answer."""
        return w.LANGUAGES[self.language].statement.format(name=self.name, code=self.code)

    @property
    def question(self) -> str:
        """What asks for it."""
        return w.LANGUAGES[self.language].question.format(name=self.name)


def user(text: str) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    """An answer given before."""
    return {"role": "assistant", "content": text}


def _sample(rng: Random, task: str, messages: Messages, reply: str, thought: str, **fields: Any) -> Sample:
    """A sample that thinks aloud now and then."""
    if rng.random() >= THINKING_SHARE:
        return Sample(task, messages, reply, **{"expected": reply, **fields})
    return Sample(task, messages, f"{thought}\n</think>\n\n{reply}", **{"expected": reply, **fields}, thinking=True)


def facts_at(rng: Random, held: bool, depths: Sequence[float]) -> list[Fact]:
    """A new code for each of `depths` (0..1), in their order."""
    named = zip(w.names(rng, held, len(depths)), sorted(depths), strict=True)
    return [Fact(name, w.code(rng), rng.choice(w.MIX), depth) for name, depth in named]


def context(rng: Random, measure: Measure, tokens: int, facts: Sequence[Fact]) -> str:
    """About `tokens` tokens of sentences in several languages, with each of `facts` at its depth."""
    room = tokens - sum(measure(" " + fact.statement) for fact in facts)
    parts: list[str] = []
    used, placed = 0, 0
    while used < room:
        while placed < len(facts) and facts[placed].depth * room <= used:
            parts.append(facts[placed].statement)
            placed += 1
        text = w.sentence(rng)
        used += measure(" " + text)
        if used <= room:
            parts.append(text)
    return " ".join([*parts, *(fact.statement for fact in facts[placed:])])


def needle(rng: Random, held: bool, measure: Measure, tokens: int) -> Sample:
    """Codes in a context of such a length that the whole has about `tokens` tokens, and one or more questions."""
    count = rng.randint(1, max(1, min(tokens // CODE_TOKENS, MOST_CODES)))
    facts = facts_at(rng, held, [rng.random() for _ in range(count)])
    asked = rng.sample(facts, rng.randint(1, min(count, MOST_QUESTIONS)))
    cost = [measure(fact.question) + measure(fact.statement) + TURN_TOKENS for fact in asked]
    while len(asked) > 1 and sum(cost[: len(asked)]) > tokens / 2:
        asked.pop()
    text = context(rng, measure, tokens - sum(cost[: len(asked)]), facts)
    messages: Messages = []
    for i, fact in enumerate(asked):
        messages.append(user((f"{text}\n\n" if i == 0 else "") + fact.question))
        if i < len(asked) - 1:
            messages.append(assistant(fact.statement))
    last = asked[-1]
    return _sample(rng, "needle", messages, last.statement, f"I look for {last.name}.", expected=(last.name, last.code))


def needle_row(rng: Random, held: bool, measure: Measure, tokens: int, depths: Sequence[float] = DEPTHS) -> list[Sample]:
    """One context with a code at each of `depths` and one sample for each: they share all but the question."""
    facts = facts_at(rng, held, depths)
    text = context(rng, measure, tokens - ROW_TOKENS, facts)
    return [Sample("needle", [user(f"{text}\n\n{fact.question}")], fact.statement, (fact.name, fact.code))
            for fact in facts]


def copying(rng: Random, held: bool, measure: Measure, tokens: int) -> Sample:
    """A string of words, names, numbers, emoji and rare characters to be given back."""
    makers = (
        lambda: w.words(rng, 1)[0], lambda: w.words(rng, 1)[0], lambda: w.name(rng, held),
        lambda: str(rng.randrange(10 ** rng.randint(1, 5))), lambda: rng.choice(w.EMOJI),
        lambda: "".join(rng.choice("abcdefghijkmnpqrstuvwxyzABCDEFGHKLMNPQRSTUVWXYZ23456789-_+") for _ in range(5)),
        lambda: chr(rng.randrange(0x4E00, 0x9FA0)), lambda: chr(rng.randrange(0x1F400, 0x1F440)),
    )
    room = min(tokens - 40, rng.randint(4, 60))
    while True:
        parts = [rng.choice(makers)()]
        while measure(" ".join(parts)) < room:
            parts.append(rng.choice(makers)())
        text = unicodedata.normalize("NFC", " ".join(parts))
        if w.held_out(text) == held:
            break
    form = rng.choice(("Repeat exactly: {}", "Copy this text: {}"))
    return _sample(rng, "copying", [user(form.format(text))], text, "I repeat the text.")


def arithmetic(rng: Random, held: bool, measure: Measure, tokens: int) -> Sample:
    """a + b or a - b (not negative) of up to three digits, worked out digit by digit in the reasoning."""
    while True:
        a, b = (rng.randrange(10 ** rng.randint(1, 3)) for _ in range(2))
        plus = rng.random() < 0.5
        a, b = (a, b) if plus else (max(a, b), min(a, b))
        sign = "+" if plus else "-"
        if w.held_out(f"{a} {sign} {b}") == held:
            break
    form = rng.choice(("What is {} {} {}?", "Calculate {} {} {}."))
    steps, result = worked(a, b, plus)
    return Sample("arithmetic", [user(form.format(a, sign, b))], f"{steps}\n</think>\n\n{result}", result, thinking=True)


def worked(a: int, b: int, plus: bool) -> tuple[str, str]:
    """The steps of a written sum or difference, last digits first, and the result.

    A line reads `x+y+c=de` with the carry c so far, the new carry d and the digit e; for a difference `x-y-c=de` with
    a borrow in place of the carry.
    """
    width = max(len(str(a)), len(str(b)))
    sign, carry, lines = "+" if plus else "-", 0, []
    for x, y in zip(reversed(f"{a:0{width}d}"), reversed(f"{b:0{width}d}"), strict=True):
        total = int(x) + int(y) + carry if plus else int(x) - int(y) - carry
        lines.append(f"{x}{sign}{y}{sign}{carry}={abs(total // 10)}{total % 10}")
        carry = abs(total // 10)
    return "\n".join(lines), str(a + b if plus else a - b)


def turns(rng: Random, held: bool, measure: Measure, tokens: int) -> Sample:
    """A conversation of facts about the user, with questions about earlier turns; the last turn is one."""
    kinds = rng.sample(PETS + NUMBERED, rng.randint(2, max(2, min(10, tokens // 50))))
    facts = {kind: w.name(rng, held) if kind in PETS else _number(rng, held, kind) for kind in kinds}
    messages: Messages = []
    known: list[str] = []
    used = 0
    for kind, value in facts.items():
        told = f"My {kind} is called {value}." if kind in PETS else f"My {kind} number is {value}."
        events = [(told, f"Noted, your {kind}.")]
        if rng.random() < 0.3:
            events.append((w.sentence(rng), rng.choice(FILLERS)))
        known.append(kind)
        if rng.random() < 0.3:
            events.append(_recall(facts, rng.choice(known)))
        cost = sum(measure(q) + measure(a) + 10 for q, a in events)
        if used + cost > tokens - 4 * TURN_TOKENS and used:
            known.pop()
            break
        used += cost
        messages += [message for q, a in events for message in (user(q), assistant(a))]
    kind = rng.choice(known)
    question, reply = _recall(facts, kind)
    return _sample(rng, "turns", [*messages, user(question)], reply, f"I look for your {kind}.")


def _number(rng: Random, held: bool, kind: str) -> str:
    while True:
        drawn = str(rng.randrange(10, 10000))
        if w.held_out(f"{kind} {drawn}") == held:
            return drawn


def _recall(facts: dict[str, str], kind: str) -> tuple[str, str]:
    if kind in PETS:
        return f"What is my {kind} called?", f"Your {kind} is called {facts[kind]}."
    return f"What is my {kind} number?", f"Your {kind} number is {facts[kind]}."


def tool_call(rng: Random, held: bool, measure: Measure, tokens: int) -> Sample:
    """Schemas of one to three tools in the system turn, a request, and the call that serves it."""
    chosen = rng.sample(calls.TOOLS, rng.randint(1, 3))
    drawn = [calls.draw(rng, tool, held) for tool in chosen]
    names = {call.name for call in drawn}
    right = rng.choice(drawn)
    schemas = [call.schema for call in drawn] if len(names) == len(drawn) else [right.schema]
    return _sample(rng, "tool_call", [user(right.sentence)], calls.call_text(right.name, right.arguments),
                   f"I call {right.name}.", expected=(right.name, right.arguments), tools=schemas)


TASKS: dict[str, Callable[[Random, bool, Measure, int], Sample]] = {
    "needle": needle, "copying": copying, "arithmetic": arithmetic, "turns": turns, "tool_call": tool_call,
}


def reply_of(sample: Sample, text: str) -> str | None:
    """The reply in a generated text, without its reasoning; None when the reasoning never ends."""
    if not sample.thinking:
        return text.strip()
    _, closed, reply = text.partition(chat.THINK_CLOSE)
    return reply.strip() if closed else None


def check(sample: Sample, text: str) -> bool:
    """Whether `text`, generated after the prompt, gives the right answer (reasoning may be worded differently)."""
    reply = reply_of(sample, text)
    if reply is None:
        return False
    if sample.task == "needle":
        name, code = sample.expected
        return name in reply and re.findall(r"\d+", reply) == [code]
    if sample.task != "tool_call":
        return reply == sample.expected
    content, found = chat.parse_tool_calls(reply, sample.tools)
    if content or len(found) != 1:
        return False
    schema = next((t for t in sample.tools or [] if t["function"]["name"] == found[0].name), None)
    return (schema is not None and calls.fits_schema(found[0].arguments, schema)
            and (found[0].name, found[0].arguments) == sample.expected)


class Encoder:
    """Samples to ids, through the engine's own chat template, tokenizer and preparation of images."""

    def __init__(self, files: dict[str, bytes], vocab_size: int, images: QwenImages) -> None:
        self.tokenizer = Tokenizer.from_bytes(files, vocab_size)
        self.template = chat.find_template(files)
        self.settings = images
        self.end = self.tokenizer.id_of("<|im_end|>")
        self.image_token = self.tokenizer.id_of("<|image_pad|>")
        self._start = self.tokenizer.id_of("<|im_start|>")
        self._role = self.tokenizer.encode("assistant\n")
        self._prepared: tuple[Sample | None, list[PreparedImage]] = None, []

    @classmethod
    def from_directory(cls, path: Path) -> Encoder:
        """Of a checkpoint directory."""
        files = {name: (path / name).read_bytes()
                 for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")}
        raw, images = (json.loads((path / name).read_text(encoding="utf-8"))
                       for name in ("config.json", "preprocessor_config.json"))
        vision = VisionConfig.from_hf(raw, raw["text_config"]["hidden_size"], images)
        return cls(files, raw["text_config"]["vocab_size"], vision.images)

    def measure(self, text: str) -> int:
        """Tokens of a plain text."""
        return len(self.tokenizer.encode(text))

    def images(self, sample: Sample) -> list[PreparedImage]:
        """The sample's pictures, drawn and prepared; the last sample's are kept."""
        if self._prepared[0] is not sample:
            self._prepared = sample, [prepare(view.pixels(), self.settings) for view in sample.images]
        return self._prepared[1]

    def prompt(self, sample: Sample) -> list[int]:
        """Ids up to and including the generation prompt, each image as the tokens that it takes."""
        ids = chat.encode(self.tokenizer, self.template, sample.messages, tools=sample.tools,
                          enable_thinking=sample.thinking)
        if not sample.images:
            return ids
        texts = [placeholder(image, self.settings, i) for i, image in enumerate(self.images(sample))]
        return expand(ids, self.image_token, [self.tokenizer.encode(text) for text in texts])

    def answer(self, sample: Sample) -> list[int]:
        """Ids that a right model generates, the end of the turn included."""
        return [*self.tokenizer.encode(sample.answer), self.end]

    def marked(self, sample: Sample) -> tuple[list[int], list[bool]]:
        """Ids of prompt and answer, and which of them the model is to learn: all that assistants say."""
        prompt, answer = self.prompt(sample), self.answer(sample)
        ids, said = prompt + answer, [False] * len(prompt) + [True] * len(answer)
        for begin, end in self._earlier_answers(prompt):
            said[begin:end] = [True] * (end - begin)
        return ids, said

    def _earlier_answers(self, prompt: list[int]) -> Iterator[tuple[int, int]]:
        width = len(self._role)
        starts = [i + 1 for i, token in enumerate(prompt) if token == self._start]
        for start in starts:
            if prompt[start : start + width] == self._role and self.end in prompt[start:]:
                yield start + width, prompt.index(self.end, start) + 1


def drawn(task: str, split: str, seed: int, index: int, measure: Measure, tokens: int) -> Sample:
    """Sample `index` of a task: `split` 'train' or 'held'; the same arguments give the same sample."""
    return TASKS[task](Random(f"{split} {task} {seed} {index} {tokens}"), split == "held", measure, tokens)


def drawn_row(split: str, seed: int, index: int, measure: Measure, tokens: int) -> list[Sample]:
    """Row `index` of needles at all DEPTHS of one context."""
    return needle_row(Random(f"{split} row {seed} {index} {tokens}"), split == "held", measure, tokens)
