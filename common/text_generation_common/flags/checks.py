"""Checks of flags that every program makes in the same way. Each takes the program's flags and their values."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from text_generation_common.flags.declaration import Flag


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
