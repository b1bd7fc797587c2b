"""Injects all kinds of faults into a running server and records what its clients noticed: `make chaos`."""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import attacks
import hostile
import logs
import outside
import processes
from attacks import SEED, Attacked, fuzz, throw_bodies
from faults import FAULTS, MIB, Run
from outcome import CELLS, Outcome, Report, innermost, on_this_machine, table
from outside import KilledOutside
from scale import LONG, SHORT, Scale
from streams import run_streams

KILLED = "shards killed from outside (SIGKILL)"


def everything(scale: Scale, seed: int, examples: int, asked_kills: int | None) -> Iterator[tuple[str, int, Any]]:
    """Name, number of shards, and what is to be run."""
    undisturbed = cache(scale.undisturbed)  # for each number of shards, on which the rounding of sums depends

    def run(fault: Any, num_shard: int) -> Outcome:
        expected = undisturbed(num_shard) if fault.has_streams else ()
        return fault.inject(Run(scale, num_shard, seed, expected))

    for num_shard in (1, 2):
        num_kills = scale.num_kills[num_shard] if asked_kills is None else asked_kills
        killing = partial(outside.kill_from_outside, scale, num_shard, num_kills, scale.num_drains, seed + num_shard)
        yield KILLED, num_shard, killing
    for fault in FAULTS:
        yield from ((fault.name, num_shard, partial(run, fault, num_shard)) for num_shard in fault.shards)
    throw = partial(throw_bodies, bodies=hostile.bodies(SEED), on_every_route=True)
    yield "hostile bodies, each on every POST route", 1, partial(attack, scale, throw)
    yield "cases from the OpenAPI document", 1, partial(attack, scale, partial(fuzz, examples=examples))


def attack(scale: Scale, how: Any) -> Attacked:
    with scale.server(1, "--max-total-tokens", "64") as server:  # short texts, so that valid requests end soon
        attacked: Attacked = how(server)
        return attacked


def run_all(todo: Iterator[tuple[str, int, Any]], report: Report) -> list[tuple[str, int, Any]]:
    """The results of all faults. A fault that raises is a failure too; the next ones are still injected."""
    results = []
    for name, num_shard, scenario in todo:
        started_s = time.monotonic()
        try:
            result = scenario()
        except Exception as error:
            report.fail(f"{name}: {innermost(error)!r}")
            continue
        results.append((name, num_shard, result))
        took = f"{time.monotonic() - started_s:.0f} s"
        print(f"{name}, {num_shard} shards: {result.failures() or 'passed'} ({took})", flush=True)
        report.fail(*(f"{name}: {failure}" for failure in result.failures()))
    return results


def shard_figures(scale: Scale, num_shard: int) -> Iterator[tuple[int, int, float, float]]:
    """Shards, rank, MiB read of the checkpoint's tensors, and peak MiB of memory, after one run of streams."""
    with scale.server(num_shard) as server:
        run_streams(server.url, scale.asks()[: scale.num_streams], scale.num_streams)
        read = logs.mib_read(server.log())
        for rank, shard in sorted(processes.shards(server.pid).items()):
            yield num_shard, rank, read[rank], processes.peak_resident(shard) / MIB


def measured(scale: Scale, report: Report) -> list[tuple[int, int, float, float]]:
    try:
        return [shard for num_shard in (1, 2, 4) for shard in shard_figures(scale, num_shard)]
    except Exception as error:
        report.fail(f"memory and bytes read: {innermost(error)!r}")
        return []


def as_markdown(results: Sequence[tuple[str, int, Any]], figures: Sequence[tuple[int, int, float, float]]) -> str:
    """All tables, except the tables of shards killed by another process."""
    rows = [[name, num, *result.cells()] for name, num, result in results if isinstance(result, Outcome)]
    attacked = [[name, *result.cells()] for name, _, result in results if isinstance(result, Attacked)]
    whole = next((read for num_shard, _, read, _ in figures if num_shard == 1), 0.0)
    memory = [[num, rank, f"{read:.2f}", f"{read / whole:.0%}", f"{peak:.0f}"] for num, rank, read, peak in figures]
    return on_this_machine(
        table(f"what happens|shards|{CELLS}", rows),
        table(f"attack|{attacks.CELLS}", attacked),
        table("shards|rank|MiB read|of the model|peak memory MiB", memory),
    )


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
    report = Report(asked.write)
    todo = everything(scale, asked.seed, examples, asked.kills)
    results = run_all((each for each in todo if asked.only in each[0]), report)
    if killed := [result for _, _, result in results if isinstance(result, KilledOutside)]:
        name = "kills far apart" if asked.longest else "kills"
        report.take(name, outside.as_markdown(killed, scale.longest_gap_s))
    if not asked.only:
        report.take("table", as_markdown(results, measured(scale, report)))
    elif rows := [each for each in results if not isinstance(each[2], KilledOutside)]:
        print(as_markdown(rows, []))
    for result in killed:
        for text in result.slow_outages():
            print(f"slow: N = {result.num_shard}: {text}")
    return report.status


if __name__ == "__main__":
    raise SystemExit(main())
