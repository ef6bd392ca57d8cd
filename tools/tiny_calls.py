"""Tools for generated tool-call tasks: each draw names the function and its parameters anew.

What a tool does is told by its description and the user's sentence; what it and its parameters are called differs
from sample to sample, so that a right call needs the schema that stands in the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from tools import tiny_words as w

CURRENCIES = ("euro", "peso", "krona", "yen", "dollar", "franc")
ROOMS = ("kitchen", "hall", "bedroom", "cellar", "office", "attic")
TONGUES = ("Spanish", "Russian", "Greek", "Chinese", "Arabic", "English")


@dataclass(frozen=True)
class Parameter:
    """keys: what it may be called; kind: what is drawn for it (see `_value`)."""

    keys: tuple[str, ...]
    kind: str

    @property
    def json_type(self) -> str:
        return {"switch": "boolean", "small": "integer", "large": "integer", "hour": "integer"}.get(self.kind, "string")


@dataclass(frozen=True)
class Tool:
    """names: what the function may be called; sentences: requests, with {0}, {1}, ... for the values."""

    names: tuple[str, ...]
    description: str
    parameters: tuple[Parameter, ...]
    sentences: tuple[str, ...]


def _tool(names: str, description: str, parameters: str, *sentences: str) -> Tool:
    """parameters: `key/key:kind` items."""
    parsed = tuple(Parameter(tuple(keys.split("/")), kind)
                   for keys, kind in (item.split(":") for item in parameters.split()))
    return Tool(tuple(names.split("/")), description, parsed, sentences)


TOOLS = (
    _tool("set_timer/start_timer/timer", "Start a timer",
          "minutes/duration/length:small label/title/name:name",
          "Set a timer for {0} minutes called {1}.", "Please start a {0} minute timer named {1}."),
    _tool("send_message/message/text_person", "Send a message to a person",
          "to/recipient/person:name text/body/content:text",
          "Send {0} this message: {1}", "Tell {0}: {1}"),
    _tool("get_weather/weather/forecast", "Weather of a city",
          "city/place/location:name days/period/count:small",
          "What is the weather in {0} for {1} days?", "Show me {1} days of weather in {0}."),
    _tool("book_table/reserve_table/reserve", "Book a table",
          "name/guest/person:name guests/people/size:small hour/time/at:hour",
          "Book a table for {1} people at {2} for {0}.", "A table at {2} for {1} people, please. My name is {0}."),
    _tool("play_song/play_music/play", "Play music",
          "title/song/track:text volume/level/loudness:small",
          "Play at volume {1} the song {0}", "At volume {1}, play {0}"),
    _tool("convert_money/exchange/convert", "Convert money",
          "amount/sum/value:large from/source/have:currency to/target/want:currency",
          "How much is {0} {1} in {2}?", "Convert {0} {1} to {2}."),
    _tool("switch_light/set_light/light", "Switch a light",
          "room/place/where:room on/state/lit:switch",
          "Switch {1} the light in the {0}.", "The {0} light should be {1}."),
    _tool("find_route/route/directions", "Find the way",
          "start/from/origin:name goal/to/destination:name",
          "How do I get from {0} to {1}?", "Find the way from {0} to {1}."),
    _tool("add_note/save_note/note", "Save a note",
          "title/name/subject:name text/body/content:text",
          "Make a note called {0} that says {1}", "Save as {0} the note {1}"),
    _tool("buy_ticket/order_ticket/ticket", "Buy tickets",
          "city/to/destination:name seats/count/number:small",
          "Buy {1} tickets to {0}.", "I need {1} seats to {0}."),
    _tool("set_alarm/wake_me/alarm", "Set an alarm",
          "hour/at/time:hour note/label/reason:text",
          "Wake me at {0} for {1}", "Set an alarm at {0} with the note {1}"),
    _tool("look_up/search/dictionary", "Look up a word",
          "word/term/query:text language/tongue/book:tongue",
          "Look up in the {1} dictionary {0}", "In the {1} book, search for {0}"),
)


@dataclass(frozen=True)
class Call:
    """A drawn function: its schema, the user's sentence, and the call that is right."""

    schema: dict[str, Any]
    sentence: str
    name: str
    arguments: dict[str, Any]


def draw(rng: Random, tool: Tool, held: bool) -> Call:
    """Names, keys, their order, values and wording, drawn until the call is in the wanted part."""
    while True:
        name = rng.choice(tool.names)
        order = rng.sample(range(len(tool.parameters)), len(tool.parameters))
        keys = [rng.choice(parameter.keys) for parameter in tool.parameters]
        values = [_value(rng, parameter.kind, held) for parameter in tool.parameters]
        arguments = {keys[i]: values[i] for i in order}
        if len(arguments) == len(keys) and w.held_out(f"{name} {sorted(arguments.items())}") == held:
            break
    properties = {keys[i]: {"type": tool.parameters[i].json_type} for i in order}
    schema = {"type": "function", "function": {
        "name": name, "description": tool.description,
        "parameters": {"type": "object", "properties": properties, "required": list(properties)}}}
    shown = [{True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value for value in values]
    return Call(schema, rng.choice(tool.sentences).format(*shown), name, arguments)


def _value(rng: Random, kind: str, held: bool) -> Any:
    draws = {
        "name": lambda: w.name(rng, held),
        "text": lambda: " ".join(w.words(rng, rng.randint(2, 4), rng.choice(w.MIX))),
        "small": lambda: rng.randint(1, 99),
        "large": lambda: rng.randint(1, 9999),
        "hour": lambda: rng.randint(0, 23),
        "switch": lambda: rng.random() < 0.5,
        "currency": lambda: rng.choice(CURRENCIES),
        "room": lambda: rng.choice(ROOMS),
        "tongue": lambda: rng.choice(TONGUES),
    }
    return draws[kind]()


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """The call in the chat template's XML form."""
    shown = {key: value if isinstance(value, str) else str(value).lower() for key, value in arguments.items()}
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in shown.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def fits_schema(arguments: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Whether arguments hold exactly the required keys, with values of the declared types."""
    parameters = schema["function"]["parameters"]
    types = {"string": str, "integer": int, "boolean": bool}
    return set(arguments) == set(parameters["required"]) and all(
        type(value) is types[parameters["properties"][key]["type"]] for key, value in arguments.items())
