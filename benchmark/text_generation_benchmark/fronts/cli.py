"""The tables of `text-generation-benchmark fronts`."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from text_generation_benchmark.checkpoint import write_checkpoint
from text_generation_benchmark.fronts.costs import TokenCost, median_change, stop_a_front, token_cost
from text_generation_benchmark.load import GenerateStream
from text_generation_benchmark.ours import running_ours
from text_generation_benchmark.output import table
from text_generation_benchmark.prompts import Prompts
from text_generation_benchmark.shapes import SHAPES
from text_generation_benchmark.turns import Turns, take_turns
from text_generation_benchmark.workload import Workload, loads_on
from text_generation_common.model_folder import demo_directory

PARTS = ("speed", "time", "stopped")
SHAPE = "m100"


def run_part(part: str, turns: int, seconds: float, streams: int, step_s: float) -> str:
    if part == "speed":
        return speed_table(compare_speed(turns, streams))
    if part == "time":
        return time_table([token_cost(demo_directory(), count, streams, seconds, step_s) for count in (0, 1, 2)])
    stops = stop_a_front(demo_directory(), turns, streams, step_s)
    windows = [(stop.before_s, stop.stopped_s, stop.cut_off_s) for stop in stops]
    means = [f"{1000 * median(window):.2f}" for window in zip(*windows, strict=True)]
    head = ("turns", "ms between tokens: before", "one front stopped", "its requests ended", "change while stopped")
    worst = max(abs(stop.change) for stop in stops)
    return table(head, [[str(turns), *means, f"{100 * median_change(stops):+.1f} % (largest {100 * worst:.1f} %)"]])


def compare_speed(turns: int, streams: int) -> Turns:
    """One process with front and engine, and a front beside an engine, in turns, with a Llama of 100M parameters."""
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder, ExitStack() as servers:
        model = Path(folder) / SHAPE
        write_checkpoint(model, SHAPES[SHAPE])
        prompts = Prompts(model)
        one, two = (
            loads_on(servers.enter_context(running_ours(model, more=more)).port, GenerateStream(), prompts)
            for more in ((), ("--api-workers", "1"))
        )
        return take_turns(one, two, Workload(streams), turns)


def speed_table(turns: Turns) -> str:
    head = (
        "streams",
        "turns",
        "tokens/s: one process",
        "front and engine",
        "ratio (95 %)",
        "first token, ms later (95 %)",
    )
    one, two = (median(result.tokens_per_s for result in results) for results in (turns.before, turns.now))
    counts = (str(turns.workload.concurrency), str(len(turns.now)), f"{one:.1f}", f"{two:.1f}")
    return table(head, [[*counts, str(turns.speed), str(turns.later_ms)]])


def time_table(costs: Sequence[TokenCost]) -> str:
    head = ("processes", "tokens/s", "µs per token: fronts", "engine", "together", "beside one process")
    alone = costs[0]
    lines = []
    for cost in costs:
        name = {0: "one", 1: "engine, 1 front"}.get(cost.num_fronts, f"engine, {cost.num_fronts} fronts")
        figures = (
            f"{cost.tokens_per_s:,.0f}",
            f"{cost.fronts_us:.1f}",
            f"{cost.engine_us:.1f}",
            f"{cost.total_us:.1f}",
        )
        lines.append([name, *figures, f"{cost.total_us - alone.total_us:+.1f}"])
    return table(head, lines)
