"""The shard's command line: serves a model, or downloads its weights. Reads the environment, once.

Imports stay light, so that `--help` answers at once: torch and huggingface_hub are imported by the command that needs
them.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer

from text_generation_common import faults, places
from text_generation_common.errors import CommandError
from text_generation_common.logs import setup_logging
from text_generation_server.config import DTYPES, KV_CACHE_DTYPES, LOAD_FORMATS, QUANTIZATIONS, ShardConfig
from text_generation_server.errors import OptionError, ShardError

if TYPE_CHECKING:
    from text_generation_server.weights.access import HubAccess

T = TypeVar("T")

app = typer.Typer(
    help="The part of the server that runs the model, and commands to prepare a model's weights.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ModelId = Annotated[str, typer.Argument(help="A model id of the Hugging Face hub, or a directory.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the model.")]
LoggerLevel = Annotated[str, typer.Option(help="error, warn, info, debug, or a filter like info,NAME=debug.")]
JsonOutput = Annotated[
    bool, typer.Option("--json-output/--no-json-output", help="Write each log line as one JSON object.")
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code/--no-trust-remote-code", help="Not supported.")]
LoadFormat = Annotated[str, typer.Option(help="auto: read the weights from files; dummy: random weights.")]


@app.command()
def serve(
    model_id: ModelId,
    revision: Revision = None,
    sharded: Annotated[
        bool, typer.Option("--sharded/--no-sharded", help="Be one rank of a group; needs RANK and WORLD_SIZE.")
    ] = False,
    quantize: Annotated[
        str | None, typer.Option(help=f"{', '.join(QUANTIZATIONS)}; not quantized when not given.")
    ] = None,
    speculate: Annotated[int | None, typer.Option(help="Not supported yet.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)}; the checkpoint's type when not given.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(KV_CACHE_DTYPES)}; the model's type when not given.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    uds_path: Annotated[
        str | None, typer.Option(help="Listen on unix://UDS_PATH-RANK; in the folder of --port when not given.")
    ] = None,
    port: Annotated[
        int, typer.Option(help="Port of this shard's router; the socket's folder is named after it.")
    ] = 3000,
    logger_level: LoggerLevel = "INFO",
    json_output: JsonOutput = False,
    otlp_endpoint: Annotated[str | None, typer.Option(help="Not supported yet.")] = None,
    otlp_service_name: Annotated[
        str, typer.Option(help="Used with --otlp-endpoint only.")
    ] = "text-generation-inference.server",
    max_input_tokens: Annotated[int | None, typer.Option(min=1, help="Longest prompt; the router enforces it.")] = None,
    load_format: LoadFormat = "auto",
    testing: Annotated[bool, typer.Option("--testing", hidden=True)] = False,
) -> None:
    """Run one shard of a model whose files are on this machine."""
    setup_logging(logger_level, json_output)
    _refuse("--speculate", speculate)
    _refuse("--trust-remote-code", trust_remote_code)
    _refuse("--otlp-endpoint", otlp_endpoint)
    _check_choice("--quantize", quantize, QUANTIZATIONS)
    _check_choice("--dtype", dtype, DTYPES)
    _check_choice("--kv-cache-dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    _check_choice("--load-format", load_format, LOAD_FORMATS)
    environment = os.environ
    _check_group(sharded, environment)
    _set_up_faults(environment, testing)
    _check_lengths(max_input_tokens, environment)

    from text_generation_server.weights.files import verify
    from text_generation_server.weights.hub import resolve

    config = ShardConfig(
        model_path=resolve(model_id, revision, _hub_access(environment)),
        uds_path=uds_path or _own_path(port, environment),
        rank=_variable(environment, "RANK", int, 0),
        world_size=_variable(environment, "WORLD_SIZE", int, 1),
        epoch=_variable(environment, "TGI_EPOCH", int, 1),
        dtype=dtype,
        quantize=quantize,
        kv_cache_dtype=kv_cache_dtype,
        max_total_tokens=_variable(environment, "MAX_TOTAL_TOKENS", _positive, None),
        rope_scaling=_variable(environment, "ROPE_SCALING", _rope_scaling, None),
        rope_factor=_variable(environment, "ROPE_FACTOR", float, None),
        watermark_gamma=_variable(environment, "WATERMARK_GAMMA", float, 0.5),
        watermark_delta=_variable(environment, "WATERMARK_DELTA", float, 2.0),
        graph_sizes=_variable(environment, "CUDA_GRAPHS", _sizes, None),
        memory_fraction=_variable(environment, "CUDA_MEMORY_FRACTION", _fraction, 1.0),
        load_format=load_format,
        step_log=_variable(environment, "STEP_LOG", Path, None),
    )
    if load_format != "dummy":
        verify(config.model_path)

    from text_generation_server import server

    server.serve(config)


@app.command()
def download_weights(
    model_id: ModelId,
    revision: Revision = None,
    extension: Annotated[str, typer.Option(help="Only .safetensors can be served.")] = ".safetensors",
    auto_convert: Annotated[
        bool,
        typer.Option("--auto-convert/--no-auto-convert", help="Convert .bin weights if there are no .safetensors."),
    ] = True,
    logger_level: LoggerLevel = "INFO",
    json_output: JsonOutput = False,
    trust_remote_code: TrustRemoteCode = False,
    merge_lora: Annotated[bool, typer.Option("--merge-lora/--no-merge-lora", help="Not supported yet.")] = False,
    load_format: LoadFormat = "auto",
) -> None:
    """Download a model, convert its weights if needed, and check them."""
    setup_logging(logger_level, json_output)
    _refuse("--trust-remote-code", trust_remote_code)
    _refuse("--merge-lora", merge_lora)
    if extension != ".safetensors":
        raise OptionError(f"--extension {extension} is not supported: only .safetensors can be served")
    _check_choice("--load-format", load_format, LOAD_FORMATS)

    from text_generation_server.weights.prepare import prepare, prepare_without_weights

    if load_format == "dummy":
        prepare_without_weights(model_id, _hub_access(os.environ))
    else:
        prepare(model_id, revision, _hub_access(os.environ), auto_convert)


@app.command(context_settings={"ignore_unknown_options": True})
def quantize(arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL_ID OUTPUT_DIR")] = None) -> NoReturn:
    """Not supported yet."""
    raise OptionError("the command quantize is not supported yet: use a model that is quantized already")


def main() -> None:
    """Prints an error that the user can correct as one line on stderr. Exits with status 2 on wrong usage."""
    try:
        app()
    except ShardError as error:
        print(f"Error: {error}", file=sys.stderr)
        # EX_CONFIG tells the launcher that another start of the shard cannot help.
        sys.exit(os.EX_CONFIG if sys.argv[1:2] == ["serve"] else 1)


def _refuse(option: str, value: object) -> None:
    """Refuses an option that is not supported, unless its value asks for nothing (absent, 0, off)."""
    if value:
        raise OptionError(f"{option} is not supported yet: leave it out")


def _check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise OptionError(f"{name} {value} is not supported: use {', '.join(choices)}")


def _check_group(sharded: bool, environment: Mapping[str, str]) -> None:
    for name in ("RANK", "WORLD_SIZE") if sharded else ():
        if not environment.get(name):
            raise OptionError(f"{name} must be set when --sharded is used")
    world_size = _variable(environment, "WORLD_SIZE", _positive, 1)
    rank = _variable(environment, "RANK", int, 0)
    if not 0 <= rank < world_size:
        raise OptionError(f"RANK {rank} does not exist in a group of {world_size}: use 0 to {world_size - 1}")


def _own_path(port: int, environment: Mapping[str, str]) -> str:
    """Prefix of the socket of a shard without a launcher, in a private folder that is made here."""
    place = places.of_port(port, environment.get("XDG_RUNTIME_DIR", ""))
    try:
        place.make()
    except CommandError as error:
        raise OptionError(error.reason) from None
    return place.prefix


def _set_up_faults(environment: Mapping[str, str], testing: bool) -> None:
    rank, epoch = environment.get("RANK", "0"), environment.get("TGI_EPOCH", "1")
    try:
        faults.setup_command(environment.get("FAILPOINTS", ""), testing, rank=rank, epoch=epoch)
    except ValueError as error:
        raise OptionError(str(error)) from None


def _check_lengths(max_input_tokens: int | None, environment: Mapping[str, str]) -> None:
    max_total_tokens = _variable(environment, "MAX_TOTAL_TOKENS", _positive, None)
    if max_input_tokens is None or max_total_tokens is None:
        return
    if max_input_tokens >= max_total_tokens:
        raise OptionError(f"`max_input_tokens`({max_input_tokens}) must be < `max_total_tokens`({max_total_tokens})")


def _variable(environment: Mapping[str, str], name: str, parse: Callable[[str], T], default: T) -> T:
    text = environment.get(name, "")
    if not text:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise OptionError(f"{name} has the value {text!r}, which is not usable: {error}") from None


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError("it must be at least 1")
    return number


def _sizes(text: str) -> tuple[int, ...]:
    """Numbers of rows, sorted. Zeros are dropped, so "0" gives no numbers."""
    return tuple(sorted({size for size in map(_natural, text.split(",")) if size}))


def _natural(text: str) -> int:
    if (number := int(text)) < 0:
        raise ValueError("it must not be negative")
    return number


def _fraction(text: str) -> float:
    if not 0 < (number := float(text)) <= 1:
        raise ValueError("it must be above 0, and at most 1")
    return number


def _rope_scaling(text: str) -> str:
    if text not in ("linear", "dynamic"):
        raise ValueError("use linear or dynamic")
    return text


def _hub_access(environment: Mapping[str, str]) -> "HubAccess":
    from text_generation_server.weights.access import HubAccess

    override = environment.get("WEIGHTS_CACHE_OVERRIDE")
    cache = environment.get("HUGGINGFACE_HUB_CACHE")
    return HubAccess(
        override=Path(override) if override else None,
        cache_dir=Path(cache) if cache else None,
        token=environment.get("HF_TOKEN") or environment.get("HF_API_TOKEN") or None,
    )


if __name__ == "__main__":
    main()
