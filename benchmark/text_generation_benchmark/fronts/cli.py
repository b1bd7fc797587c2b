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
from text_generation_common.model_files import demo_directory

PARTS = ("speed", "first", "time", "stopped")
SHAPE = "m100"
# One request at a time with a short prompt, so that the time to its first token is not that of other prompts.
FIRST = Workload(1, input_tokens=32, new_tokens=1)
FIRST_TURNS = 101
FRONTS = (0, 1, 2)
TIME_TURNS = 5


def run_part(part: str, turns: int, seconds: float, streams: int, step_s: float) -> str:
    if part == "speed":
        return speed_table(compare_speed(Workload(streams), turns))
    if part == "first":
        return first_table(compare_speed(FIRST, FIRST_TURNS))
    if part == "time":
        return time_table([_time_turn(streams, seconds, step_s) for _ in range(TIME_TURNS)])
    stops = stop_a_front(demo_directory(), turns, streams, step_s)
    windows = [(stop.before_s, stop.stopped_s, stop.cut_off_s) for stop in stops]
    means = [f"{1000 * median(window):.2f}" for window in zip(*windows, strict=True)]
    head = ("turns", "ms between tokens: before", "one front stopped", "its requests ended", "change while stopped")
    worst = max(abs(stop.change) for stop in stops)
    return table(head, [[str(turns), *means, f"{100 * median_change(stops):+.1f} % (largest {100 * worst:.1f} %)"]])


def compare_speed(workload: Workload, turns: int) -> Turns:
    """One process with front and engine, and a front beside an engine, in turns, with a Llama of 100M parameters."""
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as folder, ExitStack() as servers:
        model = Path(folder) / SHAPE
        write_checkpoint(model, SHAPES[SHAPE])
        prompts = Prompts(model)
        one, two = (
            loads_on(servers.enter_context(running_ours(model, more=more)).port, GenerateStream(), prompts)
            for more in ((), ("--api-workers", "1"))
        )
        return take_turns(one, two, workload, turns)


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


def first_table(turns: Turns) -> str:
    head = ("turns", "first token, ms: one process", "front and engine", "ms later (95 %)")
    one, two = (1000 * median(result.first_token_s for result in results) for results in (turns.before, turns.now))
    return table(head, [[str(len(turns.now)), f"{one:.2f}", f"{two:.2f}", str(turns.later_ms)]])


def _time_turn(streams: int, seconds: float, step_s: float) -> list[TokenCost]:
    return [token_cost(demo_directory(), count, streams, seconds, step_s) for count in FRONTS]


def time_table(turns: Sequence[Sequence[TokenCost]]) -> str:
    """Each turn has one cost for each number of FRONTS."""
    head = ("processes", "tokens/s", "µs per token: fronts", "engine", "together", "beside 1 front")
    names = ("one", "engine, 1 front", *(f"engine, {count} fronts" for count in FRONTS[2:]))
    lines = []
    for place, name in enumerate(names):
        costs = [turn[place] for turn in turns]
        figures = (
            f"{median(cost.tokens_per_s for cost in costs):,.0f}",
            f"{median(cost.fronts_us for cost in costs):.1f}",
            f"{median(cost.engine_us for cost in costs):.1f}",
            f"{median(cost.total_us for cost in costs):.1f}",
        )
        ratios = sorted(turn[place].total_us / turn[1].total_us for turn in turns)
        lines.append([name, *figures, f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"])
    return table(head, lines)
