"""Makes typer commands from declared flags, in one style for all programs.

Besides the `cli.py` of each command, which imports this module, no module of this package imports typer.
"""

import gc
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import EnumType
from pathlib import Path
from typing import Any, get_origin

import typer
from typer.core import TyperCommand

from text_generation_common import report
from text_generation_common.addresses import is_address, is_service_link, resolved
from text_generation_common.errors import INTERRUPTED
from text_generation_common.flags.declaration import REQUIRED, Flag, single_type
from text_generation_common.flags.kinds import Topic
from text_generation_common.flags.programs import ProgramFlags
from text_generation_common.version import turn_reports_off

WRONG_USAGE = 2  # exit status
# Heading in --help of flags without a topic; and the number of flags up to which a command has no other heading.
OTHER_FLAGS, MAX_PLAIN = "Options", 12
MAX_COLUMNS = 110  # width of a help text, on a terminal that is as wide
# typer has a copy of click, or uses click itself, by its version. Both have this error, the base of BadParameter.
UsageError: Any = typer.BadParameter.__mro__[1]
# How typer and click name flags that may be meant.
_NEAR = re.compile(r" (?:\(Possible options: |Did you mean )(.*?)[)?]?$")


class ReportingCommand(TyperCommand):
    """A command that reports wrong usage in two lines, the cause first, and not after the way to call it. Its help has
    the flags by topic, and `others`: commands beside it, and what they do. `foreign`: what to do in the place of words
    that are flags of other programs."""

    others: Mapping[str, str] = {}
    foreign: Mapping[str, str] = {}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in ("Arguments", *Topic, OTHER_FLAGS)}
        has_topics = len(self.params) > MAX_PLAIN
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None:
                topic = getattr(parameter, "rich_help_panel", None) if has_topics else None
                is_value = parameter.param_type_name == "argument"
                rows["Arguments" if is_value else topic or OTHER_FLAGS].append(row)
        for heading, each in (rows | {"Commands": list(self.others.items())}).items():
            if each:
                with formatter.section(heading):
                    formatter.write_dl(each)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for parameter in self.params:
            if is_service_link(str(parameter.envvar), os.environ):
                parameter.envvar = None
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def main(self, *args: Any, **more: Any) -> Any:
        try:
            status = super().main(*args, **more | {"standalone_mode": False})
        except UsageError as error:
            given = args[0] if args else more.get("args")
            words = sys.argv[1:] if given is None else given
            program = more.get("prog_name") or Path(sys.argv[0]).name
            typer.echo(_usage_error(error, program, words, self.foreign), err=True)
            sys.exit(WRONG_USAGE)
        except typer.Abort:  # Ctrl-C
            sys.exit(INTERRUPTED)
        sys.exit(status if isinstance(status, int) else 0)


def _usage_error(error: Any, program: str, words: Sequence[str], foreign: Mapping[str, str]) -> str:
    text = " ".join(error.format_message().split()).removesuffix(".").replace("Value error, ", "")
    found = _NEAR.search(text)
    cause, near = (text, "") if found is None else (text[: found.start()], found[1])
    cause, hint = report.parted(cause)
    given = [word.partition("=")[0] for number, word in enumerate(words) if number == 0 or word.startswith("-")]
    if other := next(filter(foreign.__contains__, given), None):
        # The parser reads `-ngl` as `-n`, `-g` and `-l`.
        cause, hint = f"{'No such option' if other.startswith('-') else 'No such command'}: {other}", foreign[other]
    elif near:
        hint = f"did you mean {near}?"
    elif "unexpected extra argument" in cause and error.ctx is not None:
        hint = f"each value needs its flag, such as {error.ctx.command.params[0].opts[0]}"
    every = f"`{program} --help` lists all flags"
    hint = f"{hint}{'' if hint.endswith('?') else ';'} {every}" if hint else every
    return report.told(cause, hint, "UsageError", "--json-output" in words)


def beside(
    others: Mapping[str, str],
    foreign: Mapping[str, str] | None = None,
    base: type[ReportingCommand] = ReportingCommand,
) -> type[ReportingCommand]:
    """The class of a command whose help lists `others`, by name, with the first sentence of what they do. `foreign`:
    see ReportingCommand."""
    rows = {name: text.partition(".")[0].replace("\n", " ") + "." for name, text in others.items()}
    return type("CommandBesideOthers", (base,), {"others": rows, "foreign": foreign or {}})


def make_app(help: str | None = None) -> typer.Typer:
    """An app without commands. `help` describes an app of several commands, and is shown when no command is given.
    Pretty tracebacks are off, because they print the values of variables, which may be a user's text.
    Reports of Hugging Face's libraries are off in this process, and in children of it.
    """
    turn_reports_off(os.environ)
    return typer.Typer(
        help=help,
        no_args_is_help=help is not None,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_COLUMNS},
    )


def taking(
    run: Callable[[dict[str, Any]], None],
    program: ProgramFlags,
    config_class: Any,
    further: Iterable[inspect.Parameter] = (),
) -> Callable[..., None]:
    """Makes a function that typer turns into a command: it calls `run` with the value of each flag by the flag's
    name. Its attribute `flags` lists the flags.
    """

    def command(**values: Any) -> None:
        run(values)

    command.flags = list(program.flags_of(config_class))  # type: ignore[attr-defined]
    parameters = [_parameter(flag, program.checks_choices) for flag in command.flags]  # type: ignore[attr-defined]
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
        rich_help_panel=flag.topic or None,
        hidden=flag.hidden,
        min=flag.min,
        max=flag.max,
        callback=_check_of(flag) if flag.is_address or flag.not_empty else None,
    )


def _check_of(flag: Flag) -> Callable[[typer.Context, Any], Any]:
    def check(context: typer.Context, value: Any) -> Any:
        source = context.get_parameter_source(flag.name)
        # DEFAULT_MAP: the values of a file.
        is_given = source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")
        in_file = (context.default_map or {}).get(flag.name)
        if flag.is_address and in_file is not None and not is_given and not is_address(value):
            # Shells and containers set HOSTNAME to the machine's name, which chooses no address.
            value, is_given = in_file, True
            context.set_parameter_source(flag.name, type(source)["DEFAULT_MAP"])  # type: ignore[index]
        # typer takes an empty variable, and one of spaces for a list, for one that is not set.
        given = value if is_given else os.environ.get(flag.variable or "", "-")
        if flag.not_empty and not all(map(str.strip, given if isinstance(given, list) else [given])):
            name = flag.flag_name if is_given else f"{flag.variable} in the environment"
            raise typer.BadParameter(f"{name} is empty: give it a value, or leave it out")
        if flag.is_address and is_given:
            try:
                return resolved(value)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
        return value

    return check


def _type(flag: Flag, checks_choices: bool) -> Any:
    if get_origin(flag.type) is tuple:
        return list[str] | None
    if not checks_choices and isinstance(single_type(flag.type), EnumType):
        return str | None
    return flag.type


@contextmanager
def lasting() -> Iterator[None]:
    """For imports of large packages. Python's collector does not run meanwhile, which takes a sixth of their processor
    time, and does not look at the objects that they have made later.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
