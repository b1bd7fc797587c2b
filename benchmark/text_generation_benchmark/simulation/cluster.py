"""Several engines, each with its own scheduler and its share of a trace, simulated in parallel processes."""

import gc
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from text_generation_benchmark.simulation.cost import StepCost
from text_generation_benchmark.simulation.engine import SimulatedEngine
from text_generation_benchmark.simulation.metrics import Outcome
from text_generation_benchmark.simulation.trace import Trace
from text_generation_router.scheduling.limits import Limits


@dataclass(frozen=True, slots=True)
class Task:
    trace: Trace
    cost: StepCost
    limits: Limits
    bucket_s: float


def run_task(task: Task) -> Outcome:
    return SimulatedEngine(task.trace, task.cost, task.limits, task.bucket_s).run()


def _in_processes(tasks: list[Task]) -> list[Outcome]:
    workers = min(os.cpu_count() or 1, len(tasks))
    # The simulation makes no reference cycles, and looking for them takes time.
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=gc.disable) as pool:
        return list(pool.map(run_task, tasks))


def simulate(
    trace: Trace, cost: StepCost, limits: Mapping[str, Limits], engines: int, bucket_s: float
) -> dict[str, list[Outcome]]:
    """The outcomes of all engines, by name of the limits. Requests are dealt to the engines in turn. Engines do not
    affect each other, so each can be simulated alone."""
    tasks = [Task(trace.dealt(i, engines), cost, each, bucket_s) for each in limits.values() for i in range(engines)]
    outcomes = _in_processes(tasks) if len(tasks) > 1 else [run_task(task) for task in tasks]
    return {name: outcomes[i * engines : (i + 1) * engines] for i, name in enumerate(limits)}
