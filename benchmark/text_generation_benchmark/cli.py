"""The command `text-generation-benchmark`: TGI's benchmark of shards, and subcommands of our own."""

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from text_generation_benchmark.output import fail, show_table
from text_generation_benchmark.replicas.cli import autoscaling, balance, fleet, replicas, replicated
from text_generation_benchmark.shards.cli import benchmark_shards
from text_generation_benchmark.simulation.cli import replay, simulate

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
app.callback(invoke_without_command=True)(benchmark_shards)
for command in (simulate, replay, replicas, fleet, autoscaling, replicated, balance):
    app.command()(command)

Write = Annotated[Path | None, typer.Option(help="A Markdown file; its marked table is replaced.")]
Vllm = Annotated[Path, typer.Option(help="Virtual environment with vLLM for CPUs.")]
LlamaCpp = Annotated[Path, typer.Option(help="Virtual environment with llama-cpp.")]
CpuTarget = Annotated[str, typer.Option(help="The kernels of all our servers; by default the best.")]


@app.command()
def compare(
    write: Write = None,
    png: Annotated[Path | None, typer.Option(help="A PNG file with the tables as plots; needs tgi-py[plots].")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Measure only demo, m100 or m1b; repeatable.")] = None,
    vllm: Vllm = Path(".venv-vllm"),
    llama_cpp: LlamaCpp = Path(".venv-llama-cpp"),
) -> None:
    """Tokens per second of the server, vLLM, llama.cpp and transformers' generate, and the memory's bandwidth."""
    from text_generation_benchmark.compare import compare as run
    from text_generation_benchmark.peers.servers import Folders
    from text_generation_benchmark.plots import check_png
    from text_generation_benchmark.report_plots import draw_report

    try:
        check_png(png)
    except ValueError as error:
        fail(str(error))
    report = run(Folders(vllm, llama_cpp), only or ())
    show_table(report.as_markdown(), write)
    if png is not None:
        draw_report(report, png)


@app.command()
def families(
    folder: Annotated[Path, typer.Option(help="Where checkpoints are written, and stay: 13 GB.")],
    write: Write = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Measure only this model, e.g. BLOOM-560m; repeatable.")
    ] = None,
    against: Annotated[list[str] | None, typer.Option(help="llama or peers; repeatable. Default: both.")] = None,
    vllm: Vllm = Path(".venv-vllm"),
    llama_cpp: LlamaCpp = Path(".venv-llama-cpp"),
) -> None:
    """Models of four families: share of the memory limit beside a Llama of equal bytes, and speed beside peers."""
    from text_generation_benchmark.families.comparison import compare_families
    from text_generation_benchmark.peers.servers import Folders

    def show(what: str, text: str) -> None:
        show_table(text, write, f"families-{what}")

    compare_families(folder, Folders(vllm, llama_cpp), only or (), against or ("llama", "peers"), show)


@app.command()
def gguf(
    kinds: Annotated[list[str] | None, typer.Argument(help="Types of weights. Default: Q4_K_M and Q8_0.")] = None,
    model: Annotated[str, typer.Option(help="m100, m1b, m3b, or a model of `families`: Qwen3-MoE-0.9B.")] = "m1b",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each load on each server, in turns.")] = 5,
    cpu_target: CpuTarget = "",
    llama_cpp: LlamaCpp = Path(".venv-llama-cpp"),
    fork: Annotated[str, typer.Option(help="Also measured: the llama-server of a fork, with its flags.")] = "",
) -> None:
    """Tokens per second of this server and of llama.cpp's on the same GGUF file."""
    from text_generation_benchmark.family_shapes import FAMILIES
    from text_generation_benchmark.peers.quantized import beside_llama_cpp
    from text_generation_benchmark.shapes import SHAPES

    if model not in (known := (*SHAPES, *FAMILIES)):
        raise typer.BadParameter(f"{model} is not one of {', '.join(known)}", param_hint="--model")
    if (command := shlex.split(fork)) and shutil.which(command[0]) is None:
        raise typer.BadParameter(f"{command[0]} is not a program: give its path", param_hint="--fork")
    try:
        kinds = kinds or ["Q4_K_M", "Q8_0"]
        typer.echo(beside_llama_cpp(llama_cpp, model, kinds, rounds, more=_on(cpu_target), fork=command))
    except RuntimeError as error:
        fail(str(error))


@app.command()
def adapters(
    kinds: Annotated[list[str] | None, typer.Argument(help="bfloat16, Q4_K_M, vLLM-CPU. Default: all.")] = None,
    model: Annotated[str, typer.Option(help="m100, m1b or m3b.")] = "m1b",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each load on each server, in turns.")] = 5,
    on_disk: Annotated[bool, typer.Option("--on-disk", help="The first token of adapters on disk instead.")] = False,
    vllm: Vllm = Path(".venv-vllm"),
    llama_cpp: LlamaCpp = Path(".venv-llama-cpp"),
) -> None:
    """Tokens per second of requests for 8 LoRA adapters, and of a server without adapters."""
    from text_generation_benchmark.peers.adapters import KINDS, beside_no_adapters, from_disk
    from text_generation_benchmark.peers.servers import Folders
    from text_generation_benchmark.shapes import SHAPES

    if model not in SHAPES:
        raise typer.BadParameter(f"{model} is not one of {', '.join(SHAPES)}", param_hint="--model")
    try:
        if on_disk:
            typer.echo(from_disk(model))
        else:
            typer.echo(beside_no_adapters(model, rounds, kinds or KINDS, Folders(vllm, llama_cpp)))
    except RuntimeError as error:
        fail(str(error))


