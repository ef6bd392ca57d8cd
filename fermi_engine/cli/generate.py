"""`fermi-engine generate`: prompts, token ids and chats on the terminal; text goes out as it comes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fermi_engine import report
from fermi_engine.config import MOST_THREADS
from fermi_engine.conversation import Conversation, Request, Writer
from fermi_engine.engine import Engine
from fermi_engine.errors import FermiError, RequestError, SnapshotError
from fermi_engine.generate import Finish
from fermi_engine.kernels.threads import describe
from fermi_engine.sampling import SamplingParams
from fermi_engine.snapshots import named_session
from fermi_engine.snapshots.named_session import NamedSession

ID_DIGITS = 18  # more than any vocabulary needs, and few enough for an int64


def run(request: Request) -> None:
    """Load the model and serve the request. Raises FermiError."""
    _check(request)
    options = request.options
    if request.session is not None:
        named_session.check_name(request.session)
        options = replace(options, snapshot_dir=options.snapshot_dir or named_session.default_directory())
    SamplingParams(**{name: value for name, value in request.sampling.items() if value is not None})
    tools = None if request.tools is None else _read_tools(request.tools)
    ids = None if request.ids is None else parse_ids(request.ids)
    start = time.perf_counter()
    with report.progress("loading") as progress:
        engine = Engine.load(request.model, request.format, config=options, progress=progress)
    engine.prefetch(request.parsed)
    report.note(status_line(engine) + (f", loaded in {time.perf_counter() - start:.2f} s" if request.timing else ""))
    with _kept(engine, request.session) as named:
        _serve(Conversation(engine, request, tools, named), request, ids)


@contextmanager
def _kept(engine: Engine, name: str | None) -> Iterator[NamedSession | None]:
    """The session of that name while it is continued; at the end all that is to outlive the process is on disk."""
    named = None if name is None else NamedSession(engine.disk, name)
    try:
        yield named
    except BaseException:
        if named is not None:
            with suppress(SnapshotError):  # what went wrong first is told
                named.close()
        raise
    if named is not None:
        named.close()
    if engine.disk is not None:
        engine.disk.flush()


def _serve(talk: Conversation, request: Request, ids: list[int] | None) -> None:
    writer = Writer(request.show_reasoning)
    if request.chat:
        _chat(talk, writer)
    elif ids is not None:
        talk.continued(ids, writer, as_ids=True)
    elif request.prompt is not None:
        _note_finish(talk.say(_stdin() if request.prompt == "-" else request.prompt, writer), writer)
    elif talk.ids:
        _note_finish(talk.go_on(writer), writer)
    else:
        raise RequestError(f"session {request.session!r} has said nothing yet that could go on; give --prompt, --chat or --ids")


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


def _chat(talk: Conversation, writer: Writer) -> None:
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


def _note_finish(finish: Finish, writer: Writer) -> None:
    """Say why there is no answer, where all tokens went into reasoning that was not shown."""
    if writer.reasoning and not (writer.answer or writer.show_reasoning):
        longer = ", or raise --max-tokens" if finish.reason == "length" else ""
        report.note(f"no answer: all {finish.completion_tokens} tokens went into reasoning (finish: {finish.reason}); "
                    f"see it with --show-reasoning, or use --no-think{longer}")


def _check(request: Request) -> None:
    given = [name for name, value in (("--prompt", request.prompt is not None), ("--chat", request.chat),
                                      ("--ids", request.ids is not None)) if value]
    if len(given) != 1 and (given or request.session is None):
        found = " and ".join(given) or "none of them"
        raise RequestError(f"give exactly one of --prompt, --chat and --ids; found {found}")
    rendered = [name for name, value in (("--system", request.system), ("--tools", request.tools),
                                         ("--think/--no-think", request.think)) if value is not None]
    plain = "--ids" if request.ids is not None else "--raw" if request.raw else None
    if plain and rendered:
        raise RequestError(f"{rendered[0]} needs the chat template, which {plain} leaves out; drop one of them")
    if request.images and given not in (["--prompt"], ["--chat"]):
        found = given[0] if given else "none"
        raise RequestError(f"--image needs a prompt that it is shown before, found {found}; use --prompt or --chat")
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
