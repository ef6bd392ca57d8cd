"""A conversation on the terminal: messages so far, the timeline they run on, and the answers as they come."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fermi_engine import chat, report
from fermi_engine.config import EngineConfig
from fermi_engine.engine import Engine
from fermi_engine.errors import RequestError
from fermi_engine.generate import Finish, Piece, Stream
from fermi_engine.sampling import SamplingParams
from fermi_engine.snapshots.named_session import NamedSession, Record
from fermi_engine.timeline import Timeline
from fermi_engine.tokenizer import json_object
from fermi_engine.vision.patches import PreparedImage


@dataclass
class Request:
    """What the command line asked for. One of `prompt`, `chat`, `ids` is set, none where the last answer of a `session` goes
    on; `sampling` holds the SamplingParams fields that were given, None where the model's own setting counts."""

    model: Path
    prompt: str | None = None
    chat: bool = False
    ids: str | None = None
    images: tuple[Path, ...] = ()
    system: str | None = None
    tools: Path | None = None
    think: bool | None = None
    show_reasoning: bool = False
    raw: bool = False
    timing: bool = False
    format: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    options: EngineConfig = field(default_factory=EngineConfig)
    parsed: Future[Any] | None = None  # the tokenizer to come, see tokenizer_ahead
    session: str | None = None


@dataclass(frozen=True)
class Shown:
    """An image of a conversation, and the number of the message that shows it."""

    file: Path
    image: PreparedImage
    message: int


