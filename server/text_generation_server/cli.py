"""The shard's command line: serves a model, or downloads its weights. Reads the environment, once.

Imports stay light, so that `--help` answers at once: torch and huggingface_hub are imported by the command that needs
them.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from text_generation_common import faults, places
from text_generation_common.errors import CommandError, MemoryLimitError, ShardError
from text_generation_common.flags.declaration import (
    VariableError,
    flags_of,
    from_environment,
    from_values,
    missing_features,
    unsupported_choices,
    values_of,
    wrong_numbers,
)
from text_generation_common.flags.kinds import LoadFormat
from text_generation_common.flags.model import CacheFlags
from text_generation_common.flags.programs import SHARD
from text_generation_common.logs import setup_logging
from text_generation_common.memory import is_out_of_memory, refused_while_loading
from text_generation_common.typer_command import ReportingCommand, lasting, make_app, taking
from text_generation_common.weights.headers import weight_files
from text_generation_server.config import DownloadFlags, ServeFlags, ShardConfig, ShardVariables, graph_sizes
from text_generation_server.errors import OptionError

if TYPE_CHECKING:
    from text_generation_server.weights.files import HubAccess


def serve(values: dict[str, Any]) -> None:
    setup_logging(values["logger_level"], values["json_output"])
    _refuse(ServeFlags, values)
    flags = from_values(ServeFlags, values)
    variables = _variables(os.environ)
    _check_group(flags.sharded, variables, os.environ)
    _set_up_faults(variables, flags.process.testing)
    _check_lengths(flags.max_input_tokens, variables.max_total_tokens)

    from text_generation_common.weights.headers import verify

    config = ShardConfig(
        model_path=_folder(flags.command.model_id, flags.command.revision, _hub_access(os.environ)),
        uds_path=flags.uds_path or _own_path(flags.port, variables.inherited.runtime_dir),
        rank=variables.rank,
        world_size=variables.world_size,
        epoch=variables.epoch,
        machine_shards=variables.machine_shards,
        max_total_tokens=variables.max_total_tokens,
        load_format=flags.command.load_format,
        compute=flags.compute,
        shard=variables.shard,
        adapters=variables.adapters,
        step_log=variables.step_log,
        disable_grammar_support=flags.disable_grammar_support,
        with_families=bool(variables.with_families) or not flags.process.testing,
    )
    if config.load_format is not LoadFormat.dummy:
        verify(config.model_path)
    try:
        if variables.template_fd is None:
            with lasting():
                from text_generation_server import server

            server.serve(config)
        else:
            with lasting():
                from text_generation_server import template

            testing = flags.process.testing
            template.serve(
                config, variables.template_fd, lambda epoch: _set_up_faults(replace(variables, epoch=epoch), testing)
            )
    except Exception as error:  # libraries have many classes, also while they are imported
        if not is_out_of_memory(error):
            raise
        files = () if config.load_format is LoadFormat.dummy else weight_files(config.model_path)
        weights = sum(file.stat().st_size for file in files)
        raise MemoryLimitError(refused_while_loading(error, weights)) from error


def download_weights(values: dict[str, Any]) -> None:
    setup_logging(values["logger_level"], values["json_output"])
    _refuse(DownloadFlags, values)
    flags = from_values(DownloadFlags, values)
    if flags.extension != ".safetensors":
        raise OptionError(f"--extension {flags.extension} is not supported: only .safetensors can be served")

    from text_generation_server.weights.files import LineStyle
    from text_generation_server.weights.prepare import prepare, prepare_without_weights

    style = LineStyle(flags.progress_interval, has_fields=flags.json_output)
    access = replace(_hub_access(os.environ), progress=style)
    if flags.command.load_format is LoadFormat.dummy:
        prepare_without_weights(flags.command.model_id, access)
    else:
        prepare(flags.command.model_id, flags.command.revision, access, flags.auto_convert)


def quantize(arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL_ID OUTPUT_DIR")] = None) -> NoReturn:
    """Not supported yet."""
    raise OptionError("the command quantize is not supported yet: use a model that is quantized already")


app = make_app("The part of the server that runs the model, and commands to prepare a model's weights.")
for name, run, flags, text in (
    ("serve", serve, ServeFlags, "Run one shard of a model whose files are on this machine."),
    ("download-weights", download_weights, DownloadFlags, "Download a model, convert and check its weights."),
):
    app.command(name, cls=ReportingCommand, help=text)(taking(run, SHARD, flags))
app.command(context_settings={"ignore_unknown_options": True})(quantize)


def main() -> None:
    """Runs a command. Prints an error that the user can correct as one line on stderr. Exits with status 2 on wrong
    usage.
    """
    try:
        app()
    except ShardError as error:
        print(f"Error: {error}", file=sys.stderr)
        # EX_CONFIG tells the launcher that another start of the shard cannot help.
        sys.exit(os.EX_CONFIG if sys.argv[1:2] == ["serve"] else 1)


def _refuse(config_class: Any, values: Mapping[str, Any]) -> None:
    declared = tuple(SHARD.flags_of(config_class))
    for flag in missing_features(declared, values):
        raise OptionError(f"{flag.flag_name} is not supported yet: leave it out")
    for flag in unsupported_choices(declared, values):
        supported = ", ".join(flag.choices or ())
        raise OptionError(f"{flag.flag_name} {values[flag.name]} is not supported: use {supported}")
    for reason in wrong_numbers(declared, values):
        raise OptionError(reason)


def _variables(environ: Mapping[str, str]) -> ShardVariables:
    try:
        variables = from_environment(ShardVariables, environ, PARSERS)
    except VariableError as error:
        raise OptionError(str(error)) from None
    for reason in wrong_numbers(flags_of(ShardVariables), values_of(variables)):
        raise OptionError(reason)
    return variables


def _check_group(sharded: bool, variables: ShardVariables, environ: Mapping[str, str]) -> None:
    for name in ("RANK", "WORLD_SIZE") if sharded else ():
        if not environ.get(name):
            raise OptionError(f"{name} must be set when --sharded is used")
    rank, world_size = variables.rank, variables.world_size
    if not 0 <= rank < world_size:
        raise OptionError(f"RANK {rank} does not exist in a group of {world_size}: use 0 to {world_size - 1}")


def _folder(model_id: str, revision: str | None, access: "HubAccess") -> Path:
    from text_generation_server.weights.files import local_directory

    if (folder := local_directory(model_id, access)) is not None:
        return folder
    from text_generation_server.weights.hub import resolve

    return resolve(model_id, revision, access)


def _own_path(port: int, runtime_dir: str) -> str:
    """Prefix of the socket of a shard without a launcher, in a private folder that is made here."""
    place = places.of_port(port, runtime_dir)
    try:
        place.make()
    except CommandError as error:
        raise OptionError(error.reason) from None
    return place.prefix


def _set_up_faults(variables: ShardVariables, testing: bool) -> None:
    try:
        faults.setup_command(variables.inherited.failpoints, testing, rank=variables.rank, epoch=variables.epoch)
    except ValueError as error:
        raise OptionError(str(error)) from None


def _check_lengths(max_input_tokens: int | None, max_total_tokens: int | None) -> None:
    if max_input_tokens is None or max_total_tokens is None:
        return
    if max_input_tokens >= max_total_tokens:
        raise OptionError(f"`max_input_tokens`({max_input_tokens}) must be < `max_total_tokens`({max_total_tokens})")


def _sizes(text: str) -> str:
    graph_sizes(text)
    return text


def _rope_scaling(text: str) -> str:
    if text not in ("linear", "dynamic"):
        raise ValueError("use linear or dynamic")
    return text


PARSERS: Mapping[str, Callable[[str], object]] = {
    "rope_scaling": _rope_scaling,
    "cuda_graphs": _sizes,
}


def _hub_access(environ: Mapping[str, str]) -> "HubAccess":
    from text_generation_server.weights.files import HubAccess

    cache = from_environment(CacheFlags, environ, {})
    return HubAccess(
        override=Path(cache.weights_cache_override) if cache.weights_cache_override else None,
        cache_dir=Path(cache.huggingface_hub_cache) if cache.huggingface_hub_cache else None,
        token=environ.get("HF_TOKEN") or environ.get("HF_API_TOKEN") or None,
    )


if __name__ == "__main__":
    main()
