"""The file of --config: values of flags in TOML, by the names of the flags, with dashes or underscores."""

import difflib
import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import EnumType
from typing import Any, get_origin

from text_generation_common.flags.declaration import Flag, check_range, single_type
from text_generation_common.flags.kinds import TrueFalse
from text_generation_common.flags.programs import LAUNCHER
from text_generation_common.secret_values import is_secret
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.mistakes import FOREIGN

# What a value must be, by the type of its flag, and the types that TOML has for it.
_KINDS: Mapping[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("a string", (str,)),
}
OF_COMMAND_LINE = ("config", "print_config")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    values: Mapping[str, Any]  # by the names of the flags
    faults: tuple[str, ...] = ()  # why the file is refused, each in one line
    exposed: tuple[str, ...] = ()  # names of secrets, if every user of the machine can read the file


def read(path: str) -> ConfigFile:
    """The file's values that are usable, and its faults."""
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
            is_open = bool(os.fstat(file.fileno()).st_mode & stat.S_IROTH)
    except OSError as error:
        return ConfigFile({}, (f"--config {path} cannot be read ({error.strerror}): check the path",))
    except (ValueError, RecursionError) as error:
        return ConfigFile({}, (f"--config {path} is not valid TOML ({error}): repair it",))
    values: dict[str, Any] = {}
    faults = []
    flags = flags_of_file()
    for key, given in content.items():
        name = key.replace("-", "_")
        value = _as_text(given) if name in flags and single_type(flags[name].type) is TrueFalse else given
        if fault := "stands twice: leave one out" if name in values else _fault(flags, key, value):
            faults.append(f"--config {path}: {key} {fault}")
        else:
            values[name] = value
    return ConfigFile(values, tuple(faults), tuple(filter(is_secret, values)) if is_open else ())


def _as_text(value: Any) -> Any:
    """A flag whose value is the word true or false may be a boolean in the file."""
    return str(value).lower() if isinstance(value, bool) else value


def exposure(path: str) -> str:
    """A warning if every user of the machine can read secrets in the file, otherwise ""."""
    names = read(path).exposed
    return (
        f"Every user of this machine can read {path}, with {' and '.join(names).replace('_', '-')}: chmod o-r {path}"
        if names
        else ""
    )


def flags_of_file() -> dict[str, Flag]:
    flags = LAUNCHER.flags_of(LauncherConfig)
    return {flag.name: flag for flag in flags if not flag.hidden and flag.name not in OF_COMMAND_LINE}


def _fault(flags: Mapping[str, Flag], key: str, value: Any) -> str:
    """Why the value cannot be used, "" if it can. The value itself, which may be a secret, is not shown."""
    if (flag := flags.get(key.replace("-", "_"))) is not None:
        return next(_faults(flag, value), "")
    if isinstance(value, dict):
        return "is a section, and values stand in none: leave its title out"
    if key.replace("-", "_") in OF_COMMAND_LINE:
        return "is for the command line: leave it out"
    if (ours := FOREIGN.get(f"--{key.replace('_', '-')}")) is not None:
        return f"is not a flag: {ours}"
    near = difflib.get_close_matches(key.replace("_", "-"), [name.replace("_", "-") for name in flags], 1)
    return f"is not a flag: did you mean {near[0]}?" if near else "is not a flag: leave it out"


def _faults(flag: Flag, value: Any) -> Iterator[str]:
    kind = single_type(flag.type)
    is_list = get_origin(flag.type) is tuple
    if is_list:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            yield 'must be a list of strings: write it as ["…", "…"]'
    elif isinstance(kind, EnumType):
        if value not in list(kind):
            yield f"must be one of these strings: use {', '.join(kind)}"
    elif type(value) not in _KINDS[kind][1]:
        yield f"must be {_KINDS[kind][0]}"
    else:
        try:
            check_range(flag, value)
        except ValueError as error:
            yield f"is {value}, and {error}"
    if flag.not_empty and not all(map(str.strip, value if is_list else [value])):
        yield "is empty: give it a value, or leave it out"
