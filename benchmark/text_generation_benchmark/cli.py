"""The command `text-generation-benchmark`: TGI's benchmark of shards, and subcommands of our own."""

from pathlib import Path
from typing import Annotated

import typer

from text_generation_benchmark.families.against import Against
from text_generation_benchmark.output import show_table
from text_generation_benchmark.replicas.cli import autoscaling, balance, choice, fleet, replicas, replicated
from text_generation_benchmark.shards.cli import benchmark_shards
from text_generation_benchmark.simulation.cli import replay, simulate
from text_generation_common.flags.kinds import CpuTarget
from text_generation_common.model_files import demo_directory

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
app.callback(invoke_without_command=True)(benchmark_shards)
app.command()(simulate)
app.command()(replay)
app.command()(replicas)
app.command()(fleet)
app.command()(choice)
app.command()(autoscaling)
app.command()(replicated)
app.command()(balance)


@app.command()
def compare(
    write: Annotated[Path | None, typer.Option(help="A Markdown file; its marked table is replaced.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Measure only demo, m100 or m1b; repeatable.")] = None,
    vllm: Annotated[Path, typer.Option(help="Virtual environment with vLLM for CPUs.")] = Path(".venv-vllm"),
    llama_cpp: Annotated[Path, typer.Option(help="Virtual environment with llama-cpp.")] = Path(".venv-llama-cpp"),
) -> None:
    """Tokens per second of the server, vLLM, llama.cpp and transformers' generate, and the memory's bandwidth."""
    from text_generation_benchmark.compare import Folders
    from text_generation_benchmark.compare import compare as run

    show_table(run(Folders(vllm, llama_cpp), only or ()).as_markdown(), write)


@app.command()
def families(
    folder: Annotated[Path, typer.Option(help="Where checkpoints are written, and stay: 13 GB.")],
    write: Annotated[Path | None, typer.Option(help="A Markdown file; its marked table is replaced.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Measure only this model, e.g. BLOOM-560m; repeatable.")
    ] = None,
    against: Annotated[list[Against] | None, typer.Option(help="Default: both.")] = None,
    vllm: Annotated[Path, typer.Option(help="Virtual environment with vLLM for CPUs.")] = Path(".venv-vllm"),
    llama_cpp: Annotated[Path, typer.Option(help="Virtual environment with llama-cpp.")] = Path(".venv-llama-cpp"),
) -> None:
    """Models of four families: share of the memory limit beside a Llama of equal bytes, and speed beside peers."""
    from text_generation_benchmark.compare import Folders
    from text_generation_benchmark.families.comparison import compare_families

    def show(what: Against, text: str) -> None:
        show_table(text, write, f"families-{what}")

    compare_families(folder, Folders(vllm, llama_cpp), only or (), against or tuple(Against), show)


@app.command()
def windows(
    write: Annotated[Path | None, typer.Option(help="A Markdown file; its marked table is replaced.")] = None,
) -> None:
    """Time of attention in a layer with a window, by the context."""
    from text_generation_benchmark.window_speed import measure

    show_table(measure().as_markdown(), write, "windows")


