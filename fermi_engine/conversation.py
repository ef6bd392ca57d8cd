"""A conversation on the terminal: messages so far, the timeline they run on, and the answers as they come."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fermi_engine import chat, report
from fermi_engine.config import EngineConfig
from fermi_engine.engine import Engine
from fermi_engine.generate import Finish, Piece, Stream
from fermi_engine.sampling import SamplingParams
from fermi_engine.timeline import Timeline
from fermi_engine.tokenizer import json_object


@dataclass
class Request:
    """What the command line asked for. Exactly one of `prompt`, `chat`, `ids` is set; `sampling` holds the
    SamplingParams fields that were given, None where the model's own setting counts."""

    model: Path
    prompt: str | None = None
    chat: bool = False
    ids: str | None = None
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


class Conversation:
    """Messages so far and the timeline they run on."""

    def __init__(self, engine: Engine, request: Request, tools: list[dict[str, Any]] | None) -> None:
        self.engine, self.request, self.tools = engine, request, tools
        files = engine.pack.files()
        settings = json_object(files, "generation_config.json")
        self.params = SamplingParams.from_generation_config(settings, **request.sampling)
        self.timeline = Timeline(engine)
        self.template: str | None = None
        if request.ids is None and not request.raw:
            self.template = self._find_template(files)
            self.extra = chat.special_tokens(files)
        self.reset()

    def _find_template(self, files: dict[str, bytes]) -> str | None:
        asked = self.request.chat or self.request.system is not None or self.tools is not None \
            or self.request.think is not None
        has_one = "chat_template.jinja" in files or "chat_template" in json_object(files, "tokenizer_config.json")
        return chat.find_template(files) if has_one or asked else None

    def reset(self) -> None:
        """Forget all turns but the system message."""
        system = self.request.system
        self.messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]

    def say(self, text: str, writer: Writer) -> Finish:
        """One user turn and its answer, which joins the messages; without a template, one raw completion."""
        if self.template is None:
            return self.answer(self.engine.tokenizer.encode(text), writer)
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = self._encode(asked, add_generation_prompt=True)
        if self.request.chat:
            shared = self._encode(asked, add_generation_prompt=False)
            self.timeline.mark = len(shared) if ids[: len(shared)] == shared else None
        is_open = chat.reasoning_is_open(self.engine.tokenizer.decode(ids))
        finish = self.answer(ids, writer, reasoning_open=is_open)
        reply = {"role": "assistant", "content": writer.answer}
        if writer.reasoning:
            reply["reasoning_content"] = writer.reasoning
        self.messages = [*asked, reply]
        return finish

    def answer(self, ids: list[int], writer: Writer, reasoning_open: bool = False, as_ids: bool = False) -> Finish:
        """Stream the continuation of `ids` to the writer."""
        self.timeline.begin()
        clock, gpu = self.engine.kernels.clock, self.engine.gpu
        if self.request.timing:
            clock.start()
            if gpu is not None:
                gpu.timing = True
        start = time.perf_counter()
        stream = self.engine.generate(ids, self.params, session=self.timeline, reasoning_open=reasoning_open)
        finish = writer.write(stream, as_ids)
        if self.request.timing:
            report.note(_timing(self.timeline, finish, time.perf_counter() - start))
            report.note(_shares(*clock.stop()))
            if self.engine.snapshots is not None:
                report.note(self.engine.snapshots.line(self.timeline.promise))
            if gpu is not None and gpu.prefill is not None and gpu.prefill.last is not None:
                report.note(gpu.prefill.last.line())
        return finish

    def _encode(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> list[int]:
        return chat.encode(self.engine.tokenizer, self.template, messages, tools=self.tools, extra=self.extra,
                           enable_thinking=self.request.think, add_generation_prompt=add_generation_prompt)


class Writer:
    """Puts a stream on stdout as it comes, and remembers the answer and the reasoning."""

    def __init__(self, show_reasoning: bool) -> None:
        self.show_reasoning = show_reasoning
        self.answer = self.reasoning = ""

    def write(self, stream: Stream, as_ids: bool) -> Finish:
        """Write all pieces and end the line, also when the stream breaks off."""
        self.answer = self.reasoning = ""
        self._is_open = False
        wrote = False
        try:
            for piece in stream:
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
