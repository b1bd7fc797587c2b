"""Reads flags that a program takes from its environment only. The program passes the environment as an argument."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from text_generation_common.flags.declaration import Flag, flags_of, from_values, single_type

C = TypeVar("C")


class VariableError(ValueError):
    """The value of an environment variable cannot be used."""


def from_environment(
    config_class: type[C], environ: Mapping[str, str], parsers: Mapping[str, Callable[[str], object]]
) -> C:
    """Reads a dataclass from the environment. Raises VariableError for a value that cannot be used, or is out of the
    flag's range. `parsers`, by the name of the flag, raise ValueError; a flag without a parser is converted by its
    type. An empty variable counts as missing. Switches are not supported.
    """
    values: dict[str, Any] = {}
    for flag in flags_of(config_class):
        text = environ.get(flag.variable or "", "")
        try:
            values[flag.name] = _read(flag, text, parsers) if text else flag.default
        except ValueError as error:
            raise VariableError(f"{flag.variable} has the value {text!r}, which is not usable: {error}") from None
    return from_values(config_class, values)


def _read(flag: Flag, text: str, parsers: Mapping[str, Callable[[str], object]]) -> object:
    value: Any = parsers.get(flag.name, single_type(flag.type))(text)
    if flag.min is not None and value < flag.min:
        raise ValueError(f"it must be at least {flag.min}")
    if flag.max is not None and value > flag.max:
        raise ValueError(f"it must be at most {flag.max}")
    return value
