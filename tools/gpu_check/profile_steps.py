"""Where a step's time goes: the kernels that took most of it, by torch's profiler."""

from collections.abc import Iterable, Iterator
from functools import partial

from torch.profiler import ProfilerActivity, profile

from gpu_check.findings import Case, Context, Measured
from gpu_check.model import REHEARSED
from gpu_check.runners import SPARE, Player, RunnerLoad, make_runner
from text_generation_benchmark.shapes import LLAMA_8B

TABLE = "Kernels of a step, those that took most of its time"
STEPS, TOP = 3, 25
ROWS, CONTEXT, CHUNK = 64, 1000, 512


def measure(context: Context) -> Iterator[Case]:
    """The cases share one runner, whose rows go on from case to case."""
    rows, length, chunk = (ROWS, CONTEXT, CHUNK) if context.on_gpu else (2, 20, 8)
    slots = rows * (length + SPARE) + 2 * (chunk + 1 + SPARE)
    load = RunnerLoad(LLAMA_8B if context.on_gpu else REHEARSED, rows + 2, length + chunk + SPARE, chunk, slots)
    player = Player(make_runner(load, context.device), load)
    player.fill_cache()
    everyone = player.join_all(rows, length)
    yield Case(TABLE, {"step": "decode of 1 row"}, partial(decode, context, player, everyone[:1]))
    yield Case(TABLE, {"step": f"decode of {rows} rows"}, partial(decode, context, player, everyone))
    name = f"{rows} rows beside {chunk} prompt tokens"
    yield Case(TABLE, {"step": name}, partial(mixed, context, player, everyone, chunk))


def decode(context: Context, player: Player, rows: list[int]) -> Iterable[Measured]:
    player.launch(rows).wait()
    with profiler(context) as profiled:
        for _ in range(STEPS):
            player.launch(rows).wait()
    return lines(context, profiled, STEPS)


def mixed(context: Context, player: Player, rows: list[int], chunk: int) -> Iterable[Measured]:
    player.launch(rows, [player.chunk(len(rows), chunk + 1, end=chunk)]).wait()
    with profiler(context) as profiled:
        player.launch(rows, [player.chunk(len(rows) + 1, chunk + 1, end=chunk)]).wait()
    return lines(context, profiled, 1)


def profiler(context: Context) -> profile:
    return profile(activities=[ProfilerActivity.CUDA if context.on_gpu else ProfilerActivity.CPU])


def lines(context: Context, profiled: profile, steps: int) -> Iterable[Measured]:
    def microseconds(event: object) -> float:
        name = "self_device_time_total" if context.on_gpu else "self_cpu_time_total"
        return float(getattr(event, name))

    events = sorted(profiled.key_averages(), key=microseconds, reverse=True)
    total = sum(map(microseconds, events))
    yield Measured({"kernel": "all", "µs a step": f"{total / steps:.0f}", "share": "100%"})
    for event in events[:TOP]:
        taken = microseconds(event)
        cells = {"kernel": event.key[:80], "launches a step": f"{event.count / steps:.1f}"}
        yield Measured(cells | {"µs a step": f"{taken / steps:.1f}", "share": f"{taken / total:.1%}"})
