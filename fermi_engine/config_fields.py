"""Typed access to a model's JSON files, with errors that name the file, the field and what it should be."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from fermi_engine.errors import ConfigError

MAX_WHOLE = 2**31 - 1  # ids, positions and sizes pass through int32


@contextmanager
def refusing(what: str, remedy: str) -> Iterator[None]:
    """Nonsense that no rule below foresaw is still the file's fault, not a defect."""
    try:
        yield
    except (TypeError, ValueError, ZeroDivisionError, OverflowError, AttributeError) as err:
        raise ConfigError(f"{what} cannot be read ({' '.join(str(err).split())}); {remedy}") from None


def is_whole(value: Any) -> bool:
    """A whole number from 0 to MAX_WHOLE."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_WHOLE


def is_number(value: Any) -> bool:
    """Finite: comparisons with NaN are false, and those of whole numbers of any length exact."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


class Fields:
    """Typed access to the dictionary in `file`, with errors that name the field."""

    def __init__(self, fields: dict[str, Any], model_type: str, file: str = "config.json") -> None:
        self.fields, self.model_type, self.file = fields, model_type, file

    def integer(self, name: str, default: int | None = None, most: int = MAX_WHOLE) -> int:
        """A whole number in 1..most."""
        value = self._present(name, default)
        if not is_whole(value) or not 1 <= value <= most:
            self._refuse(name, f"a whole number in 1..{most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._present(name, default)
        if not is_number(value):
            self._refuse(name, "a finite number")
        return float(value)

    def boolean(self, name: str, default: bool | None) -> bool | None:
        value = self.fields.get(name, default)
        if value is not default and not isinstance(value, bool):
            self._refuse(name, "true or false")
        return value

    def integers(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Whole numbers of at least 0."""
        value = self.optional(name, list)
        if value is not None and not all(is_whole(v) for v in value):
            self._refuse(name, "a list of whole numbers of at least 0")
        return default if value is None else tuple(value)

    def numbers(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """As many finite numbers as `default` has."""
        value = self.optional(name, list)
        if value is not None and not (len(value) == len(default) and all(is_number(v) for v in value)):
            self._refuse(name, f"{len(default)} finite numbers")
        return default if value is None else tuple(map(float, value))

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        """One of `choices`."""
        value = self.fields.get(name)
        if value is not None and value not in choices:
            self._refuse(name, " or ".join(map(repr, choices)))
        return default if value is None else value

    def optional(self, name: str, kind: type) -> Any:
        """A list or a dict; None where it is absent or null."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, kind):
            self._refuse(name, {list: "a list", dict: "an object"}[kind])
        return value

    def _present(self, name: str, default: Any) -> Any:
        value = self.fields.get(name, default)
        if value is None:
            raise ConfigError(f"{self.file} of a {self.model_type} model lacks '{name}'; the file is incomplete")
        return value

    def _refuse(self, name: str, expected: str) -> NoReturn:
        found = reprlib.repr(self.fields[name])
        raise ConfigError(f"{self.file}: '{name}' is {found}, expected {expected}; fetch the file again")
