"""The command lines of all programs: equal to their recorded form, each flag declared once, and the launcher
passes on every flag."""

import inspect
import os
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import EnumType
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
import typer
from typer.models import ArgumentInfo
from typer.testing import CliRunner

from text_generation_common.flags.cluster import ClusterFlags
from text_generation_common.flags.declaration import (
    Flag,
    flag_name,
    flags_of,
    from_values,
    single_type,
    values_of,
    with_flags,
)
from text_generation_common.flags.kinds import LoadFormat
from text_generation_common.flags.process import AbsentFlags
from text_generation_common.flags.programs import LAUNCHER, ROUTER, SHARD, ProgramFlags
from text_generation_common.places import ServerPlace
from text_generation_common.tests.slowness import Seconds, assert_within
from text_generation_launcher import cli as launcher
from text_generation_launcher.certs import CERTS, CertsFlags
from text_generation_launcher.commands import Programs
from text_generation_launcher.commands import engine as engine_command
from text_generation_launcher.commands import front as front_command
from text_generation_launcher.commands import router as router_command
from text_generation_launcher.completion import COMPLETION, CompletionFlags
from text_generation_launcher.config import LauncherConfig, LaunchPlan, ReplicaSite
from text_generation_launcher.control_call import CONTROL, ControlFlags, ScaleFlags
from text_generation_router import cli as router
from text_generation_router import engine_cli
from text_generation_router.config import RouterFlags
from text_generation_router.engine_cli import EngineFlags
from text_generation_server import cli as server
from text_generation_server.config import DownloadFlags, ServeFlags, ShardVariables

SCRIPTS = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]["scripts"]
# Packages that take long to import, without which `--help` must do.
LARGE = {
    "cryptography", "fastapi", "google", "grpc", "huggingface_hub", "pydantic", "ray", "rich",
    "starlette", "text_generation_proto", "tokenizers", "torch", "transformers", "triton", "uvloop",
}  # fmt: skip
RECORDED = Path(__file__).with_name("command_lines.golden")
CONFIGS: dict[str, tuple[ProgramFlags, Any]] = {
    "launcher": (LAUNCHER, LauncherConfig),
    "launcher certs": (CERTS, CertsFlags),
    "launcher scale": (CONTROL, ScaleFlags),
    "launcher replicas": (CONTROL, ControlFlags),
    "launcher restart-fronts": (CONTROL, ControlFlags),
    "launcher completion": (COMPLETION, CompletionFlags),
    "router": (ROUTER, RouterFlags),
    "engine": (ROUTER, EngineFlags),
    "server serve": (SHARD, ServeFlags),
    "server download-weights": (SHARD, DownloadFlags),
}
APPS = {
    "launcher": launcher.command_line(lambda config: 0, {}),
    **{f"launcher {name}": make() for name, make in launcher.COMMANDS.items()},
    "router": router.app,
    "engine": engine_cli.app,
}


def commands() -> Iterator[tuple[str, dict[str, inspect.Parameter]]]:
    """Name and parameters of each command."""
    for name, app in (APPS | {"server": server.app}).items():
        for command in app.registered_commands:
            assert command.callback is not None
            words = [name, command.name or command.callback.__name__] if name == "server" else [name]
            yield " ".join(words), dict(inspect.signature(command.callback).parameters)


def table() -> list[str]:
    return sorted(line(program, each) for program, parameters in commands() for each in parameters.values())


def line(program: str, parameter: inspect.Parameter) -> str:
    """Names, variable, type, range and default of one flag."""
    kind, info = parameter.annotation, parameter.default
    default = getattr(info, "default", info)
    if get_origin(kind) is Annotated:  # `quantize` has arguments that are not declared as flags
        kind, info = get_args(kind)
    names = "/".join(info.param_decls or ()) or flag_name(parameter.name)
    words = [
        program,
        parameter.name if isinstance(info, ArgumentInfo) else names,
        str(info.envvar or "-"),
        type_text(kind) + ("" if info.min is info.max is None else f" {info.min}..{info.max}"),
        "required" if default in (..., inspect.Parameter.empty) else str(getattr(default, "value", default)),
        "hidden" if info.hidden else "",
    ]
    return "  ".join(words).rstrip()


def type_text(kind: Any) -> str:
    kind = single_type(kind)
    if isinstance(kind, EnumType):
        return "|".join(sorted(map(str, kind)))
    return "list" if get_origin(kind) is list else str(kind.__name__)


@pytest.mark.parametrize("entry", SCRIPTS.values(), ids=SCRIPTS)
def test_help_imports_no_large_package(entry: str) -> None:
    """With what they import, `--help` took a second and more of processor time; without, a quarter of one."""
    printed: list[str] = []
    module, _, function = entry.partition(":")
    code = f"import sys\nfrom {module} import {function}\ntry: {function}()\nfinally: print('loaded', *sys.modules)"
    command = [sys.executable, "-c", code, "--help"]
    assert_within(lambda: Seconds.of(lambda: printed.append(subprocess.check_output(command, text=True))), cpu=0.4)
    told, _, loaded = printed[0].partition("loaded")
    assert "Usage: " in told and not {name.partition(".")[0] for name in loaded.split()} & LARGE


