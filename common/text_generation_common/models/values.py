"""Reads values of config.json, a file that a stranger has written. Each value is of the right type and within bounds,
or a ModelError says in one line why not. Null means the same as a missing field, as in transformers.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from text_generation_common.errors import ModelError, UnsupportedOption

LONGEST_VALUE = 40  # most characters of a value that an error repeats


class Fields:
    """One JSON object. Every error begins with `where`: the file and the field that holds the object.

    It notes which fields it is asked for. `unknown_fields` looks for others, which may change what the model computes.
    Objects that are made of this one, with other names or values, share its notes.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        self.asked: set[str] = set()  # names of fields
        self.opened: dict[str, Fields] = {}  # the objects inside that have been asked for
        self._spelled: Mapping[str, str] = {}  # the file's names of fields that are known by others here

    def with_defaults(self, **defaults: Any) -> "Fields":
        """The same object with values for fields that it does not have. A field that is null stays null."""
        return self._made({**defaults, **self.raw})

    def with_names(self, **spelled: str) -> "Fields":
        """The same object with further names for its fields: new name = the file's name, which counts as asked for.
        Messages have the file's."""
        self.note(*spelled.values())
        renamed = {new: self.raw[old] for new, old in spelled.items() if old in self.raw}
        used = {new: old for new, old in spelled.items() if old in self.raw or new not in self.raw}
        return self._made({**self.raw, **renamed}, used)

    def with_value(self, name: str, value: Any) -> "Fields":
        return self._made({**self.raw, name: value})

    def without(self, *names: str) -> "Fields":
        """The same object without fields that have no effect, whatever their values are."""
        self.note(*names)
        return self._made({name: value for name, value in self.raw.items() if name not in names})

    def _made(self, raw: Mapping[str, Any], spelled: Mapping[str, str] | None = None) -> "Fields":
        made = Fields(raw, self.where)
        made.asked, made.opened, made._spelled = self.asked, self.opened, {**self._spelled, **(spelled or {})}
        return made

    def note(self, *names: str) -> None:
        """Notes that these fields are known, as if they had been asked for."""
        self.asked.update(names)

    def get(self, name: str) -> Any:
        """The value, unchecked; None if there is none."""
        self.note(name)
        return self.raw.get(name)

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def whole(self, name: str, least: int, most: int, default: int | None = None) -> int:
        """A whole number from `least` to `most`."""
        value = self._value(name, default)
        if not is_whole(value, least, most):
            raise self.error(name, f"a whole number from {least} to {most}")
        return int(value)

    def number(self, name: str, least: float, most: float, default: float | None = None) -> float:
        """A finite number from `least` to `most`."""
        value = self._value(name, default)
        if not (is_number(value) and least <= value <= most):
            raise self.error(name, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._value(name, False)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def factor(self, name: str, default: float | None = None) -> float:
        """A number above 0 that multiplies or divides."""
        return self.number(name, 1e-6, 1e6, default)

    def word(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def bits(self, name: str, count: int, default: list[int]) -> list[int]:
        """A list of `count` numbers that are 0 or 1."""
        value = self._value(name, default)
        if not (isinstance(value, list) and len(value) == count and all(is_whole(bit, 0, 1) for bit in value)):
            raise self.error(name, f"a list of {count} numbers, each 0 or 1")
        return value

    def wholes(self, name: str, least: int, most: int) -> list[int]:
        """A list of whole numbers from `least` to `most`; without the field, an empty list."""
        value = self._value(name, [])
        if not (isinstance(value, list) and all(is_whole(number, least, most) for number in value)):
            raise self.error(name, f"a list of whole numbers from {least} to {most}")
        return value

    def inner(self, name: str) -> "Fields":
        """The object that is the field's value, or an empty object if there is no such field."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        inner = Fields(value, f"{self.where}: {name}")
        inner.asked = self.opened.setdefault(name, inner).asked
        return inner

    def only(self, **supported: Any) -> None:
        """UnsupportedOption if one of these fields has another value. Null counts as false or 0."""
        for name, value in supported.items():
            given = self.get(name) if name in self.raw else value
            if given != value and (given is not None or value):
                raise self.lacks(name, f"{shown(value)}, the only kind that is supported")

    def error(self, name: str, wanted: str) -> ModelError:
        called = shown_name(self._spelled.get(name, name))
        return ModelError(f"{self.where}: {called} is {described(self.raw.get(name))}, and must be {wanted}")

    def lacks(self, name: str, supported: str) -> UnsupportedOption:
        """The error for a value that means something, which the server's own decoder does not compute."""
        return UnsupportedOption(str(self.error(name, supported)), self._spelled.get(name, name))

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is None:
            called = self._spelled.get(name, name)
            what = f": {called} is null, and needs a value" if name in self.raw else f" has no field {called}"
            raise ModelError(self.where + what)
        return default


def is_number(value: object) -> bool:
    """Whether `value` is a finite number. True and false, which are numbers in Python, are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def described(value: object) -> str:
    """Describes a value for a message, as one line of ASCII: its type, and numbers and strings themselves."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return f"the string {shown(value)}" if isinstance(value, str) else shown(value)


def shown(value: object) -> str:
    """A value as JSON, with NaN and Infinity in JavaScript's spelling, cut at LONGEST_VALUE characters."""
    text = json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def shown_name(name: str) -> str:
    """A field's name on one line, whatever characters it has."""
    return name[:LONGEST_VALUE] if name.isascii() and name.isprintable() else json.dumps(name)[:LONGEST_VALUE]
