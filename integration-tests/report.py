"""The tables of a chaos run, as Markdown."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from statistics import median
from typing import Any

from attacks import Attacked
from departures import MIB, Gone, LauncherKilled, NeverRead, RouterKilled
from hung_router import LeftAlone, Replaced
from killer import MOST_IN_A_ROW
from outside import MOMENTS, UNDER_WAY, KilledOutside
from poison import NUM_NEIGHBOURS, Poisoned
from scenarios import Raised, Stopped, Terminated
from shard_figures import ShardFigures, total_mib
from streams import Comparison

Result = (
    KilledOutside
    | Poisoned
    | Stopped
    | Raised
    | Terminated
    | RouterKilled
    | LauncherKilled
    | NeverRead
    | Gone
    | Attacked
    | Replaced
    | LeftAlone
)


def kills_as_markdown(killed: Sequence[KilledOutside], longest_gap_s: float) -> str:
    gaps = f"Bursts of kills up to {longest_gap_s:g} s apart."
    return _joined(gaps, _outside_table(killed), _moments_table(killed), _recovery_table(killed))


def as_markdown(results: Sequence[tuple[str, Result]], figures: Sequence[ShardFigures]) -> str:
    """All tables, except the table of shards killed by another process (see `_outside_table`)."""
    attacked = [(name, result) for name, result in results if isinstance(result, Attacked)]
    return _joined(_streams_table(results), _rest_table(results), _attacks_table(attacked), _shards_table(figures))


def _joined(*tables: str) -> str:
    head = f"Demo model, float32, {os.cpu_count()} cores, torch {version('torch')}."
    return "\n\n".join([head, *filter(None, tables)])


def _streams_table(results: Sequence[tuple[str, Result]]) -> str:
    rows = []
    for name, result in results:
        if isinstance(result, Stopped | Raised | Terminated | Poisoned):
            shards = getattr(result, "num_shard", 1)
            rows.append([name, shards, *_counts(result.comparison), _restarts(result), _remark(result)])
    return _table("what happens|shards|streams|lost|wrong tokens|other texts|restarts|remarks", rows)


def _counts(comparison: Comparison) -> list[int]:
    return [comparison.streams, comparison.lost, comparison.wrong_tokens, comparison.other_texts]


def _restarts(result: Stopped | Raised | Terminated | Poisoned) -> object:
    if isinstance(result, Poisoned):
        return ", ".join(map(str, result.deaths))
    return "–" if isinstance(result, Terminated) else result.restarts


def _remark(result: Stopped | Raised | Terminated | Poisoned) -> str:
    if isinstance(result, Poisoned):
        return f"ended by name: once among {NUM_NEIGHBOURS} others, {len(result.deaths) - 1} times alone"
    if isinstance(result, Stopped):
        return f"`/ready` 503 after {result.unready_s:.1f} s"
    if isinstance(result, Raised):
        return f"{result.raised} exceptions"
    return f"exit status {result.status}, `/ready` 503 after {result.unready_s:.2f} s"


def _outside_table(killed: Sequence[KilledOutside]) -> str:
    """The table of shards killed by another process: the kills, and the streams that were lost or differ."""
    rows = []
    for result in killed:
        bursts = Counter(size for _, size in {(kill.burst, kill.size) for kill in result.kills})
        limited = [kill.waited_s for kill in result.kills if kill.waited_s]
        rows.append(
            [
                *(result.num_shard, result.seed, len(result.kills), result.with_enough),
                ", ".join(f"{bursts[size]} × {size}" for size in sorted(bursts)),
                sum(len(kill.ranks) > 1 for kill in result.kills),
                f"{max((kill.in_a_row for kill in result.kills), default=0)} ({len(limited)} × waited)",
                *(result.streams, len(result.lost), len(result.different), f"{result.longest_s:.0f}"),
            ]
        )
    head = f"shards|seed|kills|with ≥ {UNDER_WAY} streams|bursts × kills|of all ranks|most in a row (< {MOST_IN_A_ROW})"
    return _table(f"{head}|streams|lost|different|longest stream, s", rows)


def _moments_table(killed: Sequence[KilledOutside]) -> str:
    rows = [[result.num_shard, *(result.moments.get(moment, 0) for moment in MOMENTS)] for result in killed]
    return _table("|".join(["shards", *(f"kills in {moment}" for moment in MOMENTS)]), rows)


def _recovery_table(killed: Sequence[KilledOutside]) -> str:
    rows = []
    for result in killed:
        for label, waits in (
            ("one kill", _waits(result, lambda n: n == 1)),
            ("several", _waits(result, lambda n: n > 1)),
        ):
            if waits:
                times = [f"{median(waits):.1f}", f"{max(waits):.1f}"]
                rows.append([result.num_shard, label, f"{result.load_s:.1f}", *times])
    return _table("shards|outages of|load s|recovery s, median|worst", rows)


def _waits(result: KilledOutside, wanted: Callable[[int], bool]) -> list[float]:
    return [wait for outage in result.outages if wanted(outage.num_kills) for wait in outage.waits_s]


def _rest_table(results: Sequence[tuple[str, Result]]) -> str:
    return _table("what happens|result", [[name, text] for name, result in results for text in _sentence(result)])


def _sentence(result: Result) -> Iterator[str]:
    if isinstance(result, RouterKilled):
        left_over = _names(result.left_over)
        shards = "1 shard" if result.num_shard == 1 else f"{result.num_shard} shards"
        yield f"{shards}: serving again after {result.back_s:.1f} s, left over: {left_over}"
    elif isinstance(result, LauncherKilled):
        yield f"all gone after {result.gone_s:.1f} s, left over: {_names(result.left_over)}"
    elif isinstance(result, NeverRead):
        yield (
            f"buffers full after {result.full_s:.1f} s, slots free {result.freed_s:.1f} s later"
            f" (`--stream-write-timeout {result.timeout_s}`), router + {result.growth / MIB:.1f} MiB"
        )
    elif isinstance(result, Gone):
        yield f"{result.clients} clients: all slots free after {result.freed_s:.2f} s"
    elif isinstance(result, Replaced):
        shards = "kept" if result.shards_kept else "started again"
        yield f"replaced after {result.replaced_s:.1f} s, serving again after {result.back_s:.1f} s, shards {shards}"
    elif isinstance(result, LeftAlone):
        _, lost, wrong_tokens, other_texts = _counts(result.comparison)
        router = "replaced" if result.replaced else "kept"
        yield f"router {router}, {lost} streams lost, {wrong_tokens} wrong tokens, {other_texts} other texts"


def _names(left_over: Sequence[str]) -> str:
    return ", ".join(left_over) or "nothing"


def _attacks_table(attacked: Sequence[tuple[str, Attacked]]) -> str:
    rows = []
    for name, result in attacked:
        statuses = ", ".join(f"{count} × {status}" for status, count in result.statuses.items())
        rows.append([name, result.sent, statuses, len(result.findings), "yes" if result.restarted else "no"])
    return _table("attack|requests|answers|5xx, tracebacks, no answer|restarts", rows)


def _shards_table(figures: Sequence[ShardFigures]) -> str:
    rows = []
    for shard in figures:
        alone = next(one for one in figures if one.num_shard == 1)
        share = f"{shard.read_mib / total_mib([alone]):.0%}"
        rows.append([shard.num_shard, shard.rank, f"{shard.read_mib:.2f}", share, f"{shard.peak_memory / MIB:.0f}"])
    return _table("shards|rank|MiB read|of the model|peak memory MiB", rows)


def _table(head: str, rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    columns = head.split("|")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
