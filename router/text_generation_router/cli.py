"""`text-generation-router`: turns TGI's flags into one config, and a failed start into one line on stderr.

Imports stay light, so that `--help` answers at once: each command imports what it needs.
"""

import json
import logging
import os
import sys
from typing import Any, NoReturn

import typer

from text_generation_common import faults
from text_generation_common.addresses import without_service_links
from text_generation_common.flags.declaration import from_values
from text_generation_common.flags.programs import ROUTER
from text_generation_common.logs import setup_logging
from text_generation_common.typer_command import ReportingCommand, beside, lasting, make_app, taking
from text_generation_common.version import own_version
from text_generation_router.config import RouterFlags
from text_generation_router.errors import InferenceError, ShardsError, StartError

logger = logging.getLogger("text_generation_router")


def route(values: dict[str, Any]) -> None:
    flags = from_values(RouterFlags, values)
    setup_logging(flags.log_level, flags.process.json_output)
    without_service_links([flag.variable for flag in ROUTER.flags_of(RouterFlags)], os.environ, logger)
    with lasting():
        from text_generation_router.resolve import resolve
        from text_generation_router.serve import run
    try:
        set_up_faults(flags.inherited.failpoints, flags.process.testing)
        run(resolve(flags))
    except (StartError, ShardsError, InferenceError) as error:
        fail(str(error))


def print_schema() -> None:
    """Print the OpenAPI document of a server without keys, and start nothing."""
    from text_generation_router.openapi.document import document_of
    from text_generation_router.openapi.operation_json import Interface

    print(json.dumps(document_of(Interface(version=own_version()))))


HELP = "Serve text generation over HTTP, computed by the shards behind a unix socket."
app = make_app()
others = {"print-schema": print_schema.__doc__ or ""}
app.command(cls=beside(others), help=HELP)(taking(route, ROUTER, RouterFlags))
schema_app = make_app()
schema_app.command("print-schema", cls=ReportingCommand)(print_schema)


def set_up_faults(text: str, testing: bool) -> None:
    try:
        faults.setup_command(text, testing)
    except ValueError as error:
        raise StartError(str(error)) from None


def fail(reason: str) -> NoReturn:
    print(f"Error: {reason}", file=sys.stderr)
    raise typer.Exit(1)


def main() -> None:
    # Not a command of `app`: then every start would need the name of a command.
    if sys.argv[1:2] == ["print-schema"]:
        schema_app(sys.argv[2:])
    app()
