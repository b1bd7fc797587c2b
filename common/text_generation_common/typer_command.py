"""Makes typer commands from declared flags, in one style for all programs.

Besides the `cli.py` of each command, which imports this module, no module of this package imports typer.
"""

import inspect
from collections.abc import Callable, Iterable
from enum import EnumType
from typing import Any, get_origin

import typer

from text_generation_common.flags.declaration import REQUIRED, Flag, single_type
from text_generation_common.flags.programs import ProgramFlags


def make_app(help: str | None = None) -> typer.Typer:
    """An app without commands. `help` describes an app of several commands, and is shown when no command is given.
    Pretty tracebacks are off, because they print the values of variables, which may be a user's text.
    """
    return typer.Typer(
        help=help,
        no_args_is_help=help is not None,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def taking(
    run: Callable[[dict[str, Any]], None],
    program: ProgramFlags,
    config_class: Any,
    further: Iterable[inspect.Parameter] = (),
) -> Callable[..., None]:
    """Makes a function that typer turns into a command: it calls `run` with the value of each flag by the flag's
    name.
    """

    def command(**values: Any) -> None:
        run(values)

    parameters = [_parameter(flag, program.checks_choices) for flag in program.flags_of(config_class)]
    command.__signature__ = inspect.Signature([*parameters, *further])  # type: ignore[attr-defined]
    return command


def _parameter(flag: Flag, checks_choices: bool) -> inspect.Parameter:
    default = ... if flag.default is REQUIRED else None if flag.default == () else flag.default
    option = typer.Argument(default, help=flag.help) if flag.positional else _option(flag, default)
    kind = _type(flag, checks_choices)
    return inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def _option(flag: Flag, default: Any) -> Any:
    names = [f"{flag.flag_name}/{flag.off_name}" if flag.off_name else flag.flag_name]
    return typer.Option(
        default,
        *names,
        *([flag.short] if flag.short else []),
        envvar=flag.variable,
        help=flag.help,
        hidden=flag.hidden,
        min=flag.min,
        max=flag.max,
    )


def _type(flag: Flag, checks_choices: bool) -> Any:
    if get_origin(flag.type) is tuple:
        return list[str] | None
    if not checks_choices and isinstance(single_type(flag.type), EnumType):
        return str | None
    return flag.type