@app.command()
def quantized(
    model: Annotated[str, typer.Option(help="m100, m1b or m3b.")] = "m1b",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each load on each server, in turns.")] = 5,
    cpu_target: CpuTarget = "",
    with_vllm: Annotated[
        bool, typer.Option("--beside-vllm", help="Quantized checkpoints beside vLLM instead.")
    ] = False,
    vllm: Vllm = Path(".venv-vllm"),
) -> None:
    """Tokens per second with weights in 8 and 4 bits, with and without activations in 8 bits, and in bfloat16."""
    from text_generation_benchmark.peers.quantized import beside_bfloat16, beside_vllm
    from text_generation_benchmark.shapes import SHAPES

    if model not in SHAPES:
        raise typer.BadParameter(f"{model} is not one of {', '.join(SHAPES)}", param_hint="--model")
    try:
        more = _on(cpu_target)
        typer.echo(beside_vllm(vllm, model, rounds, more) if with_vllm else beside_bfloat16(model, rounds, more))
    except RuntimeError as error:
        fail(str(error))


@app.command()
def turns(
    before: Annotated[Path, typer.Option(help="text-generation-launcher of the other version, or its checkout.")],
    turns: Annotated[int | None, typer.Option(min=6, help="Runs of each load on each version; by default 9.")] = None,
    model: Annotated[str, typer.Option(help="m100 or m1b.")] = "m100",
    route: Annotated[str, typer.Option(help="generate, or chat: ten messages through the chat template.")] = "generate",
    guard: Annotated[bool, typer.Option("--guard", help="Short loads; fails if it is more than 5 % slower.")] = False,
    seconds: Annotated[float, typer.Option(min=1, help="How long --guard measures, besides the starts.")] = 150,
) -> None:
    """Tokens per second of this version and another, in turns: the median of the ratios and its 95 % interval."""
    from text_generation_benchmark import turns as measuring
    from text_generation_benchmark.figures import FEWEST_TURNS
    from text_generation_benchmark.load import dialect_of
    from text_generation_benchmark.shapes import SHAPES

    if model not in SHAPES:
        raise typer.BadParameter(f"{model} is not one of {', '.join(SHAPES)}", param_hint="--model")
    try:
        other, dialect = measuring.Side(measuring.launcher_of(before)), dialect_of(route)
    except (FileNotFoundError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    this = measuring.Side()
    if not guard:
        measured = measuring.compare_servers(other, this, model, dialect, measuring.WORKLOADS, turns or 9)
        typer.echo(measuring.as_markdown(measured))
        return
    loads, least = measuring.GUARD_WORKLOADS, turns or FEWEST_TURNS
    measured = measuring.compare_servers(other, this, model, dialect, loads, least, seconds)
    typer.echo(measuring.verdicts(measured))
    raise typer.Exit(int(any(each.has_lost for each in measured)))


@app.command()
def micro(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Default: all.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", "-s", help="SETTING=VALUE; repeatable.")] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Print the micro-benchmarks with their settings; run none.")
    ] = False,
    write: Annotated[Path | None, typer.Option(help="A Markdown file; the tables marked NAME are replaced.")] = None,
) -> None:
    """Micro-benchmarks: attention with a window, the profile of a step, the scheduler, detokenizing, a front's choice,
    engines' news, the router."""
    from text_generation_benchmark.micro.table import listing, run_micros

    if listed:
        typer.echo(listing())
        return
    try:
        for name, text in run_micros(names or (), settings or ()):
            show_table(text, write, name)
    except (ValueError, RuntimeError) as error:
        fail(str(error))


@app.command()
def fronts(
    turns: Annotated[int, typer.Option(min=6, help="Runs of the load on each of two servers, in turns.")] = 9,
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure processor time.")] = 10,
    streams: Annotated[int, typer.Option(min=2, help="Streams at a time.")] = 64,
    step_ms: Annotated[float, typer.Option(min=0, help="What the shard without a model takes for a step.")] = 10,
    only: Annotated[
        list[str] | None, typer.Option(help="speed, first, time, stopped; repeatable. Default: all.")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="A Markdown file; its marked tables are replaced.")] = None,
) -> None:
    """What it costs that front and engine are processes of their own: speed, processor time, and a stopped front."""
    from text_generation_benchmark.fronts import PARTS, run_part

    for part in only or PARTS:
        if part not in PARTS:
            raise typer.BadParameter(f"{part} is not one of {', '.join(PARTS)}", param_hint="--only")
        show_table(run_part(part, turns, seconds, streams, step_ms / 1000), write, f"fronts {part}")


def _on(cpu_target: str) -> tuple[str, ...]:
    return ("--cpu-target", cpu_target) if cpu_target else ()


def main() -> None:
    app()
