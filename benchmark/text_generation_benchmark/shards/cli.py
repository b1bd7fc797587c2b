"""`text-generation-benchmark` with TGI's flags: measures the shards of a running server. What measures is imported
later than the flags, so that `--help` answers at once.
"""

import asyncio
from typing import Annotated

import typer

from text_generation_benchmark.output import fail
from text_generation_common.errors import CommandError
from text_generation_common.places import find_master_socket
from text_generation_router.errors import ShardsError, StartError

BATCH_SIZES = (1, 2, 4, 8, 16, 32)

Flag = typer.Option


def benchmark_shards(
    context: typer.Context,
    tokenizer_name: Annotated[
        str | None, Flag("--tokenizer-name", "-t", envvar="TOKENIZER_NAME", help="Local directory or hub id. Required.")
    ] = None,
    revision: Annotated[str, Flag(envvar="REVISION", help="Revision of the hub id.")] = "main",
    batch_size: Annotated[
        list[int] | None, Flag("--batch-size", "-b", min=1, help="Repeatable; 1 2 4 8 16 32 if not given.")
    ] = None,
    sequence_length: Annotated[
        int, Flag("--sequence-length", "-s", envvar="SEQUENCE_LENGTH", min=1, help="Tokens of each prompt.")
    ] = 10,
    decode_length: Annotated[
        int, Flag("--decode-length", "-d", envvar="DECODE_LENGTH", min=1, help="Tokens generated for each request.")
    ] = 8,
    runs: Annotated[int, Flag("--runs", "-r", envvar="RUNS", min=1, help="Measured rounds for each batch size.")] = 10,
    warmups: Annotated[
        int, Flag("--warmups", "-w", envvar="WARMUPS", min=0, help="Unmeasured rounds before them.")
    ] = 1,
    port: Annotated[
        int, Flag("--port", "-p", envvar="PORT", help="Port of the server whose shards are measured.")
    ] = 3000,
    master_shard_uds_path: Annotated[
        str | None,
        Flag(
            "--master-shard-uds-path",
            "-m",
            envvar="MASTER_SHARD_UDS_PATH",
            help="The first shard's socket, for a server that was started with its own --shard-uds-path.",
        ),
    ] = None,
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
    from text_generation_benchmark.shards.config import ShardBenchmarkConfig
    from text_generation_benchmark.shards.measuring import measure
    from text_generation_benchmark.shards.tables import tables
    from text_generation_router.text.validation import AskedSampling

    config = ShardBenchmarkConfig(
        tokenizer_name,
        revision,
        master_shard_uds_path or find_shard(port, runtime_dir),
        tuple(batch_size or BATCH_SIZES),
        sequence_length,
        decode_length,
        runs,
        warmups,
        AskedSampling.of(
            {
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "typical_p": typical_p,
                "repetition_penalty": repetition_penalty,
                "frequency_penalty": frequency_penalty,
                "top_n_tokens": top_n_tokens,
                "watermark": watermark,
                "do_sample": do_sample,
            }
        ),
    )
    try:
        results = asyncio.run(measure(config, config.plan()))
    except (StartError, ShardsError) as error:
        fail(str(error))
    typer.echo(tables(config, results))


def find_shard(port: int, runtime_dir: str) -> str:
    try:
        return find_master_socket(port, runtime_dir)
    except CommandError as error:
        fail(error.reason)
