"""`fermi-engine generate`: prompts, token ids and chats on the terminal; text goes out as it comes."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fermi_engine import chat, report
from fermi_engine.config import MOST_THREADS, EngineConfig
from fermi_engine.engine import Engine
from fermi_engine.errors import FermiError, RequestError
from fermi_engine.generate import Finish, Piece, Stream
from fermi_engine.kernels.threads import describe
from fermi_engine.sampling import SamplingParams
from fermi_engine.timeline import Timeline
from fermi_engine.tokenizer import json_object

UNITS = {"": 1, "B": 1, **{f"{prefix}B": 1000**n for n, prefix in enumerate("kMGT", 1)},
         **{f"{prefix}iB": 1024**n for n, prefix in enumerate("KMGT", 1)}}
BYTES = re.compile(rf"(\d{{1,15}}(?:\.\d{{1,9}})?) ?({'|'.join(UNITS)})")
ID_DIGITS = 18  # more than any vocabulary needs, and few enough for an int64


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


def run(request: Request) -> None:
    """Load the model and serve the request. Raises FermiError."""
    _check(request)
    SamplingParams(**{name: value for name, value in request.sampling.items() if value is not None})
    tools = None if request.tools is None else _read_tools(request.tools)
    ids = None if request.ids is None else parse_ids(request.ids)
    start = time.perf_counter()
    with report.progress("loading") as progress:
        engine = Engine.load(request.model, request.format, config=request.options, progress=progress)
    engine.prefetch(request.parsed)
    report.note(status_line(engine) + (f", loaded in {time.perf_counter() - start:.2f} s" if request.timing else ""))
    writer = _Writer(request.show_reasoning)
    talk = Conversation(engine, request, tools)
    if request.chat:
        _chat(talk, writer)
    elif ids is not None:
        talk.answer(ids, writer, as_ids=True)
    else:
        _note_finish(talk.say(_stdin() if request.prompt == "-" else request.prompt, writer), writer)


def status_line(engine: Engine) -> str:
    """Model type, format, bytes of the pack and where they lie, backends and threads, in one line."""
    backends = "+".join(sorted(set(engine.kernels.backends.values()), reverse=True))
    options = engine.options
    threads = describe(min(engine.kernels.threads, MOST_THREADS), hyper_threads=options.hyper_threads, pin=options.pin)
    return (f"{engine.config.model_type}, {engine.pack.default_format}, {report.size(engine.pack.info()['bytes'])} "
            f"{engine.pack.placed}, {backends}, {threads}")


def parse_ids(text: str) -> list[int]:
    """`1,2,3` (or with spaces) as token ids."""
    words = text.replace(",", " ").split()
    if not words:
        raise RequestError("--ids holds no token ids; give whole numbers such as 1,2,3")
    wrong = next((word for word in words if not word.isdecimal() or len(word) > ID_DIGITS), None)
    if wrong is not None:
        raise RequestError(f"--ids: {report.quoted(wrong)} is not a token id; give whole numbers such as 1,2,3")
    return [int(word) for word in words]


def parse_bias(items: Sequence[str]) -> dict[int, float] | None:
    """`ID=VALUE` items as a logit bias, None without any."""
    bias = {}
    for item in items:
        token, _, value = item.partition("=")
        try:
            if len(token) > ID_DIGITS:
                raise ValueError
            bias[int(token)] = float(value)
        except ValueError:
            raise RequestError(f"--logit-bias {report.quoted(item)} is not of the form ID=VALUE, "
                               "for example 42=-5") from None
    return bias or None


def parse_bytes(option: str, text: str | None) -> int | None:
    """`6GiB`, `500MB` or a whole number of bytes; None without any. RequestError for anything else."""
    if text is None:
        return None
    found = BYTES.fullmatch(text.strip())
    count = int(float(found[1]) * UNITS[found[2]]) if found else 0
    if not count:
        raise RequestError(f"{option} {report.quoted(text)} is not a size; give for example 6GiB, 500MB or a number of bytes")
    return count


def parse_budget(option: str, text: str | None) -> int | None:
    """The same, and 0 for nothing at all."""
    return 0 if text is not None and text.strip() == "0" else parse_bytes(option, text)


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

    def say(self, text: str, writer: _Writer) -> Finish:
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

    def answer(self, ids: list[int], writer: _Writer, reasoning_open: bool = False, as_ids: bool = False) -> Finish:
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


class _Writer:
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


def _chat(talk: Conversation, writer: _Writer) -> None:
    interactive = sys.stdin.isatty()
    for line in _lines(interactive and sys.stdout.isatty()):
        command = line.strip()
        if command == "/quit":
            return
        if command == "/reset":
            talk.reset()
        elif command:
            try:
                _note_finish(talk.say(line, writer), writer)
            except FermiError as err:
                if not interactive:
                    raise
                report.note(f"error: {err}")


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise RequestError(f"cannot read standard input: {err.strerror or err}; give the text as a file or a pipe, or "
                           "with --prompt") from None


def _stdin() -> str:
    with _reading():
        return sys.stdin.read()


def _lines(prompted: bool) -> Iterator[str]:
    """Lines of stdin without their ends; with a prompt and line editing on a terminal."""
    if not prompted:
        with _reading():
            for line in sys.stdin:
                yield line.rstrip("\r\n")
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing
    report.note("/reset forgets the conversation, /quit ends it")
    with suppress(EOFError):
        while True:
            try:
                line = input("> ")
            except KeyboardInterrupt:
                print()  # what is said next begins a line of its own
                raise
            yield line


def _note_finish(finish: Finish, writer: _Writer) -> None:
    """Say why there is no answer, where all tokens went into reasoning that was not shown."""
    if writer.reasoning and not (writer.answer or writer.show_reasoning):
        longer = ", or raise --max-tokens" if finish.reason == "length" else ""
        report.note(f"no answer: all {finish.completion_tokens} tokens went into reasoning (finish: {finish.reason}); "
                    f"see it with --show-reasoning, or use --no-think{longer}")


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


def _check(request: Request) -> None:
    given = [name for name, value in (("--prompt", request.prompt is not None), ("--chat", request.chat),
                                      ("--ids", request.ids is not None)) if value]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise RequestError(f"give exactly one of --prompt, --chat and --ids; found {found}")
    rendered = [name for name, value in (("--system", request.system), ("--tools", request.tools),
                                         ("--think/--no-think", request.think)) if value is not None]
    plain = "--ids" if request.ids is not None else "--raw" if request.raw else None
    if plain and rendered:
        raise RequestError(f"{rendered[0]} needs the chat template, which {plain} leaves out; drop one of them")
    if request.raw and request.chat:
        raise RequestError("--chat needs the chat template, which --raw leaves out; drop one of them")


def _read_tools(path: Path) -> list[dict[str, Any]]:
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise RequestError(f"cannot read {path}: {err.strerror}; give a JSON file with a list of tool "
                           "descriptions") from None
    except (ValueError, RecursionError) as err:
        raise RequestError(f"{path} is not JSON ({err}); give a list of tool descriptions") from None
    if not isinstance(tools, list):
        raise RequestError(f"{path} holds a JSON {type(tools).__name__}, expected a list of tool descriptions")
    return tools
