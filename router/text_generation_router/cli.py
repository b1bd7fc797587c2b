"""`text-generation-router`: turns TGI's flags into one config, and a failed start into one line on stderr."""

import sys
from typing import Any, NoReturn

import typer

from text_generation_common import faults
from text_generation_common.flags.declaration import from_values
from text_generation_common.flags.programs import ROUTER
from text_generation_common.logs import setup_logging
from text_generation_common.typer_command import ReportingCommand, make_app, taking
from text_generation_router.config import RouterFlags
from text_generation_router.errors import InferenceError, ShardsError, StartError
from text_generation_router.resolve import resolve
from text_generation_router.serve import run


def route(values: dict[str, Any]) -> None:
    flags = from_values(RouterFlags, values)
    setup_logging(flags.log_level, flags.process.json_output)
    try:
        set_up_faults(flags.inherited.failpoints, flags.process.testing)
        run(resolve(flags))
    except (StartError, ShardsError, InferenceError) as error:
        fail(str(error))


app = make_app()
app.command(cls=ReportingCommand, help="Serve text generation over HTTP, computed by the shards behind a unix socket.")(
    taking(route, ROUTER, RouterFlags)
)


def set_up_faults(text: str, testing: bool) -> None:
    try:
        faults.setup_command(text, testing)
    except ValueError as error:
        raise StartError(str(error)) from None


def fail(reason: str) -> NoReturn:
    print(f"Error: {reason}", file=sys.stderr)
    raise typer.Exit(1)


def main() -> None:
    app()
