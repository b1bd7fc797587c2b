"""`text-generation-launcher`: reads flags and environment into one config, and hands it to the supervisor."""

import inspect
import logging
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import typer

from text_generation_common import faults, places, report
from text_generation_common.addresses import without_service_links
from text_generation_common.cluster import block_key
from text_generation_common.errors import INTERRUPTED, CommandError, WrongUsage
from text_generation_common.flags.cluster import MAX_LOCAL_REPLICAS, Way
from text_generation_common.flags.declaration import Flag, from_environment, from_values, values_of
from text_generation_common.flags.model import DEMO_MODEL
from text_generation_common.flags.process import InheritedFlags
from text_generation_common.flags.programs import LAUNCHER, ProgramFlags
from text_generation_common.logs import setup_logging
from text_generation_common.places import ServerPlace
from text_generation_common.secret_values import hide_arguments
from text_generation_common.typer_command import (
    WRONG_USAGE,
    ReportingCommand,
    UsageError,
    beside,
    make_app,
    taking,
)
from text_generation_common.version import own_version
from text_generation_launcher import completion, config_file
from text_generation_launcher.claims import allow_open_files, claim_port, claim_sockets
from text_generation_launcher.config import LauncherConfig, LaunchPlan
from text_generation_launcher.janitor import Janitor, fork_janitor
from text_generation_launcher.mistakes import FOREIGN
from text_generation_launcher.resolve import resolve
from text_generation_launcher.terminal import write_for_people

logger = logging.getLogger("text_generation_launcher")

HELP = """Serve a model over HTTP: one router, and one shard per device. With --api-workers, --replicas, --engine-only
or --engines: several fronts and copies of the model, on one machine or many."""
CERTS_HELP = """Make a deployment's CA, and for each HOST a certificate and key of each role: DIR/ROLE/HOST.

HOST is an IP address or a DNS name, as other machines call it; `*.NAME` stands for each name with one more label. A
further run adds hosts with the same CA and changes no certificate. DIR/ca.key stays off the machines that serve."""
SCALE_HELP = """Let the server on --port have another NUMBER of replicas from now on.

A replica that leaves drains: its queued requests move to others at once, its running ones end there or move."""
REPLICAS_HELP = "Print the state of each replica of the server on --port."
RESTART_HELP = "Replace the fronts of the server on --port one after another, without the loss of a request."
COMPLETION_HELP = """Print the script with which a shell completes flags, their values and names of models.

bash loads it from ~/.local/share/bash-completion/completions/text-generation-launcher, and every shell takes
`source <(text-generation-launcher completion SHELL)`. docs/running.md has the places of zsh and fish."""
CONFIG_VARIABLE = next(flag.variable or "" for flag in LAUNCHER.flags_of(LauncherConfig) if flag.name == "config")
VERSION = inspect.Parameter(
    "version",
    inspect.Parameter.KEYWORD_ONLY,
    default=typer.Option(False, "--version", "-V", help="Print the version and exit."),
    annotation=bool,
)


def main(arguments: Sequence[str] | None = None, program_directories: Sequence[Path] | None = None) -> None:
    """Runs the command. Exits with 0 after a signal, with 130 after Ctrl-C before the server has served, with 1 on a
    CommandError, with 2 on wrong usage.

    `program_directories` are searched for the children's programs before PATH; by default the directory of this Python
    interpreter.
    """
    environ = dict(os.environ)
    directories = [Path(sys.executable).parent] if program_directories is None else program_directories
    words = sys.argv[1:] if arguments is None else list(arguments)
    if shell := environ.get(completion.VARIABLE):
        for line in completion.completed(shell, words, environ, OTHERS, flags_of_command):
            sys.stdout.buffer.write(os.fsencode(f"{line}\n"))
        return
    # Not a command of the app: then every start would need the name of a command, which TGI's does not have.
    for name, make in COMMANDS.items():
        if words[:1] == [name]:
            make()(words[1:], prog_name=f"text-generation-launcher {name}")
    app = command_line(lambda config: run(config, environ, directories), environ)
    app(args=None if arguments is None else words)