class Conversation:
    """Messages so far, all of them text, the images before them, and the timeline they run on. ids: all tokens up to the end of
    the last answer."""

    def __init__(self, engine: Engine, request: Request, tools: list[dict[str, Any]] | None,
                 named: NamedSession | None = None) -> None:
        """named: where it goes on and is kept. RequestError where the request does not fit what was said there."""
        self.engine, self.request, self.tools, self.named = engine, request, tools, named
        files = engine.pack.files()
        settings = json_object(files, "generation_config.json")
        self.params = SamplingParams.from_generation_config(settings, **request.sampling)
        self.timeline = Timeline(engine)
        self._given = [(path.absolute(), engine.vision.prepare(path)) for path in request.images]
        self.template: str | None = None
        self.ids: list[int] = []
        self.system = request.system
        self.reset()
        record = None if named is None else named.record
        if record is not None:
            self._go_back_to(record)
        goes_on = record is not None and request.prompt is None and not request.chat
        if request.ids is None and not request.raw and not (goes_on and record.messages is None):
            self.template = self._find_template(files)
            self.extra = chat.special_tokens(files)
        if record is not None and (record.messages is None) != (self.template is None):
            kind, remedy = ("tokens", "--ids or --raw") if record.messages is None else ("messages", "--prompt or --chat")
            raise RequestError(f"session {named.name!r} is made of {kind}; continue it with {remedy}, or choose another name")

    def _find_template(self, files: dict[str, bytes]) -> str | None:
        asked = self.request.chat or self.request.system is not None or self.tools is not None \
            or self.request.think is not None
        has_one = "chat_template.jinja" in files or "chat_template" in json_object(files, "tokenizer_config.json")
        return chat.find_template(files) if has_one or asked else None

    def reset(self) -> None:
        """Forget all turns but the system message; the images of the command line are shown again."""
        self.messages: list[dict[str, Any]] = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.ids = []
        self.shown: list[Shown] = []
        self._waiting = list(self._given)

    def _go_back_to(self, record: Record) -> None:
        """Stand where a session stands."""
        system = next((message["content"] for message in record.messages or () if message["role"] == "system"), None)
        for option, given, kept in (("--system", self.system, system), ("--tools", self.tools, record.tools)):
            if given is not None and given != kept:
                raise RequestError(f"{option} is not that of session {self.named.name!r}; leave it out or choose another name")
        self.system = system
        self.messages, self.tools, self.ids = record.messages or [], record.tools, record.ids
        self.shown = [self._shown_again(**one) for one in record.images]

    def _shown_again(self, file: str, digest: str, message: int) -> Shown:
        image = self.engine.vision.prepare(file)
        if image.digest.hex() != digest:
            raise RequestError(f"session {self.named.name!r} shows {file}, which has changed since; put the old file back or "
                               "choose another name")
        return Shown(Path(file), image, message)

    def say(self, text: str, writer: Writer) -> Finish:
        """One user turn, which shows the images that wait, and its answer, which joins the messages; without a template, one raw
        completion."""
        new = [Shown(file, image, len(self.messages)) for file, image in self._waiting]
        shown = [*self.shown, *new]
        if self.template is None:
            ids = self.engine.tokenizer.encode((self.engine.vision.marker * len(new) if new else "") + text)
            return self.continued(self._filled(ids, new), writer, shown=shown)
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = self._encode(asked, shown, add_generation_prompt=True)
        if self.request.chat or self.named is not None:
            shared = self._encode(asked, shown, add_generation_prompt=False)
            self.timeline.mark = len(shared) if ids[: len(shared)] == shared else None
        is_open = chat.reasoning_is_open(self.engine.tokenizer.decode(ids))
        finish = self._answer(ids, shown, writer, reasoning_open=is_open)
        self.messages = [*asked, _reply(writer.answer, writer.reasoning)]
        self._keep()
        return finish

    def continued(self, ids: list[int], writer: Writer, as_ids: bool = False, shown: list[Shown] | None = None) -> Finish:
        """Tokens after those so far, and what follows them. shown: all images there, None for those so far."""
        finish = self._answer([*self.ids, *ids], self.shown if shown is None else shown, writer, as_ids=as_ids)
        self._keep()
        return finish

    def go_on(self, writer: Writer) -> Finish:
        """The last answer goes on where it stopped."""
        if self.template is None:
            return self.continued([], writer, as_ids=not self.engine.has_tokenizer)
        is_open = chat.reasoning_is_open(self.engine.tokenizer.decode(self.ids))
        finish = self._answer(self.ids, self.shown, writer, reasoning_open=is_open)
        last = self.messages[-1]
        reply = _reply(last["content"] + writer.answer, last.get("reasoning_content", "") + writer.reasoning)
        self.messages = [*self.messages[:-1], reply]
        self._keep()
        return finish

    def _keep(self) -> None:
        """Have the session of that name stand here."""
        if self.named is not None:
            is_chat = self.template is not None
            images = [{"file": str(one.file), "digest": one.image.digest.hex(), "message": one.message} for one in self.shown]
            record = Record(self.ids, self.messages if is_chat else None, self.tools if is_chat else None, images)
            snapshot = replace(self.timeline.session.snapshot(), logits=self.timeline.logits, kind="answer")
            self.named.save(snapshot, record)

    def _answer(self, ids: list[int], shown: list[Shown], writer: Writer, reasoning_open: bool = False,
                as_ids: bool = False) -> Finish:
        """Stream the continuation of `ids` to the writer. shown: the images among them."""
        self.timeline.begin()
        self.timeline.images = tuple(one.image for one in shown)
        clock, gpu = self.engine.kernels.clock, self.engine.gpu
        if self.request.timing:
            clock.start()
            if gpu is not None:
                gpu.timing = True
        start = time.perf_counter()
        stream = self.engine.generate(ids, self.params, session=self.timeline, reasoning_open=reasoning_open)
        finish = writer.write(stream, as_ids)
        self.ids, self.shown, self._waiting = [*ids, *writer.ids], shown, []
        if self.request.timing:
            report.note(_timing(self.timeline, finish, time.perf_counter() - start))
            report.note(_shares(*clock.stop()))
            if shown and self.engine.vision.encoded.images:
                report.note(self.engine.vision.encoded.line())
            if self.engine.snapshots is not None:
                report.note(self.engine.snapshots.line(self.timeline.promise))
            if self.engine.disk is not None:
                report.note(self.engine.disk.line())
            if gpu is not None and gpu.prefill is not None and gpu.prefill.last is not None:
                report.note(gpu.prefill.last.line())
            if self.engine.is_resident:
                report.note(self.engine.resident.line())
        return finish

    def _encode(self, messages: list[dict[str, Any]], shown: list[Shown], add_generation_prompt: bool) -> list[int]:
        ids = chat.encode(self.engine.tokenizer, self.template, _with_places(messages, shown), tools=self.tools, extra=self.extra,
                          enable_thinking=self.request.think, add_generation_prompt=add_generation_prompt)
        return self._filled(ids, shown)

    def _filled(self, ids: list[int], shown: list[Shown]) -> list[int]:
        """With the tokens that each image takes."""
        return self.engine.vision.expand(self.engine.tokenizer, ids, [one.image for one in shown]) if shown else ids


