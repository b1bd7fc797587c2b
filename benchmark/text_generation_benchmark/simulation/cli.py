"""The commands `simulate` and `replay`: their flags, and the files and tables they write."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from text_generation_benchmark.output import fail, show_table
from text_generation_benchmark.plots import check_png
from text_generation_benchmark.simulation.cost import MODELS, OVERHEAD_S, SimulatedModel, read_log
from text_generation_benchmark.simulation.cost import fit as fit_steps
from text_generation_benchmark.simulation.engine import Targets, summarize
from text_generation_benchmark.simulation.engine import simulate as run_engines
from text_generation_benchmark.simulation.report import Run, Setting, as_markdown, picture
from text_generation_benchmark.simulation.trace import WORKLOADS, Trace, generate, read_csv, write_csv
from text_generation_common.flags.declaration import with_flags
from text_generation_common.flags.kinds import AdmissionMode
from text_generation_common.flags.requests import SchedulingFlags
from text_generation_common.model_files import demo_directory
from text_generation_router.scheduling.request import Limits

BUCKETS = 240  # equal parts of the simulated time; the use of memory is recorded for each

Flag = typer.Option


def simulate(
    workload: Annotated[str | None, Flag(help=f"{', '.join(WORKLOADS)}.")] = None,
    trace: Annotated[Path | None, Flag(help="Or a CSV file: arrival_s, prompt_tokens, output_tokens …")] = None,
    rate: Annotated[list[float] | None, Flag(min=0.001, help="Requests per second; repeatable.")] = None,
    duration: Annotated[float, Flag(min=1, help="Seconds during which requests arrive.")] = 600,
    seed: Annotated[int, Flag(min=0, help="Seed of arrivals and lengths.")] = 0,
    engines: Annotated[int, Flag(min=1, help="Engines, to which requests are dealt in turn.")] = 1,
    model: Annotated[str, Flag(help=f"{', '.join(MODELS)}, or a file from --write-model.")] = "h200-8b",
    policy: Annotated[list[AdmissionMode] | None, Flag(help="Admission policy; repeatable.")] = None,
    ttft_limit: Annotated[float, Flag(min=0, help="Most seconds to the first token of a good request.")] = 5.0,
    tbt_limit: Annotated[float, Flag(min=0, help="Most seconds between two tokens of a good request.")] = 0.5,
    slots: Annotated[int | None, Flag(min=1, help="Token slots of an engine; by default the model's.")] = None,
    max_rows: Annotated[int, Flag(min=1, help="Requests that an engine runs at the same time.")] = 256,
    max_batch_prefill_tokens: Annotated[int, Flag(min=1, help="As of the launcher.")] = 4096,
    waiting_served_ratio: Annotated[float, Flag(min=0, help="As of the launcher.")] = 0.3,
    max_waiting_tokens: Annotated[int, Flag(min=0, help="As of the launcher.")] = 20,
    max_prefill_slowdown: Annotated[float, Flag(min=0, help="As of the launcher.")] = 4.0,
    png: Annotated[Path | None, Flag(help="A PNG file to draw the results into; needs tgi-py[plots].")] = None,
    write: Annotated[Path | None, Flag(help="A Markdown file; its marked table of this load is replaced.")] = None,
    write_trace: Annotated[Path | None, Flag(help="A CSV file to write the trace of the last rate into.")] = None,
    fit: Annotated[Path | None, Flag(help="Fit a model to this STEP_LOG of a shard; simulate nothing.")] = None,
    write_model: Annotated[Path | None, Flag(help="The JSON file that --fit writes.")] = None,
) -> None:
    """Runs the router's scheduler under a load, with a cost model of a step: no server, no GPU."""
    try:
        if fit is not None:
            _fit_model(fit, slots, write_model)
            return
        check_png(png)
        name, traces = _traces(workload, trace, rate or [], duration, seed)
        simulated = _model(model)
        limits = Limits(
            slots or simulated.slots,
            max_rows,
            max_batch_prefill_tokens,
            SchedulingFlags(
                waiting_served_ratio=waiting_served_ratio,
                max_waiting_tokens=max_waiting_tokens,
                max_prefill_slowdown=max_prefill_slowdown,
            ),
        )
        about = f"{name} ({WORKLOADS[name]}), Poisson arrivals" if trace is None else name
        longest_s = max(each.duration_s for each in traces.values())
        setting = Setting(about, longest_s, simulated, engines, limits, Targets(ttft_limit, tbt_limit))
        policies = list(dict.fromkeys(policy or [AdmissionMode.PAST_FUTURE]))
        bucket_s = max(longest_s, 1.0) / BUCKETS
        runs = [run for at, each in traces.items() for run in _runs(setting, each, at, policies, bucket_s)]
        _show(setting, runs, name, write)
        if write_trace is not None:
            write_csv(list(traces.values())[-1], write_trace)
        if png is not None:
            from text_generation_benchmark.simulation.plots import draw

            draw(setting, runs, bucket_s, png)
    except (ValueError, OSError) as error:
        fail(str(error))


