"""`text-generation-benchmark` with TGI's flags: measures the shards of a running server. What measures is imported
later than the flags, so that `--help` answers at once.
"""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from text_generation_benchmark.output import fail
from text_generation_common.errors import CommandError
from text_generation_common.places import find_master_socket
from text_generation_router.errors import ShardsError, StartError

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
SAMPLED = (
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "top_n_tokens",
    "watermark", "do_sample",
)  # fmt: skip

Flag = typer.Option


def _flag(name: str, short: str, about: str, least: int | None = None) -> Any:
    """A flag that a variable of the same name in the environment may set too, as in TGI."""
    return Flag(f"--{name}", f"-{short}", envvar=name.upper().replace("-", "_"), min=least, help=about)


def benchmark_shards(
    context: typer.Context,
    tokenizer_name: Annotated[str | None, _flag("tokenizer-name", "t", "Local directory or hub id. Required.")] = None,
    revision: Annotated[str, Flag(envvar="REVISION", help="Revision of the hub id.")] = "main",
    batch_size: Annotated[
        list[int] | None, Flag("--batch-size", "-b", min=1, help="Repeatable; 1 2 4 8 16 32 if not given.")
    ] = None,
    sequence_length: Annotated[int, _flag("sequence-length", "s", "Tokens of each prompt.", 1)] = 10,
    decode_length: Annotated[int, _flag("decode-length", "d", "Tokens generated for each request.", 1)] = 8,
    runs: Annotated[int, _flag("runs", "r", "Measured rounds for each batch size.", 1)] = 10,
    warmups: Annotated[int, _flag("warmups", "w", "Unmeasured rounds before them.", 0)] = 1,
    port: Annotated[int, _flag("port", "p", "Port of the server whose shards are measured.")] = 3000,
    master_shard_uds_path: Annotated[
        str | None,
        _flag(
            "master-shard-uds-path",
            "m",
            "The first shard's socket, for a server that was started with its own --shard-uds-path.",
        ),
    ] = None,
    png: Annotated[Path | None, Flag(help="A PNG file with the tables as plots; needs tgi-py[plots].")] = None,
    runtime_dir: Annotated[str, Flag(envvar="XDG_RUNTIME_DIR", hidden=True)] = "",
    temperature: Annotated[float | None, Flag(envvar="TEMPERATURE")] = None,
    top_k: Annotated[int | None, Flag(envvar="TOP_K", min=0)] = None,
    top_p: Annotated[float | None, Flag(envvar="TOP_P")] = None,
    typical_p: Annotated[float | None, Flag(envvar="TYPICAL_P")] = None,
    repetition_penalty: Annotated[float | None, Flag(envvar="REPETITION_PENALTY")] = None,
    frequency_penalty: Annotated[float | None, Flag(envvar="FREQUENCY_PENALTY")] = None,
    top_n_tokens: Annotated[int | None, Flag(envvar="TOP_N_TOKENS", min=0)] = None,
    watermark: Annotated[bool, Flag("--watermark", envvar="WATERMARK")] = False,
    do_sample: Annotated[bool, Flag("--do-sample", envvar="DO_SAMPLE")] = False,
) -> None:
    """Measures the shards of an idle server: latency and throughput of prefill and decode.

    The server's router will notice the foreign steps and restart its shards at its next request.
    """
    if context.invoked_subcommand is not None:
        return
    if tokenizer_name is None:
        raise typer.BadParameter("a local directory or a hub id is required", context, param_hint="--tokenizer-name")
    from text_generation_benchmark.plots import check_png
    from text_generation_benchmark.shards.config import make_plan
    from text_generation_benchmark.shards.plots import draw_shards
    from text_generation_benchmark.shards.rounds import measure
    from text_generation_benchmark.shards.tables import tables
    from text_generation_router.text.validation import AskedSampling

    asked = AskedSampling.of({name: context.params[name] for name in SAMPLED})
    try:
        check_png(png)
        plan = make_plan(batch_size or BATCH_SIZES, sequence_length, decode_length, runs, warmups, asked)
        socket = master_shard_uds_path or find_master_socket(port, runtime_dir)
        results = asyncio.run(measure(tokenizer_name, revision, socket, plan))
    except (ValueError, StartError, ShardsError) as error:
        fail(str(error))
    except CommandError as error:
        fail(error.reason)
    typer.echo(tables(tokenizer_name, plan, asked, results))
    if png is not None:
        draw_shards(results, png)
