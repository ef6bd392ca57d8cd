"""Chats to prompt text and back: the checkpoint's template in a sandbox, reasoning split from answers, tool calls."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fermi_engine.errors import RequestError, TokenizerError
from fermi_engine.tokenizer import Tokenizer, json_object, one_line, token_text

ROLES = ("system", "user", "assistant", "tool")
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_TURN_START = "<|im_start|>"
_FUNCTION = re.compile(r"<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
_PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_FUNCTION_END = re.compile(r"\s*</function>")
_CALL_START = re.compile(r"<tool_call>\s*")
_CALL_END = re.compile(r"\s*</tool_call>")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def find_template(files: Mapping[str, bytes]) -> str:
    """The chat template among a checkpoint's files: chat_template.jinja, else tokenizer_config.json's.

    Of a list of named templates the one called "default" is taken. Raises TokenizerError when there is none.
    """
    if "chat_template.jinja" in files:
        try:
            return files["chat_template.jinja"].decode("utf-8")
        except UnicodeDecodeError as err:
            raise TokenizerError(f"chat_template.jinja is damaged (not UTF-8 at byte {err.start}); "
                                 "fetch the file again") from None
    template = json_object(files, "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        if "default" not in named:
            raise TokenizerError(f"tokenizer_config.json has chat templates {sorted(map(str, named))} but none called "
                                 "'default'; add chat_template.jinja to the checkpoint")
        template = named["default"]
    if not isinstance(template, str):
        raise TokenizerError("the model carries no chat template (looked for chat_template.jinja and 'chat_template' "
                             "in tokenizer_config.json); add one or send a plain prompt")
    return template


def special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """Variables such as `bos_token` that templates expect, from tokenizer_config.json; pass them as `extra`."""
    config = json_object(files, "tokenizer_config.json")
    texts = {name: token_text(config.get(name)) for name in _SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def render(template: str, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
           enable_thinking: bool | None = True, add_generation_prompt: bool = True,
           extra: Mapping[str, Any] | None = None) -> str:
    """Prompt text of a chat, equal to transformers' apply_chat_template on the same template.

    `enable_thinking=None` leaves the variable undefined; `extra` holds further template variables.
    Raises RequestError for malformed messages or tools and for what the template itself refuses, TokenizerError
    for a template that is broken or reaches for what the sandbox forbids.
    """
    compiled = _compile(template)
    variables = {**_plain(extra or {}, "extra"), "messages": checked_messages(messages), "tools": _checked_tools(tools),
                 "documents": None, "add_generation_prompt": add_generation_prompt}
    if enable_thinking is not None:
        variables["enable_thinking"] = enable_thinking
    return _rendered(compiled, variables)


def encode(tokenizer: Tokenizer, template: str, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """Prompt ids of a chat (`options` as in `render`); control tokens spelt out in messages and tools stay text.

    An image part {"type": "image"} becomes whatever the template writes for it, one image token among it (vision.Vision.expand).
    """
    if options.get("tools") is not None:
        options["tools"] = _shielded(_checked_tools(options["tools"]), tokenizer)
    return tokenizer.encode_shielded(render(template, _shielded(checked_messages(messages), tokenizer), **options))


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as plain JSON values without null fields; raises RequestError naming what is malformed.

    `content` is text or a list of parts, text or images (it may be missing beside tool calls). Reasoning is offered under both
    names that templates read, `reasoning_content` and `thinking`, whichever name it came by.
    """
    if not isinstance(messages, list) or not messages:
        found = "an empty list" if messages == [] else type(messages).__name__
        raise RequestError(f"messages is {found}, expected a list of at least one message")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def reasoning_is_open(prompt: str) -> bool:
    """Whether a rendered prompt ends inside `<think>`: looks at the turn being generated only."""
    turn = prompt[prompt.rfind(_TURN_START) + 1:]
    return turn.rfind(THINK_OPEN) > turn.rfind(THINK_CLOSE)


