"""Declares flags as the fields of a frozen dataclass. `typer_command.py` makes a command of them."""

from collections.abc import Iterator
from dataclasses import field, fields
from typing import Any


def flag(
    default: object,
    help: str,
    *,
    short: str | None = None,
    env: bool = True,
    hidden: bool = False,
    min: int | None = None,
    max: int | None = None,
) -> Any:
    """A dataclass field that is also a flag and, if `env`, an environment variable: the field `max_best_of` is
    `--max-best-of` and MAX_BEST_OF."""
    about = {"help": help, "short": short, "env": env, "hidden": hidden, "min": min, "max": max}
    return field(default=default, metadata=about)


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def off_flag_name(field_name: str) -> str:
    """The flag that turns off a switch whose default is on."""
    return "--no-" + field_name.replace("_", "-")


def env_name(field_name: str) -> str:
    return field_name.upper()


def switches(config_class: Any) -> Iterator[str]:
    """Names of the switches of TGI's launcher, all off by default: they take no value on the command line, and exactly
    true or false in the environment. (Switches of TGI's shards, such as PREFIX_CACHING, take 1, 0, True and so on.)"""
    return (item.name for item in fields(config_class) if item.default is False and item.metadata["env"])
