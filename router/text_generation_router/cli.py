"""`text-generation-router`: turns TGI's flags into one config, and a failed start into one line on stderr.

Imports stay light, so that `--help` answers at once: each command imports what it needs.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from text_generation_common.addresses import without_service_links
from text_generation_common.flags.declaration import from_values
from text_generation_common.flags.programs import ROUTER
from text_generation_common.logs import setup_logging
from text_generation_common.typer_command import ReportingCommand, beside, lasting, make_app, taking
from text_generation_common.version import own_version
from text_generation_router.cli_errors import fail, set_up_faults
from text_generation_router.config import RouterFlags
from text_generation_router.errors import InferenceError, ShardsError, StartError

logger = logging.getLogger("text_generation_router")

ENGINE = "text-generation-engine"


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


def main() -> None:
    if (control_fd := os.environ.get("ROUTER_TEMPLATE_FD")) is not None:
        with lasting():
            from text_generation_router import engine_cli, serve, serve_engine, template  # noqa: F401

        environment = template.become(int(control_fd))
        os.environ.clear()
        os.environ.update(environment)
        if Path(sys.argv[0]).name == ENGINE:
            engine_cli.main()
    # Not a command of `app`: then every start would need the name of a command.
    if sys.argv[1:2] == ["print-schema"]:
        schema_app(sys.argv[2:])
    app()
