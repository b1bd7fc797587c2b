"""`text-generation-launcher`: reads flags and environment into one config, and hands it to the supervisor."""

import asyncio
import inspect
import logging
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer

from text_generation_common import faults, places
from text_generation_common.errors import CommandError
from text_generation_common.flags import env_name, flag_name, switches
from text_generation_common.logs import setup_logging
from text_generation_common.places import ServerPlace
from text_generation_common.typer_command import signature
from text_generation_launcher import commands
from text_generation_launcher.claims import claim_port, claim_sockets
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.janitor import Janitor, fork_janitor
from text_generation_launcher.open_files import allow_open_files
from text_generation_launcher.resolve import resolve
from text_generation_launcher.supervisor import Supervisor

logger = logging.getLogger("text_generation_launcher")

VERSION = inspect.Parameter(
    "version",
    inspect.Parameter.KEYWORD_ONLY,
    default=typer.Option(False, "--version", "-V", help="Print the version and exit."),
    annotation=bool,
)


def main(arguments: Sequence[str] | None = None, program_directories: Sequence[Path] | None = None) -> None:
    """Exits with 0 after a signal, 1 on a CommandError, 2 on wrong usage.

    `program_directories` are searched for the children's programs before PATH; by default the directory of this Python
    interpreter.
    """
    environ = dict(os.environ)
    directories = [Path(sys.executable).parent] if program_directories is None else program_directories
    app = make_app(lambda config: run(config, environ, directories), environ)
    app(args=None if arguments is None else list(arguments))


def make_app(run_with: Callable[[LauncherConfig], int], environ: Mapping[str, str]) -> typer.Typer:
    def launch(**values: Any) -> None:
        if values.pop("version"):
            typer.echo(f"text-generation-launcher {package_version()}")
            raise typer.Exit
        refuse_loose_switches(environ)
        raise typer.Exit(run_with(LauncherConfig(**values)))

    flags = signature(LauncherConfig)
    launch.__signature__ = flags.replace(parameters=[*flags.parameters.values(), VERSION])  # type: ignore[attr-defined]
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command(help="Serve a model over HTTP: one router, and one shard per device.")(launch)
    return app


def run(config: LauncherConfig, environ: Mapping[str, str], program_directories: Sequence[Path]) -> int:
    """Serves until a signal, and returns the exit status. Wrong flags are refused before the first child starts."""
    setup_logging(environ.get("LOG_LEVEL", "info"), config.json_output)
    if config.env:
        log_environment()
    if environ.get("FAILPOINTS") and not config.testing:
        logger.warning(faults.NOT_TESTING)
    try:
        config = resolve(config, environ)
        logger.debug("Args: %s", asdict(replace(config, api_key=["***"] if config.api_key else None)))
        assert config.num_shard is not None, "resolve fills it in"
        allow_open_files(config.num_shard)
        programs = commands.find_programs(program_directories, environ.get("PATH"))
        with claim(config, environ.get("XDG_RUNTIME_DIR", "")) as (listener, place, janitor):
            port = listener.getsockname()[1]
            config = replace(config, shard_uds_path=place.prefix)
            asyncio.run(Supervisor(config, programs, environ, listener.fileno(), port, place, janitor).run())
    except CommandError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def claim(config: LauncherConfig, runtime_dir: str) -> Iterator[tuple[socket.socket, ServerPlace, Janitor]]:
    """Claims the port and the place of the sockets. The janitor cleans the place when this launcher is killed."""
    assert config.num_shard is not None, "the config is not resolved"
    with ExitStack() as stack:
        port, listener = config.port, None
        if port == 0:  # The kernel chooses the port, and the folder of the sockets is named after it.
            listener = stack.enter_context(claim_port(config.hostname, port))
            port = listener.getsockname()[1]
            logger.info("Port %d was chosen for --port 0", port)
        prefix = config.shard_uds_path
        place = places.chosen(prefix) if prefix else places.of_port(port, runtime_dir)
        place.check_length(config.num_shard)
        lock = stack.enter_context(claim_sockets(place))
        janitor = stack.enter_context(fork_janitor(place, lock))
        # Last: once the janitor of a killed launcher has released the lock, the port is free as well.
        listener = listener or stack.enter_context(claim_port(config.hostname, port))
        yield listener, place, janitor


def refuse_loose_switches(environ: Mapping[str, str]) -> None:
    """Refuses values of a switch in the environment other than true and false, as TGI; typer would take 1 and yes."""
    for name in switches(LauncherConfig):
        value = environ.get(env_name(name), "")
        if value not in ("", "true", "false"):
            raise typer.BadParameter(
                f"{env_name(name)} in the environment is {value!r}: set it to true or false, as {flag_name(name)} needs"
            )


def log_environment() -> None:
    logger.info("tgi-py %s, Python %s, %s", package_version(), platform.python_version(), platform.platform())
    try:
        cards = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        logger.info("nvidia-smi: not available")
    else:
        logger.info("nvidia-smi:\n%s", cards)


def package_version() -> str:
    try:
        return version("tgi-py")
    except PackageNotFoundError:
        return "unknown (not installed)"


if __name__ == "__main__":
    main()