def test_names_variables_types_and_defaults_are_as_recorded():
    assert table() == RECORDED.read_text().splitlines()


def test_every_flag_is_declared_in_one_place():
    declared: dict[str, set[Flag]] = defaultdict(set)
    for config_class in (*(each for _, each in CONFIGS.values()), ShardVariables):
        for flag in flags_of(config_class):
            declared[flag.name].add(flag)
    # As in TGI, the launcher's --sharded takes true or false, and the shard's --sharded is a switch.
    assert [name for name, found in declared.items() if len(found) > 1] == ["sharded"]


def test_help_says_what_is_declared():
    for name, parameters in commands():
        program, config_class = CONFIGS.get(name, (SHARD, None))
        for flag in program.flags_of(config_class) if config_class else ():
            assert flag.help.endswith(".") and parameters[flag.name].default.help == flag.help, (name, flag.name)


def wrong_numbers() -> Iterator[tuple[str, str, str]]:
    """Each program's flags that have a range, with a number below it or above it."""
    for name, (program, config_class) in CONFIGS.items():
        for flag in program.flags_of(config_class):
            beyond = (flag.min is not None and flag.min - 1), (flag.max is not None and flag.max + 1)
            yield from ((name, flag.flag_name, str(number)) for number in beyond if number is not False)


@pytest.mark.parametrize(("name", "flag", "number"), list(wrong_numbers()))
def test_every_program_refuses_numbers_out_of_range(name: str, flag: str, number: str) -> None:
    app, words = (APPS[name], []) if name in APPS else (server.app, name.split()[1:])
    model = ["--tokenizer-name", "m"]
    special = {"router": model, "engine": [*model, "--address", "unix:///e"], "launcher scale": ["2"]}
    needed = special.get(name, [] if name.startswith("launcher") and "certs" not in name else ["m"])
    result = CliRunner().invoke(app, [*words, *needed, flag, number])
    assert result.exit_code == 2 and "Invalid value for" in result.output and flag in result.output


def test_programs_refuse_the_same_numbers() -> None:
    ranges: dict[str, set[tuple[int | None, int | None, bool]]] = defaultdict(set)
    for program, config_class in CONFIGS.values():
        for flag in program.flags_of(config_class):
            ranges[flag.name].add((flag.min, flag.max, flag.positive))
    assert not [name for name, found in ranges.items() if len(found) > 1]


def test_changes_of_programs_name_flags_that_the_program_has():
    for program in (LAUNCHER, ROUTER, SHARD):
        names = {flag.name for each, config in CONFIGS.values() if each is program for flag in flags_of(config)}
        assert program.changes.keys() <= names


PLACE = ServerPlace("/run/shard", None, "")
SITE = ReplicaSite(PLACE)
PROGRAMS = Programs("server", "router", "engine")
TOLD = {
    "router": (RouterFlags, router.app, lambda plan: router_command(plan, PROGRAMS, {}, PLACE, 7, plan.http.port, 9)),
    "front": (RouterFlags, router.app, lambda plan: front_command(plan, PROGRAMS, {}, PLACE, 0, 7, plan.http.port, 9)),
    "engine": (EngineFlags, engine_cli.app, lambda plan: engine_command(plan, PROGRAMS, {}, SITE, "unix:///e", 9)),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_program_gets_every_value_of_the_launcher_that_it_has_a_flag_for(monkeypatch, name):
    config_class, app, make_command = TOLD[name]
    shared = {flag.name: flag for flag in LAUNCHER.flags_of(LauncherConfig)}
    shared = {flag.name: shared[flag.name] for flag in flags_of(config_class) if flag.name in shared}
    for flag in flags_of(AbsentFlags):
        shared.pop(flag.name, None)  # flags that the launcher refuses, or accepts without effect
    values = {name: other_value(flag) for name, flag in shared.items()}
    groups = {item.name: item.type() for item in fields(LaunchPlan) if is_dataclass(item.type)}
    groups["cluster"] = ClusterFlags(api_workers=1)
    plan = LaunchPlan(model_id="m", num_shard=1, load_format=LoadFormat.auto, **groups)
    told = make_command(with_flags(plan, **values))
    for name in os.environ:
        monkeypatch.delenv(name)
    for name, value in told.env.items():
        monkeypatch.setenv(name, value)
    context = typer.main.get_command(app).make_context(name, list(told.argv[1:]))
    got = values_of(from_values(config_class, context.params))
    assert {name: got[name] for name in values} == values


def other_value(flag: Flag) -> object:
    """A value for the flag that differs from its default."""
    kind = single_type(flag.type)
    if get_origin(flag.type) is tuple:
        return ("a", "b")
    if isinstance(kind, EnumType):
        return next(value for value in kind if value != flag.default)
    if kind is bool:
        return not flag.default
    if flag.is_address:
        return "127.0.0.2"
    return {str: "text", int: 77, float: 0.5}[kind]
