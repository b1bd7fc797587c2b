"""`text-generation-benchmark` measures shards, as TGI's; its `compare` the server, beside its peers; its `simulate`
tries the scheduler without either."""

from pathlib import Path
from typing import Annotated

import typer

from text_generation_benchmark.output import show_table
from text_generation_benchmark.shards.cli import benchmark_shards
from text_generation_benchmark.simulation.cli import replay, simulate
from text_generation_launcher.model import demo_directory

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
app.callback(invoke_without_command=True)(benchmark_shards)
app.command()(simulate)
app.command()(replay)


@app.command()
def compare(
    write: Annotated[Path | None, typer.Option(help="A Markdown file whose marked table is replaced.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Measure demo, m100 or m1b alone; may be repeated.")] = None,
    vllm: Annotated[Path, typer.Option(help="A virtual environment with vLLM for CPUs.")] = Path(".venv-vllm"),
    llama_cpp: Annotated[Path, typer.Option(help="One with llama-cpp-python's server.")] = Path(".venv-llama-cpp"),
) -> None:
    """Tokens per second beside vLLM, llama.cpp, transformers' generate and the memory's speed, in one run."""
    from text_generation_benchmark.compare import Folders
    from text_generation_benchmark.compare import compare as run

    show_table(run(Folders(vllm, llama_cpp), only or ()).as_markdown(), write)


@app.command()
def profile(
    model_id: Annotated[Path, typer.Option(help="A directory with the model.")],
    rows: Annotated[int, typer.Option(min=1)] = 64,
    context: Annotated[int, typer.Option(min=1, help="Tokens that each row sees.")] = 1000,
    steps: Annotated[int, typer.Option(min=1)] = 20,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
) -> None:
    """Where the time of a decode step goes, on a CPU."""
    from text_generation_benchmark.step_profile import as_markdown, profile_step

    typer.echo(as_markdown(profile_step(model_id, rows, context, steps, dtype)))


@app.command()
def turns(
    before: Annotated[Path, typer.Option(help="The other version's text-generation-launcher.")],
    turns: Annotated[int, typer.Option(min=6, help="How often each load is taken of each version.")] = 9,
    model: Annotated[str, typer.Option(help="m100 or m1b.")] = "m100",
    route: Annotated[str, typer.Option(help="generate, or chat: ten messages through the template.")] = "generate",
) -> None:
    """Tokens per second of this version and another one, in turns, and the median of the ratios with its interval."""
    from text_generation_benchmark.shapes import SHAPES
    from text_generation_benchmark.turns import DIALECTS, as_markdown, compare_versions

    for name, given, known in (("--model", model, SHAPES), ("--route", route, DIALECTS)):
        if given not in known:
            raise typer.BadParameter(f"{given} is not one of {', '.join(known)}", param_hint=name)
    typer.echo(as_markdown(compare_versions(before, model, DIALECTS[route], turns)))


@app.command()
def decide(
    steps: Annotated[int, typer.Option(min=1)] = 2000,
    write: Annotated[Path | None, typer.Option(help="A Markdown file whose marked table is replaced.")] = None,
) -> None:
    """What a decision of the scheduler costs, with a long queue."""
    from text_generation_benchmark.scheduler_speed import measure

    show_table(measure(steps).as_markdown(), write, "decide")


@app.command()
def detokenize(rounds: Annotated[int, typer.Option(min=1)] = 50) -> None:
    """What a token's text costs the router."""
    from text_generation_benchmark.detokenization_speed import as_markdown, measure

    typer.echo(as_markdown(measure(demo_directory(), rounds)))


def main() -> None:
    app()
