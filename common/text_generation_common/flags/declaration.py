"""Declares a flag once, as the field of a frozen dataclass, reads the flags of dataclasses that contain each other, and
checks values in the way that is the same in every program.

A group is a dataclass of flags. A program's command line is a dataclass whose fields are groups and flags; in it, the
name of a flag stands once. `programs.py` says where a program differs, `typer_command.py` makes commands,
`from_environment` reads flags that are variables only.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import EnumType
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

C = TypeVar("C")
# Stands in a declaration instead of a default value: the user must give the flag.
REQUIRED: Any = MISSING


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A declared flag. For example, the field `max_best_of` is the flag `--max-best-of` and the environment variable
    MAX_BEST_OF.
    """

    name: str = ""
    type: Any = None
    default: object
    help: str
    topic: str = ""  # the heading in --help; that of the group when not given
    short: str | None = None
    # Whether there is an environment variable with the usual name; or its name if it is another one.
    env: bool | str = True
    hidden: bool = False  # whether --help leaves the flag out
    # Whether the value is an address to listen on: a name on the command line is resolved, or refused.
    is_address: bool = False
    # Whether an empty value is refused, which would serve another model, or open what the flag closes. Otherwise an
    # empty variable counts as missing.
    not_empty: bool = False
    positional: bool = False  # whether the value is given without the flag's name
    off: bool = False  # whether a switch that is off by default can be given as --no-NAME as well
    min: int | None = None  # least value; a number outside of min … max is wrong usage, in every program
    max: int | None = None
    positive: bool = False  # zero, or less, is refused when the program starts
    secret: bool = False  # whether command lines and logs must not contain the value
    supported: tuple[str, ...] | None = None  # which of a choice's values are supported; None: all of them
    # Set if the feature is missing: the values that do not ask for the feature.
    refused_except: tuple[object, ...] | None = None
    no_effect: str | None = None  # why the flag is accepted and has no effect
    unless: str | None = None  # name of the flag with which a flag with `no_effect` has its effect

    @property
    def flag_name(self) -> str:
        return flag_name(self.name)

    @property
    def off_name(self) -> str | None:
        """The flag that turns off a switch."""
        return "--no-" + self.name.replace("_", "-") if self.off or self.default is True else None

    @property
    def variable(self) -> str | None:
        """The name of the environment variable."""
        return (env_name(self.name) if self.env is True else self.env) or None

    @property
    def choices(self) -> tuple[str, ...] | None:
        """The values that are supported, if the flag is a choice."""
        kind = single_type(self.type)
        every: tuple[str, ...] | None = tuple(kind) if isinstance(kind, EnumType) else None
        return self.supported or every


def flag(default: object, help: str, **about: Any) -> Any:
    """A dataclass field that is a flag. `about` are further fields of `Flag`."""
    declared = Flag(default=default, help=help, **about)
    return field(default=default, metadata={"flag": declared}, repr=not declared.secret)


def borrowed(group: type, name: str) -> Any:
    """A flag of another group, for a program that has this flag but not the group."""
    [found] = [item for item in fields(group) if item.name == name]
    declared = found.metadata["flag"]
    topic = declared.topic or getattr(group, "TOPIC", "")
    return field(default=found.default, metadata={"flag": replace(declared, topic=topic)}, repr=found.repr)


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def env_name(name: str) -> str:
    return name.upper()


def single_type(kind: Any) -> Any:
    """The type without None: `int` for `int | None`."""
    return next(part for part in get_args(kind) if part is not type(None)) if isinstance(kind, UnionType) else kind


def flags_of(config_class: Any, topic: str = "") -> Iterator[Flag]:
    """The flags of a dataclass, and of the groups in it, in the order of the fields. A group's TOPIC is that of its
    flags and groups which have none; `topic` is that of a class without TOPIC."""
    topic = getattr(config_class, "TOPIC", topic)
    for item in fields(config_class):
        if is_dataclass(item.type):
            yield from flags_of(item.type, topic)
        elif "flag" in item.metadata:
            declared = item.metadata["flag"]
            yield replace(declared, name=item.name, type=item.type, topic=declared.topic or topic)


def values_of(config: Any) -> dict[str, Any]:
    """The value of each field, by its name. Fields of groups are listed like fields of the dataclass that contains the
    groups.
    """
    found: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        found |= values_of(value) if is_dataclass(item.type) else {item.name: value}
    return found


def from_values(config_class: type[C], values: Mapping[str, Any]) -> C:
    """The dataclass, with its groups, made from values by name, as `values_of` returns them. Other values are
    ignored.
    """

    def value(name: str, kind: Any) -> Any:
        is_group: bool = is_dataclass(kind)
        return from_values(kind, values) if is_group else _stored(kind, values[name])

    return config_class(**{item.name: value(item.name, item.type) for item in fields(config_class)})  # type: ignore[arg-type]


def with_flags(config: C, **values: object) -> C:
    """A copy in which the flags named in `values` have other values, in whatever groups they are."""
    before = values_of(config)
    if unknown := values.keys() - before.keys():
        raise TypeError(f"{type(config).__name__} has no flags {sorted(unknown)}")
    return from_values(type(config), before | values)


def _stored(kind: Any, value: Any) -> Any:
    """The form in which a value is stored: a list as a tuple, the text of a choice as its member."""
    if get_origin(kind) is tuple:
        return tuple(value or ())
    kind = single_type(kind)
    return kind(value) if isinstance(kind, EnumType) and value is not None else value


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
    value = parsers.get(flag.name, single_type(flag.type))(text)
    check_range(flag, value)
    return value


def check_range(flag: Flag, value: Any) -> None:
    """ValueError if a number is not within the flag's range."""
    if flag.min is not None and value < flag.min:
        raise ValueError(f"it must be at least {flag.min}")
    if flag.max is not None and value > flag.max:
        raise ValueError(f"it must be at most {flag.max}")


def missing_features(flags: Iterable[Flag], values: Mapping[str, Any]) -> Iterator[Flag]:
    """Flags that ask for a feature that does not exist."""
    for flag in flags:
        if flag.refused_except is not None and values[flag.name] not in flag.refused_except:
            yield flag


def unsupported_choices(flags: Iterable[Flag], values: Mapping[str, Any]) -> Iterator[Flag]:
    """Flags whose value is not one of `Flag.choices`."""
    for flag in flags:
        value = values[flag.name]
        if flag.choices is not None and value is not None and value not in flag.choices:
            yield flag


def without_effect(flags: Iterable[Flag], values: Mapping[str, Any]) -> Iterator[str]:
    """A line for each flag that is given and has no effect."""
    for flag in flags:
        has_effect = flag.unless is not None and bool(values[flag.unless])
        if flag.no_effect is not None and not has_effect and values[flag.name] != flag.default:
            yield f"{flag.flag_name} has no effect: {flag.no_effect}"


def wrong_numbers(flags: Iterable[Flag], values: Mapping[str, Any]) -> Iterator[str]:
    """Errors in TGI's words, one for each number that is too small, infinite or NaN. Typer refuses a number outside of
    `Flag.min` … `Flag.max` before.
    """
    for flag in flags:
        value = values[flag.name]
        if flag.positive and value is not None and value <= 0:
            yield f"`{flag.name}` must be > 0"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"`{flag.name}` must be a finite number"
