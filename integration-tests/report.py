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
from scenarios import Killed, Raised, Stopped, Terminated
from shard_figures import ShardFigures, total_mib
from streams import Comparison

Result = (
    Killed
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


def as_markdown(results: Sequence[tuple[str, Result]], figures: Sequence[ShardFigures]) -> str:
    killed = [result for _, result in results if isinstance(result, Killed)]
    attacked = [(name, result) for name, result in results if isinstance(result, Attacked)]
    tables = [_streams_table(results), _recovery_table(killed), _rest_table(results), _attacks_table(attacked)]
    tables.append(_shards_table(figures))
    head = f"Demo model, float32, {os.cpu_count()} cores, torch {version('torch')}."
    return "\n\n".join([head, *filter(None, tables)])


def _streams_table(results: Sequence[tuple[str, Result]]) -> str:
    rows = []
    for name, result in results:
        if isinstance(result, Killed | Stopped | Raised | Terminated):
            shards = getattr(result, "num_shard", 1)
            rows.append([name, shards, *_counts(result.comparison), _restarts(result), _remark(result)])
    return _table("what happens|shards|streams|lost|wrong tokens|other texts|restarts|remarks", rows)


def _counts(comparison: Comparison) -> list[int]:
    return [comparison.streams, comparison.lost, comparison.wrong_tokens, comparison.other_texts]


def _restarts(result: Killed | Stopped | Raised | Terminated) -> object:
    if isinstance(result, Killed):
        return len(result.kills) - len(result.missed)
    return "–" if isinstance(result, Terminated) else result.restarts


def _remark(result: Killed | Stopped | Raised | Terminated) -> str:
    if isinstance(result, Stopped):
        return f"`/ready` 503 after {result.unready_s:.1f} s"
    if isinstance(result, Raised):
        return f"{result.raised} exceptions"
    if isinstance(result, Terminated):
        return f"exit status {result.status}, `/ready` 503 after {result.unready_s:.2f} s"
    kinds = Counter(kill.kind for kill in result.kills if kill not in result.missed)
    return f"seed {result.seed}: " + ", ".join(f"{count} in {kind}" for kind, count in kinds.items())


def _recovery_table(killed: Sequence[Killed]) -> str:
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


def _waits(result: Killed, wanted: Callable[[int], bool]) -> list[float]:
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