def replay(
    model_id: Annotated[Path | None, Flag(help="Directory of the model; by default the demo model.")] = None,
    rate: Annotated[float, Flag(min=0.1, help="Requests per second.")] = 20.0,
    duration: Annotated[float, Flag(min=5, help="Seconds during which requests arrive.")] = 30,
    seed: Annotated[int, Flag(min=0, help="Seed of arrivals and lengths.")] = 0,
    write: Annotated[Path | None, Flag(help="A Markdown file; its marked table `replay` is replaced.")] = None,
    write_model: Annotated[Path | None, Flag(help="A JSON file to write the fitted model into.")] = None,
) -> None:
    """Sends a trace to a real server, which it starts, and simulates it with a cost model fitted to that server."""
    from text_generation_benchmark.simulation.replay import compare_with_server

    try:
        compared = compare_with_server(model_id or demo_directory(), rate, duration, seed)
        show_table(compared.as_markdown(), write, "replay")
        if write_model is not None:
            compared.fitted.write(write_model)
    except (ValueError, OSError, RuntimeError) as error:
        fail(str(error))


def _traces(
    workload: str | None, path: Path | None, rates: Sequence[float], duration_s: float, seed: int
) -> tuple[str, dict[float, Trace]]:
    """The name of the workload, and a trace for each rate."""
    if (workload is None) == (path is None):
        raise ValueError("choose a load: one of --workload and --trace")
    if path is not None:
        if rates:
            raise ValueError("--rate has no effect on a --trace, which has arrivals of its own: leave it out")
        read = read_csv(path)
        return path.stem, {round(len(read) / max(read.duration_s, 1e-9), 3): read}
    assert workload is not None
    if workload not in WORKLOADS:
        raise ValueError(f"there is no workload {workload}: choose {', '.join(WORKLOADS)}")
    if not rates:
        raise ValueError("--rate is missing: pass the number of requests that arrive per second")
    return workload, {rate: generate(WORKLOADS[workload], rate, duration_s, seed) for rate in rates}


def _model(name: str) -> SimulatedModel:
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"there is no model {name}: choose {', '.join(MODELS)}, or a file that --write-model wrote")
    return SimulatedModel.read(path)


def _runs(setting: Setting, trace: Trace, rate: float, policies: Sequence[AdmissionMode], bucket_s: float) -> list[Run]:
    if not len(trace):
        raise ValueError(f"no request arrives at {rate:g} requests per second: choose a longer --duration")
    limits = {policy.value: with_flags(setting.limits, admission=policy) for policy in policies}
    outcomes = run_engines(trace, setting.model.cost, limits, setting.engines, bucket_s)
    return [
        Run(name, rate, summarize(each, trace.duration_s, bucket_s, setting.model.overhead_s, setting.targets))
        for name, each in outcomes.items()
    ]


def _fit_model(log: Path, slots: int | None, path: Path | None) -> None:
    if slots is None or path is None:
        raise ValueError("--fit needs --slots, which the log does not contain, and --write-model")
    fitted = fit_steps(read_log(log.read_text().splitlines()))
    about = f"fitted to {fitted.num_steps:,} steps, median error {fitted.error:.1%}; the overhead is assumed"
    model = SimulatedModel(path.stem, fitted.cost, slots, OVERHEAD_S, about)
    model.write(path)
    typer.echo(f"{path}: {model.source}")


def _show(setting: Setting, runs: Sequence[Run], name: str, write: Path | None) -> None:
    show_table(as_markdown(setting, runs), write, f"simulation {name}")
    if sys.stdout.isatty():
        typer.echo(picture(runs))