def _with_places(messages: list[dict[str, Any]], shown: list[Shown]) -> list[dict[str, Any]]:
    """Messages as a template takes them: images before the text."""
    places = Counter(one.message for one in shown)
    return [{**message, "content": [{"type": "image"}] * places[i] + [{"type": "text", "text": message["content"]}]}
            if places[i] else message for i, message in enumerate(messages)]


def _reply(answer: str, reasoning: str) -> dict[str, Any]:
    return {"role": "assistant", "content": answer, **({"reasoning_content": reasoning} if reasoning else {})}


class Writer:
    """Puts a stream on stdout as it comes, and remembers its tokens, the answer and the reasoning."""

    def __init__(self, show_reasoning: bool) -> None:
        self.show_reasoning = show_reasoning
        self.answer = self.reasoning = ""
        self.ids: list[int] = []

    def write(self, stream: Stream, as_ids: bool) -> Finish:
        """Write all pieces and end the line, also when the stream breaks off."""
        self.answer, self.reasoning, self.ids = "", "", []
        self._is_open = False
        wrote = False
        try:
            for piece in stream:
                self.ids += [] if piece.id is None else [piece.id]
                text = self._id(piece, wrote) if as_ids else self._text(piece)
                if text:
                    sys.stdout.write(text)
                    sys.stdout.flush()
                    wrote = True
        finally:
            if wrote:
                print(flush=True)
        return stream.finish

    def _id(self, piece: Piece, wrote: bool) -> str:
        return "" if piece.id is None else f",{piece.id}" if wrote else str(piece.id)

    def _text(self, piece: Piece) -> str:
        self.answer += piece.text
        self.reasoning += piece.reasoning
        if not self.show_reasoning:
            return piece.text
        text = ""
        if piece.reasoning and not self._is_open:
            text, self._is_open = chat.THINK_OPEN, True
        text += piece.reasoning
        if piece.text and self._is_open:
            text, self._is_open = text + chat.THINK_CLOSE, False
        return text + piece.text


def _timing(timeline: Timeline, finish: Finish, total_s: float) -> str:
    decode_s = total_s - timeline.prefill_s
    return (f"prefill {timeline.evaluated} of {finish.prompt_tokens} tokens, "
            f"{report.rate(timeline.evaluated, timeline.prefill_s)} | decode {timeline.decoded} tokens, "
            f"{report.rate(timeline.decoded, decode_s)} | finish: {finish.reason}")


def _shares(seconds: Mapping[str, float], wall_s: float) -> str:
    """Where the time went: every op of at least one percent, the other ops, and what is outside of ops; parts add up."""
    shown = {op: s for op, s in seconds.items() if s >= 0.01 * wall_s}
    rest = {"other ops": sum(seconds.values()) - sum(shown.values()), "Python and sampling": wall_s - sum(seconds.values())}
    parts = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in {**shown, **rest}.items())
    return f"{1e3 * wall_s:.1f} ms: {parts}"