@app.command()
def profile(
    model_id: Annotated[Path, typer.Option(help="Directory of the model.")],
    rows: Annotated[int, typer.Option(min=1, help="Rows that decode together.")] = 64,
    context: Annotated[int, typer.Option(min=1, help="Tokens of context of each row.")] = 1000,
    prompt: Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt, instead of rows that decode.")] = None,
    depth: Annotated[int, typer.Option(min=0, help="Tokens before those of the prompt, computed earlier.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 20,
    dtype: Annotated[str, typer.Option(help="Type of weights, keys and values.")] = "bfloat16",
    cpu_target: Annotated[CpuTarget | None, typer.Option(help="Kernels; default: the best.")] = None,
) -> None:
    """Prints where the time of a decode step, or of a prompt's step, goes on a CPU, and its share of the limit."""
    import torch

    from text_generation_benchmark.ceilings import Meter
    from text_generation_benchmark.step_profile import as_markdown, profile_prompt, profile_step

    meter = Meter(getattr(torch, dtype))
    before = meter.measure()
    if prompt is None:
        profiled = profile_step(model_id, rows, context, steps, dtype, cpu_target)
    else:
        profiled = profile_prompt(model_id, prompt, depth, steps, dtype, cpu_target)
    typer.echo(as_markdown(profiled, before.higher(meter.measure())))


@app.command()
def turns(
    before: Annotated[Path, typer.Option(help="text-generation-launcher of the other version.")],
    turns: Annotated[int, typer.Option(min=6, help="Runs of each load on each version.")] = 9,
    model: Annotated[str, typer.Option(help="m100 or m1b.")] = "m100",
    route: Annotated[str, typer.Option(help="generate, or chat: ten messages through the chat template.")] = "generate",
) -> None:
    """Tokens per second of this version and another, in turns: the median of the ratios and its 95 % interval."""
    from text_generation_benchmark.shapes import SHAPES
    from text_generation_benchmark.turns import DIALECTS, as_markdown, compare_versions

    for name, given, known in (("--model", model, SHAPES), ("--route", route, DIALECTS)):
        if given not in known:
            raise typer.BadParameter(f"{given} is not one of {', '.join(known)}", param_hint=name)
    typer.echo(as_markdown(compare_versions(before, model, DIALECTS[route], turns)))


@app.command()
def guard(
    before: Annotated[Path, typer.Option(help="The other checkout, with its .venv, or its launcher.")],
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure, besides the starts.")] = 150,
) -> None:
    """Fails if this version is more than 5 % slower than another one, and noise does not explain it."""
    from text_generation_benchmark.guard import as_text, keep_speed, launcher_of

    try:
        verdicts = keep_speed(launcher_of(before), seconds)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error), param_hint="--before") from None
    typer.echo(as_text(verdicts))
    raise typer.Exit(int(any(verdict.has_lost for verdict in verdicts)))


@app.command()
def decide(
    steps: Annotated[int, typer.Option(min=1, help="Measured decisions.")] = 2000,
    write: Annotated[Path | None, typer.Option(help="A Markdown file; its marked table is replaced.")] = None,
) -> None:
    """CPU time of a decision of the scheduler, with a long queue."""
    from text_generation_benchmark.scheduler_speed import measure

    show_table(measure(steps).as_markdown(), write, "decide")


@app.command()
def detokenize(rounds: Annotated[int, typer.Option(min=1, help="Rounds; the best one counts.")] = 50) -> None:
    """CPU time of turning a token id into text."""
    from text_generation_benchmark.detokenization_speed import as_markdown, measure

    typer.echo(as_markdown(measure(demo_directory(), rounds)))


@app.command()
def router(
    streams: Annotated[list[int] | None, typer.Option(min=1, help="Streams at a time; repeatable.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure each number of streams.")] = 5,
    step_ms: Annotated[float, typer.Option(min=0, help="What the shard takes for a step.")] = 0,
    route: Annotated[str, typer.Option(help="generate or chat.")] = "generate",
    write: Annotated[Path | None, typer.Option(help="A Markdown file; its marked table is replaced.")] = None,
) -> None:
    """Processor time of the router per token, without a model, beside a program that only writes the same bytes."""
    from text_generation_benchmark.router.speed import STREAMS, as_markdown, measure
    from text_generation_benchmark.turns import DIALECTS

    if route not in DIALECTS:
        raise typer.BadParameter(f"{route} is not one of {', '.join(DIALECTS)}", param_hint="--route")
    times = measure(demo_directory(), streams or STREAMS, seconds, DIALECTS[route], step_ms / 1000)
    show_table(as_markdown(times), write, "router")


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
    from text_generation_benchmark.fronts.cli import PARTS, run_part

    for part in only or PARTS:
        if part not in PARTS:
            raise typer.BadParameter(f"{part} is not one of {', '.join(PARTS)}", param_hint="--only")
        show_table(run_part(part, turns, seconds, streams, step_ms / 1000), write, f"fronts {part}")


def main() -> None:
    app()