class ReasoningSplitter:
    """Splits streamed text into ('reasoning', text) and ('answer', text) at the think tags, which are dropped.

    `is_open` says that the prompt ended inside `<think>`. Otherwise a block opens only while the answer is still
    blank. There is one block: think tags after it, or after the answer has begun, are text of the answer. A block
    never closed is reasoning to the end. Only what may be the start of a tag is held back; nothing is lost.
    """

    def __init__(self, is_open: bool = False) -> None:
        self._tag: str | None = THINK_CLOSE if is_open else THINK_OPEN  # the tag waited for; None: no more
        self._held = ""

    def push(self, text: str) -> list[tuple[str, str]]:
        """Events for the next piece of text, in order and without empty ones."""
        text, self._held = self._held + text, ""
        events = []
        if self._tag == THINK_OPEN:
            blank, text = self._opened(text)
            events.append(("answer", blank))
        if self._tag == THINK_CLOSE:
            reasoning, text = self._closed(text)
            events.append(("reasoning", reasoning))
        events.append(("answer", text))
        return [event for event in events if event[1]]

    def flush(self) -> list[tuple[str, str]]:
        """What was held back, at the end of the stream."""
        held, self._held = self._held, ""
        return [("reasoning" if self._tag == THINK_CLOSE else "answer", held)] if held else []

    def _opened(self, text: str) -> tuple[str, str]:
        """(blank before a possible block, text to go on with)"""
        rest = text.lstrip()
        blank = text[:len(text) - len(rest)]
        if rest.startswith(THINK_OPEN):
            self._tag = THINK_CLOSE
            return blank, rest[len(THINK_OPEN):]
        if THINK_OPEN.startswith(rest):
            self._held = rest
            return blank, ""
        self._tag = None
        return "", text

    def _closed(self, text: str) -> tuple[str, str]:
        """(reasoning, answer after it)"""
        reasoning, found, answer = text.partition(THINK_CLOSE)
        if found:
            self._tag = None
            return reasoning, answer
        cut = len(text) - _overlap(text, THINK_CLOSE)
        self._held = text[cut:]
        return text[:cut], ""


@dataclass(frozen=True)
class ToolCall:
    """One call the model asks for; argument values are JSON values."""

    name: str
    arguments: dict[str, Any]


def parse_tool_calls(text: str, tools: list[dict[str, Any]] | None = None) -> tuple[str, list[ToolCall]]:
    """Split an answer into its content and its tool calls, in order; malformed calls stay in the content.

    Two forms are read between `<tool_call>` and `</tool_call>`: `<function=name>` with `<parameter=key>` blocks, and
    a JSON object of `name` and `arguments`. Parameter blocks carry text; it is read as JSON where `tools` declares a
    type other than string for that parameter. Blank space at the ends of the content goes when calls are taken out.
    """
    types = _parameter_types(tools or [])
    calls: list[ToolCall] = []
    kept: list[str] = []
    start = 0
    for opening in _CALL_START.finditer(text):
        found = _call_at(text, opening.end(), types) if opening.start() >= start else None
        if found is not None:
            call, end = found
            kept.append(text[start:opening.start()])
            calls.append(call)
            start = end
    kept.append(text[start:])
    return ("".join(kept).strip() if calls else text), calls


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    try:
        import jinja2
    except ImportError:
        raise TokenizerError("chats need the 'jinja2' package: pip install jinja2, or send a plain prompt") from None
    try:
        return _environment().from_string(template)
    except (jinja2.TemplateError, RecursionError) as err:
        raise TokenizerError(f"the chat template is broken: {one_line(err)}; fetch the file again") from None


@functools.lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """Reads `{% generation %}` blocks, which mark training targets, as their content."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Sandbox(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")

    class GuardedNamespace(Namespace):
        """Stores no underscored names, under which Python looks up behaviour of objects."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"storing {name!r} in a namespace")
            super().__setitem__(name, value)

    def namespace(*values: Any, **named: Any) -> GuardedNamespace:
        made = GuardedNamespace()
        for name, value in dict(*values, **named).items():
            made[name] = value
        return made

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _tojson
    environment.globals["namespace"] = namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Refused(Exception):
    """The template called raise_exception."""


