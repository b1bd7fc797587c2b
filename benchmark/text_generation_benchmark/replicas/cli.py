"""The commands `replicas` and `fleet`: their flags, and the tables they write. What only one command needs is imported
there, so that `--help` answers at once.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from text_generation_benchmark.output import columns, fail, show_table
from text_generation_benchmark.replicas.chats import ChatLoad, steady_arrivals
from text_generation_benchmark.replicas.deployment import FleetPlan
from text_generation_benchmark.replicas.fleet import GPUS_PER_REPLICA, TARGETS, ScalingPlan, day, small_day
from text_generation_benchmark.replicas.front import Policy
from text_generation_benchmark.replicas.report import costs_as_text, deployment_cells, run, run_scaled
from text_generation_benchmark.simulation.cost import MODELS
from text_generation_benchmark.simulation.engine import Targets
from text_generation_router.scheduling.request import Limits

Flag = typer.Option
Fronts = Annotated[list[int] | None, Flag(min=1, help="Fronts; repeatable. Default: 1 and 2.")]
Policies = Annotated[list[Policy] | None, Flag(help="How fronts choose; repeatable. Default: all.")]
Seed = Annotated[int, Flag(min=0, help="Seed of the load.")]
Write = Annotated[Path | None, Flag(help="A Markdown file; its marked table is replaced.")]
CHAT_TARGETS = Targets(2.0, 0.5)


def replicas(
    rate: Annotated[list[float], Flag(min=0.001, help="Requests per second; repeatable.")],
    apart: Annotated[bool, Flag(help="Prompts share nothing, instead of chats with shared system prompts.")] = False,
    duration: Annotated[float, Flag(min=1, help="Seconds during which requests arrive.")] = 120,
    engines: Annotated[int, Flag(min=1, help="Replicas.")] = 4,
    fronts: Fronts = None,
    policy: Policies = None,
    model: Annotated[str, Flag(help=f"{', '.join(MODELS)}.")] = "h200-8b",
    slots: Annotated[int, Flag(min=1, help="Token slots of a replica.")] = 200_000,
    seed: Seed = 0,
    write: Write = None,
) -> None:
    """Simulates fronts and replicas, with the router's own scheduler and choice: no server, no GPU."""
    if model not in MODELS:
        fail(f"there is no model {model}: choose {', '.join(MODELS)}")
    load, limits = ChatLoad(shares=not apart), Limits(slots, 256, 4096)
    runs = []
    for each in rate:
        arrivals_s = steady_arrivals(each, duration, seed)
        if not len(arrivals_s):
            fail(f"no request arrives at {each:g} requests per second: choose a longer --duration")
        for count in fronts or (1, 2):
            for chosen in policy or Policy:
                plan = FleetPlan(load, arrivals_s, MODELS[model], limits, chosen, engines, count, seed=seed)
                runs.append(deployment_cells(run(plan), CHAT_TARGETS))
    about = (
        f"{load}; {duration:,.0f} s. {engines} replicas of {model} ({MODELS[model].source}) with {slots:,} slots."
        f" {CHAT_TARGETS}"
    )
    show_table(f"{about}\n\n{columns(runs)}", write, f"replicas {'apart' if apart else 'chats'}")


def fleet(
    engines: Annotated[int, Flag(min=2, help="Replicas.")] = 125,
    fronts: Annotated[int, Flag(min=1, help="Fronts.")] = 8,
    rate: Annotated[float, Flag(min=0.001, help="Requests per second, on average over the day.")] = 60,
    day_seconds: Annotated[float, Flag(min=24, help="Seconds that stand for the day.")] = 120,
    policy: Policies = None,
    messages: Annotated[int, Flag(min=1, help="Messages of each kind that are sent to measure their cost.")] = 2000,
    seed: Seed = 0,
    write: Write = None,
) -> None:
    """Simulates a day of many replicas of a large model, with peaks and the loss of a rack."""
    plans = [day(each, fronts, engines, day_seconds, rate, seed) for each in policy or Policy]
    runs, parts = [], []
    for plan in plans:
        deployment = run(plan)
        runs.append(deployment_cells(deployment, TARGETS))
        if plan.policy is Policy.SCORE:
            parts.append(costs_as_text(deployment, messages))
    loss, about_model = plans[0].losses[0], plans[0].model
    about = (
        f"{plans[0].load}. {engines} replicas ({engines * GPUS_PER_REPLICA:,} GPUs) of {about_model.name}"
        f" ({about_model.source}) with {plans[0].limits.capacity:,} slots. A day of {day_seconds:,.0f} s;"
        f" {loss.end - loss.first} replicas are lost from 11 to 13 o'clock. {TARGETS}"
    )
    show_table("\n\n".join([about, columns(runs), *parts]), write, "replicas day")


