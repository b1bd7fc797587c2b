"""Injects all kinds of faults into a running server and records what its clients noticed: `make chaos`."""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import departures
import hostile
import hung_router
import outside
import poison
import scenarios
from attacks import SEED, Attacked, fuzz, throw_bodies
from report import Result, as_markdown, kills_as_markdown
from scale import LONG, SHORT, Scale
from server_process import ServerProcess
from shard_figures import ShardFigures, shard_figures

from text_generation_benchmark.output import replace_table

Run = Callable[[], Result]


def streams_under_faults(scale: Scale, seed: int, asked_kills: int | None) -> Iterator[tuple[str, Run]]:
    for num_shard in (1, 2):
        # One run without faults for each number of shards: the rounding of sums depends on that number.
        expected = scenarios.undisturbed(scale, num_shard)
        num_kills = scale.num_kills[num_shard] if asked_kills is None else asked_kills
        killing = partial(outside.kill_from_outside, scale, num_shard, num_kills, scale.num_drains, seed + num_shard)
        yield "shards killed from outside (SIGKILL)", killing
        yield "a shard stopped (SIGSTOP)", partial(scenarios.stop_shard, scale, num_shard, seed, expected)
        yield "exceptions in steps", partial(scenarios.raise_in_steps, scale, num_shard, expected)
        if num_shard == 1:
            yield "SIGTERM, default flags", partial(scenarios.terminate, scale, expected)
            yield "a request that kills its shards", partial(poison.poison, scale, expected, alone=2)
            yield from hung_router.everything(expected, scale)


def everything(scale: Scale, seed: int, examples: int, asked_kills: int | None) -> Iterator[tuple[str, Run]]:
    yield from streams_under_faults(scale, seed, asked_kills)
    for num_shard in (1, 2):
        yield "router killed", partial(departures.kill_router, scale, num_shard)
    yield "launcher killed", partial(departures.kill_launcher, scale, 2)
    yield "64 clients never read", partial(departures.never_read, scale)
    yield "clients leave at once", partial(departures.all_leave_at_once, scale)
    throw = partial(throw_bodies, bodies=hostile.bodies(SEED), on_every_route=True)
    yield "hostile bodies, each on every POST route", partial(attack, scale, throw)
    yield "cases from the OpenAPI document", partial(attack, scale, partial(fuzz, examples=examples))


def attack(scale: Scale, how: Callable[[ServerProcess], Attacked]) -> Attacked:
    with scale.server(1, "--max-total-tokens", "64") as server:  # short texts, so that valid requests end soon
        return how(server)


def run(todo: Iterator[tuple[str, Run]]) -> tuple[list[tuple[str, Result]], list[str]]:
    """Runs all scenarios. Returns (results, failures). A scenario that raises is a failure too; the next scenarios
    still run.
    """
    results, failures = [], []
    for name, scenario in todo:
        started_s = time.monotonic()
        try:
            result = scenario()
        except Exception as error:
            failures.append(f"{name}: {_innermost(error)!r}")
            print(f"{name}: raised {_innermost(error)!r}", flush=True)
            continue
        results.append((name, result))
        failures += [f"{name}: {failure}" for failure in result.failures()]
        print(f"{name}: {result.failures() or 'passed'} ({time.monotonic() - started_s:.0f} s)", flush=True)
    return results, failures


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def measured(scale: Scale, failures: list[str]) -> list[ShardFigures]:
    try:
        return [shard for num_shard in (1, 2, 4) for shard in shard_figures(scale, num_shard)]
    except Exception as error:
        failures.append(f"memory and bytes read: {_innermost(error)!r}")
        return []


def slow(results: Sequence[tuple[str, Result]]) -> list[str]:
    killed = [result for _, result in results if isinstance(result, outside.KilledOutside)]
    return [f"N = {result.num_shard}: {text}" for result in killed for text in result.slow_outages()]


def main() -> int:
    """Returns 0 if there was no failure. A missed target for recovery times is printed but is not a failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="shorter texts, fewer faults")
    parser.add_argument("--seed", type=int, default=1, help="which shards are killed, and when")
    parser.add_argument("--kills", type=int, help="number of kills of shards from outside, for each number of shards")
    parser.add_argument("--longest", type=float, help="longest time between two bursts of kills, in seconds")
    parser.add_argument(
        "--only",
        default="",
        help="only scenarios with this text in their names; only the table of the kills is written",
    )
    parser.add_argument("--write", type=Path, help="a Markdown file whose marked table is replaced")
    asked = parser.parse_args()
    scale, examples = (SHORT, 12) if asked.short else (LONG, 100)
    scale = replace(scale, longest_gap_s=asked.longest or scale.longest_gap_s)
    print(f"seed {asked.seed}", flush=True)
    todo = everything(scale, asked.seed, examples, asked.kills)
    results, failures = run((name, scenario) for name, scenario in todo if asked.only in name)
    figures = measured(scale, failures) if not asked.only else []
    tables = {}
    if killed := [result for _, result in results if isinstance(result, outside.KilledOutside)]:
        tables["kills far apart" if asked.longest else "kills"] = kills_as_markdown(killed, scale.longest_gap_s)
    if not asked.only:
        tables["table"] = as_markdown(results, figures)
    for name, table in tables.items():
        print(f"\n{table}\n")
        if asked.write is not None:
            asked.write.write_text(replace_table(asked.write.read_text(), table, name))
    for line in slow(results):
        print(f"slow: {line}")
    for line in failures:
        print(f"FAILED: {line}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