class LauncherCommand(ReportingCommand):
    """The command that serves. Values in the file of --config hold before defaults, and after the environment. With
    --print-config the command goes on after a value of the file or the environment that is refused."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # What is refused, with the flag's name if it is one flag's value; and where the values of these flags are from.
        self._faults: dict[str, str | None] = {}
        self._sources: dict[str, str] = {}
        given, *_ = self.make_parser(ctx).parse_args(args=list(args))
        path = given.get("config") or os.environ.get(CONFIG_VARIABLE)
        if path and not (given.get("help") or given.get("version")):
            file = config_file.read(path)
            ctx.default_map = dict(file.values)
            self._faults |= dict.fromkeys(file.faults)
        if self._faults and not given.get("print_config"):
            raise UsageError(next(iter(self._faults)), ctx)
        while True:
            try:
                return super().parse_args(ctx, list(args))
            except UsageError as error:
                flag = getattr(error, "param", None)
                if not given.get("print_config") or flag is None or flag.name in given or flag.envvar is None:
                    raise
                self._faults[error.format_message()] = flag.name
                is_of_file = ctx.get_parameter_source(flag.name).name == "DEFAULT_MAP"
                self._sources[flag.name] = "DEFAULT_MAP" if is_of_file else "ENVIRONMENT"
                flag.envvar = flag.callback = None  # the next try takes the value as it is, or the default

    def invoke(self, ctx: Any) -> Any:
        if not ctx.params["print_config"]:
            return super().invoke(ctx)
        # Imported here, because a server's start does not need it.
        from text_generation_launcher.print_config import Given, print_config

        loose = list(loose_switches(os.environ))
        sources = {name: ctx.get_parameter_source(name).name for name in ctx.params} | self._sources
        sources |= {name: "ENVIRONMENT" for name, _ in loose}
        faults = self._faults | {fault: name for name, fault in loose}
        config = from_values(LauncherConfig, ctx.params)
        return print_config(Given(config, sources, faults), dict(os.environ), typer.echo)


def command_line(run_with: Callable[[LauncherConfig], int], environ: Mapping[str, str]) -> typer.Typer:
    def launch(values: dict[str, Any]) -> None:
        if values["version"]:
            typer.echo(f"text-generation-launcher {own_version()}")
            raise typer.Exit
        for _, fault in loose_switches(environ):
            raise typer.BadParameter(fault)
        raise typer.Exit(run_with(from_values(LauncherConfig, values)))

    app = make_app()
    command = taking(launch, LAUNCHER, LauncherConfig, [VERSION])
    app.command(cls=beside(OTHERS, FOREIGN, LauncherCommand), help=HELP)(command)
    return app


def certs_command_line() -> typer.Typer:
    # Imported here, because a server's start does not need it.
    from text_generation_launcher.certs import CERTS, CertsFlags, make_or_check

    return _command_line(
        lambda values: make_or_check(from_values(CertsFlags, values), typer.echo), CERTS, CertsFlags, CERTS_HELP
    )


def scale_command_line() -> typer.Typer:
    from text_generation_launcher.control_call import CONTROL, ScaleFlags, scale

    return _command_line(
        lambda values: scale(from_values(ScaleFlags, values), typer.echo), CONTROL, ScaleFlags, SCALE_HELP
    )


def replicas_command_line() -> typer.Typer:
    from text_generation_launcher.control_call import CONTROL, ControlFlags, replicas

    return _command_line(
        lambda values: replicas(from_values(ControlFlags, values), typer.echo), CONTROL, ControlFlags, REPLICAS_HELP
    )


def restart_command_line() -> typer.Typer:
    from text_generation_launcher.control_call import CONTROL, ControlFlags, restart_fronts

    return _command_line(
        lambda values: restart_fronts(from_values(ControlFlags, values), typer.echo),
        CONTROL,
        ControlFlags,
        RESTART_HELP,
    )


def completion_command_line() -> typer.Typer:
    return _command_line(
        lambda values: typer.echo(completion.SCRIPTS[values["shell"]]),
        completion.COMPLETION,
        completion.CompletionFlags,
        COMPLETION_HELP,
    )


def flags_of_command(name: str) -> Iterable[Flag]:
    """The flags of one of COMMANDS, or of "", which serves."""
    if not name:
        return LAUNCHER.flags_of(LauncherConfig)
    [command] = COMMANDS[name]().registered_commands
    flags: list[Flag] = command.callback.flags  # type: ignore[union-attr]
    return flags


def _command_line(
    run: Callable[[dict[str, Any]], int | None], program: ProgramFlags, flags: type, text: str
) -> typer.Typer:
    """A command that serves nothing. `run` returns its exit status, or None for 0."""

    def command(values: dict[str, Any]) -> None:
        try:
            raise typer.Exit(run(values) or 0)
        except CommandError as error:
            typer.echo(report.told(error.reason, error.hint), err=True)
            raise typer.Exit(WRONG_USAGE if isinstance(error, WrongUsage) else 1) from None

    app = make_app()
    app.command(cls=ReportingCommand, help=text)(taking(command, program, flags))
    return app


OTHERS: Mapping[str, str] = {
    "certs": CERTS_HELP,
    "scale": SCALE_HELP,
    "replicas": REPLICAS_HELP,
    "restart-fronts": RESTART_HELP,
    "completion": COMPLETION_HELP,
}
COMMANDS: Mapping[str, Callable[[], typer.Typer]] = {
    "certs": certs_command_line,
    "scale": scale_command_line,
    "replicas": replicas_command_line,
    "restart-fronts": restart_command_line,
    "completion": completion_command_line,
}


def run(config: LauncherConfig, environ: Mapping[str, str], program_directories: Sequence[Path]) -> int:
    """Serves until a signal, and returns the exit status. Wrong flags are refused before the first child starts."""
    # Imported here, because `--help` and the shell's completion need nothing of it.
    import asyncio

    from text_generation_launcher import commands
    from text_generation_launcher.preflight import check_before_start
    from text_generation_launcher.supervisor import Supervisor

    setup_logging(environ.get("LOG_LEVEL", "info"), config.process.json_output)
    write_for_people(sys.stdout, environ, config.process.json_output)
    if config.config and (line := config_file.exposure(config.config)):
        logger.warning("%s", line)
    if config.env:
        log_environment()
    inherited = from_environment(InheritedFlags, environ, {})
    if inherited.failpoints and not config.process.testing:
        logger.warning(faults.NOT_TESTING)
    environ = without_service_links([flag.variable for flag in flags_of_command("")], environ, logger)
    try:
        plan = resolve(config, environ)
        log_arguments(config, plan)
        if hide_arguments([*config.access.api_key, config.access.admin_api_key or ""]):
            logger.warning(
                "A key was on the command line, where every user of this machine could read it until now: give it as"
                " API_KEY or ADMIN_API_KEY in the environment, or its digest in --api-key-file"
            )
        machine = check_before_start(plan, environ)
        if config.model.model_id == DEMO_MODEL:
            logger.info("Serving the demo model that ships with the package; choose another with --model-id")
        allow_open_files(plan.num_shard)
        if plan.cluster.way is not Way.ROUTER:
            security = plan.cluster.security
            folder = None if security.tls_dir is None else Path(security.tls_dir)
            environ = block_key.with_key(environ, folder, security.insecure_cluster)
            environ = {**environ, "USAGE_KEY": block_key.new_key()}
        programs = commands.find_programs(program_directories, environ.get("PATH"))
        with claim(plan, config.shard_uds_path, inherited.runtime_dir) as (listener, place, janitor):
            fd, port = (None, 0) if listener is None else (listener.fileno(), listener.getsockname()[1])
            supervisor = Supervisor(plan, programs, environ, fd, port, place, janitor, machine)
            return asyncio.run(supervisor.run())
    except CommandError as error:
        kind = type(error).__name__
        print(report.told(error.reason, error.hint, kind, config.process.json_output), file=sys.stderr, flush=True)
        return WRONG_USAGE if isinstance(error, WrongUsage) else 1
    except KeyboardInterrupt:  # before the supervisor handles signals
        return INTERRUPTED


@contextmanager
def claim(
    plan: LaunchPlan, prefix: str | None, runtime_dir: str
) -> Iterator[tuple[socket.socket | None, ServerPlace, Janitor]]:
    """Claims the port and the place of the sockets: `prefix`, or a folder in `runtime_dir`. The janitor cleans the
    place when this launcher is killed. A launcher that serves no HTTP claims no port."""
    has_port = plan.cluster.way is not Way.ENGINE
    with ExitStack() as stack:
        hostname, port, listener = plan.http.hostname, plan.http.port, None
        # The kernel chooses the port first, because the folder of the sockets is named after it.
        if has_port and port == 0:
            listener = stack.enter_context(claim_port(hostname, port))
            port = listener.getsockname()[1]
        default = places.of_port(port, runtime_dir) if has_port else places.of_engine(os.getpid(), runtime_dir)
        place = places.chosen(prefix) if prefix else default
        last = (
            MAX_LOCAL_REPLICAS - 1 if plan.cluster.way is Way.REPLICAS and plan.cluster.replica_limit is not None else 0
        )
        place.replica(last).check_length(plan.num_shard)
        lock = stack.enter_context(claim_sockets(place))
        janitor = stack.enter_context(fork_janitor(place, lock))
        # The port is claimed last: once the janitor of a killed launcher has released the lock, the port is free as
        # well.
        if has_port and listener is None:
            listener = stack.enter_context(claim_port(hostname, port))
        yield listener, place, janitor


def loose_switches(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Name and fault of each switch in the environment whose value is not true or false, which TGI refuses; typer takes
    1 and yes.

    Switches of TGI's launcher are off by default. PREFIX_CACHING, a switch of TGI's shards, takes all
    that typer takes, such as 1, 0 and True.
    """
    for flag in LAUNCHER.flags_of(LauncherConfig):
        value = environ.get(flag.variable, "") if flag.default is False and flag.variable else ""
        if value not in ("", "true", "false"):
            fault = (
                f"{flag.variable} in the environment is {value!r}: set it to true or false, as {flag.flag_name} needs"
            )
            yield flag.name, fault


def log_arguments(config: LauncherConfig, plan: LaunchPlan) -> None:
    values = values_of(config) | values_of(plan)
    secrets = {flag.name: "***" for flag in LAUNCHER.flags_of(LauncherConfig) if flag.secret and values[flag.name]}
    logger.debug("Args: %s", values | secrets)


def log_environment() -> None:
    logger.info("tgi-py %s, Python %s, %s", own_version(), platform.python_version(), platform.platform())
    try:
        cards = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        logger.info("nvidia-smi: not available")
    else:
        logger.info("nvidia-smi:\n%s", cards)


if __name__ == "__main__":
    main()
