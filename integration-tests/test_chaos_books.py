"""The books of a chaos run: what it compares and what it counts. No server."""

import json
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import kills
import pytest
import report
from kills import Injected, Kill
from scenarios import Killed
from shard_figures import ShardFigures, mib_read
from streams import Heard, asks, compare

from text_generation_benchmark.cli import replace_table


def heard(ids: list[int], arrivals: list[float] | None = None, text: str = "a", error: str = "") -> Heard:
    return Heard(tuple(ids), tuple(arrivals or [0.0] * len(ids)), text, "{}", error)


def log_line(message: str, at_s: float = 0.0, **fields: object) -> str:
    timestamp = datetime.fromtimestamp(at_s, UTC).isoformat()
    return json.dumps({"timestamp": timestamp, "level": "INFO", "message": message, "target": "x", **fields})


@pytest.mark.parametrize(
    ("ids", "wrong"), [([1, 2, 3], 0), ([1, 2], 1), ([1, 2, 3, 3], 1), ([1, 1, 2, 3], 3), ([1, 9, 3], 1), ([], 3)]
)
def test_a_missing_doubled_or_other_token_is_seen(ids: list[int], wrong: int) -> None:
    comparison = compare([heard([1, 2, 3])], [heard(ids)])
    assert comparison.wrong_tokens == wrong and comparison.is_equal == (wrong == 0)


def test_a_lost_stream_and_another_text_are_seen() -> None:
    comparison = compare([heard([1]), heard([1])], [heard([1], error="cut"), heard([1], text="b")])
    assert (comparison.lost, comparison.other_texts, comparison.first_error) == (1, 1, "cut")
    assert not comparison.is_equal


def test_every_plan_has_all_kinds_and_never_two_in_a_row_before_any_token() -> None:
    for seed in range(200):
        kinds = kills.kinds_of(10, seed)
        assert len(kinds) == 10 and set(kinds) == kills.POINTS.keys() and kinds[0] == "prefill"
        early = [kind in kills.BEFORE_ANY_TOKEN for kind in kinds]
        assert not any(one and other for one, other in pairwise(early))
        plan = kills.plan(kinds, 2, 96, seed)
        assert plan == kills.plan(kinds, 2, 96, seed) and [kill.generation for kill in plan] == list(range(1, 11))
        assert {kill.rank for kill in plan} <= {0, 1}


def test_a_kill_that_never_happened_is_named() -> None:
    planned = [Kill(1, 0, "decode", 3), Kill(2, 0, "decode", 5), Kill(3, 1, "load", 1)]
    log = "\n".join(
        [
            log_line("fault injected: shard.decode kill at pass 3", 5.0, rank=0),
            "no JSON",
            log_line("fault injected: shard.load kill at pass 1", 6.0, rank=1),
        ]
    )
    faults = kills.injected(log)
    assert faults[0] == Injected("shard.decode", "kill", 0, 5.0)
    assert kills.missed(planned, faults) == [planned[1]]
    assert kills.failpoints(planned[2:]) == {"FAILPOINTS": "shard.load[generation=3,rank=1]:kill@1"}


def test_an_outage_lasts_from_its_first_kill_to_the_next_token_of_each_stream() -> None:
    streams = [heard([1, 2, 3], [1.0, 2.1, 5.0]), heard([1, 2, 3], [1.0, 6.0, 9.5]), heard([1], [8.9])]
    single, double = kills.outages([2.0, 7.0, 8.0], streams)
    # The token at 2.1 was on its way when the shard died; the last stream began during the second outage.
    assert (single.num_kills, single.median_s, single.worst_s) == (1, 3.5, 4.0)
    assert (double.num_kills, double.waits_s) == (2, (2.5,))


def test_a_run_without_one_of_the_kinds_fails() -> None:
    plan = kills.plan(kills.kinds_of(5, 1), 1, 96, 1)
    equal = compare([heard([1])], [heard([1])])
    assert Killed(1, 1, plan, [], equal, [], 1.0).failures() == []
    assert any("load" in line for line in Killed(1, 1, plan, [plan[1]], equal, [], 1.0).failures())


def test_the_asks_are_half_greedy_half_sampled_and_no_two_the_same() -> None:
    asked = asks(64, 10)
    assert sum(ask.seed is None for ask in asked) == 32
    assert len({ask.prompt for ask in asked}) == 64 and asked == asks(64, 10)


def test_bytes_read_are_found_by_rank() -> None:
    log = (
        log_line("loaded 12 tensors, 3.5 MiB read", rank=0) + "\n" + log_line("loaded 9 tensors, 2.0 MiB read", rank=1)
    )
    assert mib_read(log) == {0: 3.5, 1: 2.0}


def test_the_table_can_be_written_into_the_readme() -> None:
    plan = kills.plan(["prefill"], 1, 96, 1)
    killed = Killed(1, 1, plan, [], compare([heard([1])], [heard([1])]), [kills.Outage(1, (3.0, 5.0))], 4.0)
    table = report.as_markdown([("killed", killed)], [ShardFigures(1, 0, 2**28, 8.0), ShardFigures(2, 0, 2**27, 4.0)])
    assert "| killed | 1 | 1 | 0 | 0 | 0 | 1 | seed 1: 1 in prefill |" in table
    assert "| 1 | one kill | 4.0 | 4.0 | 5.0 |" in table and "| 2 | 0 | 4.00 | 50% | 128 |" in table
    readme = (Path(__file__).parent / "README.md").read_text()
    assert table in replace_table(readme, table)