def _raise_exception(message: Any) -> None:
    raise _Refused(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
            sort_keys: bool = False) -> str:
    """JSON with HTML characters as they are, unlike jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _rendered(compiled: Any, variables: dict[str, Any]) -> str:
    from jinja2.exceptions import SecurityError
    try:
        return compiled.render(variables)
    except _Refused as err:
        raise RequestError(f"the chat template refuses these messages: {one_line(err)}") from None
    except (SecurityError, OverflowError, MemoryError) as err:
        raise TokenizerError(f"the chat template does what its sandbox forbids: {one_line(err)}; "
                             "use the template of a checkpoint you trust") from None
    except Exception as err:  # a template is a program: it can fail in any way
        raise RequestError(f"the chat template fails on these messages: {type(err).__name__} {one_line(err)}") from None


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {type(message).__name__}, expected an object with 'role' and 'content'")
    plain = {key: value for key, value in _plain(message, where).items() if value is not None}
    role = plain.get("role")
    if role not in ROLES:
        found = "has no role" if role is None else f"has unknown role {role!r}"
        raise RequestError(f"{where} {found}; expected one of {', '.join(ROLES)}")
    calls = plain.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RequestError(f"{where}.tool_calls must be a list of objects")
    if "content" in plain or not (role == "assistant" and calls):
        _check_content(plain.get("content"), where)
    given = [plain[name] for name in _REASONING_FIELDS if name in plain]
    if given:
        plain["reasoning_content"] = given[0]
        plain.setdefault("thinking", given[0])
    return plain


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        found = "missing" if content is None else type(content).__name__
        raise RequestError(f"{where}.content is {found}, expected text or a list of parts")
    for i, part in enumerate(content):
        if not _is_part(part):
            kind = repr(part.get("type")) if isinstance(part, dict) else type(part).__name__
            raise RequestError(f"{where}.content[{i}] is a part of type {kind}, expected 'text' with a text, or 'image'")


def _is_part(part: Any) -> bool:
    """A text part with its text, or an image part, whose image comes beside the messages."""
    if not isinstance(part, dict):
        return False
    return part == {"type": "image"} or (part.get("type") == "text" and isinstance(part.get("text"), str))


def _checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools must be a list of objects, each a JSON schema of a function")
    return _plain(tools, "tools")


def _plain(value: Any, where: str) -> Any:
    """A copy out of JSON types alone: objects with methods must not reach the template."""
    try:
        return json.loads(json.dumps(value, ensure_ascii=False, default=_plain_mapping))
    except (TypeError, ValueError, RecursionError) as err:
        raise RequestError(f"{where} is not plain JSON data: {one_line(err)}") from None


def _plain_mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _shielded(value: Any, tokenizer: Tokenizer) -> Any:
    if isinstance(value, str):
        return tokenizer.shield([value])[0]
    if isinstance(value, dict):
        return {_shielded(key, tokenizer): _shielded(item, tokenizer) for key, item in value.items()}
    if isinstance(value, list) and value and all(map(_is_part, value)):
        # templates join text parts, so a control token could be spelt across two of them
        texts = iter(tokenizer.shield([part["text"] for part in value if part["type"] == "text"]))
        return [{**_shielded(part, tokenizer), "text": next(texts)} if part["type"] == "text" else part for part in value]
    if isinstance(value, list):
        return [_shielded(item, tokenizer) for item in value]
    return value


def _overlap(text: str, tag: str) -> int:
    """Length of the longest proper beginning of `tag` that ends `text`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def _call_at(text: str, start: int, types: dict[tuple[str, str], str]) -> tuple[ToolCall, int] | None:
    """The call whose body begins at `start`, and where its closing tag ends; None when it is malformed."""
    found = _json_call(text, start) if text.startswith("{", start) else _parameter_call(text, start, types)
    if found is None:
        return None
    closing = _CALL_END.match(text, found[1])
    return (found[0], closing.end()) if closing else None


def _json_call(text: str, start: int) -> tuple[ToolCall, int] | None:
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    good = isinstance(value.get("name"), str) and isinstance(value.get("arguments"), dict)
    return (ToolCall(value["name"], value["arguments"]), end) if good else None


def _parameter_call(text: str, start: int, types: dict[tuple[str, str], str]) -> tuple[ToolCall, int] | None:
    function = _FUNCTION.match(text, start)
    if function is None:
        return None
    name, end = function.group(1), function.end()
    arguments: dict[str, Any] = {}
    while parameter := _PARAMETER.match(text, end):
        key = parameter.group(1)
        closing = _PARAMETER_END.search(text, parameter.end())
        if closing is None or key in arguments:
            return None
        value = text[parameter.end():closing.start()].removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(value, types.get((name, key), "string"))
        end = closing.end()
    closing = _FUNCTION_END.match(text, end)
    return (ToolCall(name, arguments), closing.end()) if closing else None


def _typed(value: str, kind: str) -> Any:
    if kind == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _parameter_types(tools: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """(function, parameter) -> its declared JSON type, for those that declare one plain type."""
    types = {}
    for tool in tools:
        function = _child(tool, "function") or tool
        for key, schema in _child(_child(function, "parameters"), "properties").items():
            if isinstance(schema, dict) and isinstance(schema.get("type"), str):
                types[function.get("name"), key] = schema["type"]
    return types


def _child(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    child = value.get(key)
    return child if isinstance(child, Mapping) else {}