def autoscaling(
    most: Annotated[int, Flag(min=2, help="Greatest number of replicas.")] = 6,
    always: Annotated[list[int] | None, Flag(min=1, help="A fixed number to compare with; repeatable.")] = None,
    start_seconds: Annotated[list[float] | None, Flag(min=0, help="Start of a replica; repeatable.")] = None,
    rate: Annotated[float, Flag(min=0.001, help="Requests per second, on average over the day.")] = 1.2,
    day_seconds: Annotated[float, Flag(min=24, help="Seconds that stand for the day.")] = 14_400,
    seed: Seed = 0,
    write: Write = None,
) -> None:
    """Simulates a day in which the number of replicas follows the load, beside fixed numbers."""
    fixed = [ScalingPlan(count, count, 0.0) for count in always or (3, 4)]
    scaled = [ScalingPlan(1, most, seconds) for seconds in start_seconds or (60.0, 300.0)]
    runs = []
    for scaling in fixed + scaled:
        plan = small_day(scaling.most, day_seconds, rate, seed)
        runs.append(run_scaled(plan, scaling, TARGETS))
    about = (
        f"{plan.load}. Replicas of {plan.model.name} ({plan.model.source}), 2 fronts that choose by the score. A day of"
        f" {day_seconds / 3600:g} hours with {rate:g} requests per second on average. {TARGETS}"
    )
    show_table(f"{about}\n\n{columns(runs)}", write, "replicas autoscaling")


def replicated(
    replicas: Annotated[
        list[int] | None, Flag(min=1, help="Numbers of replicas; repeatable. Default: 1 and 8.")
    ] = None,
    fronts: Annotated[int, Flag(min=1, help="Fronts.")] = 2,
    streams: Annotated[int, Flag(min=1, help="Streams for each replica.")] = 16,
    seconds: Annotated[float, Flag(min=1, help="How long to measure each number in a turn.")] = 8,
    turns: Annotated[int, Flag(min=1, help="Turns.")] = 3,
    step_ms: Annotated[float, Flag(min=1, help="What a shard takes for a step at least.")] = 100,
    write: Write = None,
) -> None:
    """Tokens per second of several live engines with pretended shards, beside one. The shards are made slower until the
    cores are at most 60 % busy."""
    from text_generation_benchmark.replicas.throughput import ThroughputPlan, as_markdown, measure_replicated

    counts = sorted(set(replicas or (1, 8)))
    measured = measure_replicated(ThroughputPlan(counts, fronts, streams, seconds, turns), step_ms)
    show_table(as_markdown(measured, streams), write, "replicas throughput")


def balance(
    apart: Annotated[bool, Flag(help="Prompts share nothing, instead of chats with shared system prompts.")] = False,
    rate: Annotated[float, Flag(min=0.001, help="Requests per second.")] = 10,
    duration: Annotated[float, Flag(min=1, help="Seconds during which requests arrive.")] = 30,
    fronts: Fronts = None,
    seed: Seed = 0,
    write: Write = None,
) -> None:
    """Policies of fronts, simulated and then live, with four engines in processes of their own and pretended shards."""
    from text_generation_benchmark.replicas.balancing import LOAD, NUM_ENGINES, SLOTS, compare_policies

    load = replace(LOAD, shares=not apart)
    table = compare_policies(load, rate, duration, fronts or (1, 2), seed)
    about = f"{load}; {rate:g} requests per second for {duration:g} s; {NUM_ENGINES} engines with {SLOTS:,} slots."
    show_table(f"{about}\n\n{table}", write, f"replicas live {'apart' if apart else 'chats'}")
