"""Tests the comparisons and counts of a chaos run without a server."""

import json
import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import blinks
import chaos
import logs
import outside
import pytest
import streams
from asks import KINDS, asks, mixed_asks
from blinks import Figure, Segment, Texts
from faults import poisoned
from killer import ENGINE, SHARD, Kill
from logs import Injected, mib_read
from outside import KilledOutside, Record
from streams import StreamAnswer, compare

from text_generation_benchmark.output import replace_table
from text_generation_launcher.restarts import MAX_DEATHS
from text_generation_router.scheduling.blame import MAX_LOSSES


def stream_answer(ids: list[int], text: str = "a", error: str = "") -> StreamAnswer:
    return StreamAnswer(0, 0.0, 1.0, (0.0,) * len(ids), (*map(str, ids), json.dumps([text, {}])), error)


def log_line(message: str, at_s: float = 0.0, **fields: object) -> str:
    timestamp = datetime.fromtimestamp(at_s, UTC).isoformat()
    return json.dumps({"timestamp": timestamp, "level": "INFO", "message": message, "target": "x", **fields})


@pytest.mark.parametrize(
    ("ids", "wrong"), [([1, 2, 3], 0), ([1, 2], 1), ([1, 2, 3, 3], 1), ([1, 1, 2, 3], 3), ([1, 9, 3], 1), ([], 3)]
)
def test_a_missing_doubled_or_other_token_is_seen(ids: list[int], wrong: int) -> None:
    comparison = compare([stream_answer([1, 2, 3])], [stream_answer(ids)])
    assert comparison.wrong_tokens == wrong and bool(comparison.failures()) == (wrong > 0)


def test_a_lost_stream_and_another_text_are_seen() -> None:
    comparison = compare(
        [stream_answer([1]), stream_answer([1])], [stream_answer([1], error="cut"), stream_answer([1], text="b")]
    )
    assert (comparison.lost, comparison.other_texts, comparison.first_error) == (1, 1, "cut")
    assert comparison.failures()


def test_injected_faults_are_found_in_a_log() -> None:
    log = log_line("fault injected: shard.decode kill at pass 3", 5.0, rank=0) + "\nno JSON\n" + log_line("else", 6.0)
    assert logs.injected(log) == [Injected("shard.decode", "kill", 0, 5.0)]


def test_an_outage_lasts_from_its_first_kill_to_the_next_token_of_each_stream() -> None:
    streams = [[1.0, 2.1, 5.0], [1.0, 6.0, 9.5], [8.9]]
    single, double = outside.outages([2.0, 7.0, 8.0], streams)
    # The token at 2.1 s was in flight when the shard died. The last stream began during the second outage.
    assert (single.num_kills, single.median_s, single.worst_s) == (1, 3.5, 4.0)
    assert (double.num_kills, double.waits_s) == (2, (2.5,))


LOG = "\n".join(
    [
        log_line("Starting shard", 10.0),
        log_line("Setting max batch total tokens to 100", 13.0),
        log_line("Starting shard", 20.0),  # start of a shard that is killed while it loads
        log_line("Starting shard", 23.0),
        log_line("Setting max batch total tokens to 100", 26.0),
    ]
)


def test_starts_last_until_the_warm_up_is_over_or_the_next_start() -> None:
    assert logs.loads(LOG) == [(10.0, 13.0), (20.0, 23.0), (23.0, 26.0)] and logs.load_time_s(LOG) == 3.0
    assert logs.loads(LOG + "\n" + log_line("Starting shard", 30.0))[-1] == (30.0, float("inf"))


def kill_at(at_s: float, prefill: int = 0, decode: int = 0, in_a_row: int = 1) -> Kill:
    return Kill(at_s, 1, 1, [0], 1, 0.0, in_a_row, {"prefill": prefill, "decode": decode})


ASKED = [*mixed_asks(len(KINDS), (4, 4))]
GREEDY, SLOW, BEST_OF = (
    next(i for i, a in enumerate(ASKED) if a.kind == k) for k in ("greedy", "slow reader", "best_of")
)


def mixed_answer(
    start_s: float, *arrivals_s: float, ask: int = GREEDY, outcome: tuple[str, ...] = ("a",)
) -> StreamAnswer:
    return StreamAnswer(ask, start_s, arrivals_s[-1], arrivals_s, outcome, "")


def record_of(*streams: StreamAnswer, kills: Sequence[Kill]) -> KilledOutside:
    record = Record(ASKED, [StreamAnswer(i, 0.0, 1.0, (), ("a",), "") for i in range(len(ASKED))])
    record.take_log(LOG)
    record._answers, record._kills = list(streams), list(kills)
    return record.result(1, 1, 3.0)


def test_a_kill_is_put_where_log_metrics_and_clients_say_that_it_fell() -> None:
    quick = mixed_answer(14.0, 15.0, 27.0, 28.0, 31.0)
    late = mixed_answer(16.0, 16.5, 28.5, 31.0)
    slow = mixed_answer(14.0, 15.0, 40.0, ask=SLOW)
    times = {
        "load": (11.0, 22.9, 23.5),
        "prefill": (16.4,),
        "replay": (26.5, 28.4),  # `late` has received no token since the shards came back
        "decode": (29.0,),
    }
    for moment, times_s in times.items():
        for at_s in times_s:
            result = record_of(quick, late, slow, kills=[kill_at(at_s, prefill=moment == "prefill", decode=2)])
            assert result.moments == {moment: 1}, at_s
    assert record_of(quick, kills=[kill_at(29.0)]).moments == {"between steps": 1}


def test_lost_streams_other_outcomes_and_too_many_kills_in_a_row_are_failures() -> None:
    fine = mixed_answer(14.0, 15.0)
    assert record_of(fine, kills=[kill_at(29.0, decode=1)]).failures() == []
    assert "1 of 2 streams lost: greedy: cut" in record_of(fine, replace(fine, error="cut"), kills=[]).failures()[0]
    assert "greedy" in record_of(fine, replace(fine, outcome=("b",)), kills=[]).failures()[0]
    assert "in a row" in record_of(fine, kills=[kill_at(29.0, in_a_row=5)]).failures()[0]


def test_what_best_of_drew_is_asked_again_with_its_seeds() -> None:
    drawn = mixed_answer(14.0, 15.0, ask=BEST_OF, outcome=('[7, ["x"]]', '[8, ["y"]]'))
    again = streams.asks_for_each_text(ASKED[BEST_OF], drawn)
    assert [(ask.body["parameters"]["seed"], ask.body["parameters"]["best_of"]) for ask, _ in again] == [(7, 1), (8, 1)]
    assert [expected for _, expected in again] == list(drawn.outcome)


def test_what_changes_from_run_to_run_is_left_out_of_an_outcome_and_nothing_else() -> None:
    one = {"id": "chatcmpl-1", "created": 1, "choices": [{"delta": {"content": "a"}, "logprobs": [{"logprob": -1.5}]}]}
    two = one | {"id": "chatcmpl-2", "created": 2}
    chat = next(ask for ask in ASKED if ask.kind == "OpenAI chat")
    assert list(streams._outcome(chat, [one])) == list(streams._outcome(chat, [two]))
    assert list(streams._outcome(chat, [{"token": {"id": 1}}])) != list(streams._outcome(chat, [{"token": {"id": 2}}]))


def test_the_mixed_asks_are_the_same_each_time_and_of_every_kind() -> None:
    asked = mixed_asks(64, (20, 60))
    assert asked == mixed_asks(64, (20, 60)) and {ask.kind for ask in asked} == {ask.kind for ask in ASKED}
    assert len({json.dumps(ask.body) for ask in asked}) == 64


def test_the_asks_are_half_greedy_half_sampled_and_no_two_the_same() -> None:
    asked = asks(64, 10)
    assert sum("seed" not in ask.body["parameters"] for ask in asked) == 32
    assert len({ask.body["inputs"] for ask in asked}) == 64 and asked == asks(64, 10)


def test_bytes_read_are_found_by_rank() -> None:
    log = (
        log_line("loaded 12 tensors, 3.5 MiB read", rank=0) + "\n" + log_line("loaded 9 tensors, 2.0 MiB read", rank=1)
    )
    assert mib_read(log) == {0: 3.5, 1: 2.0}


def test_the_table_can_be_written_into_the_readme() -> None:
    result = record_of(mixed_answer(14.0, 15.0, 27.0, 31.0), kills=[kill_at(29.0, decode=1), kill_at(30.0, prefill=1)])
    same = compare([stream_answer([1])], [stream_answer([1])])
    fine = poisoned([5, 5], 1, ["3 times on nothing else"] * 2, same, "nothing else")
    kills = outside.as_markdown([result], 8.0)
    figures = [(1, 0, 8.0, 256.0), (2, 0, 4.0, 128.0)]
    table = chaos.as_markdown([("poison", 1, fine)], figures)
    assert "| 1 | 1 | 2 | 0 | 1 × 1 | 0 | 1 (0 × waited) | 1 | 0 | 0 | 17 |" in kills
    assert "| 1 | 1 | 1 | 0 | 0 | 0 | 0 |" in kills and "| 2 | 0 | 4.00 | 50% | 128 |" in table
    assert "| poison | 1 | 1 | 0 | 0 | 0 | deaths of each request 5, 5, most down at a time 1 | held |" in table
    readme = (Path(__file__).parent / "README.md").read_text()
    assert kills in replace_table(replace_table(readme, table), kills, "kills")


def test_the_gap_of_a_kill_is_the_longest_that_it_or_an_answer_under_way_lies_in() -> None:
    through, in_flight = [1.0, 4.9, 6.0, 6.1], [1.0, 4.0, 5.1, 5.3, 9.3, 19.0]
    ended, begun = [1.0, 4.9], [5.1, 9.0]
    assert [*blinks.gaps(5.0, [through, in_flight, ended, begun])] == pytest.approx([1.1, 4.0])


def test_goodput_compares_kills_with_the_peace_before_and_after_and_takes_the_middle_turn() -> None:
    rates = [100, 50, 300, 270, 300, 30, 100]  # turns of 50 / 200, 270 / 300 and 30 / 200
    assert blinks.goodput([Segment(2.0, 2 * rate) for rate in rates]) == 0.25


def test_tokens_aboard_are_prompts_and_what_clients_have_of_requests_under_way_with_a_shared_prefix_once() -> None:
    texts = Texts(ASKED[:3], [], [10, 50, 60], {1: 40, 2: 40})
    answers = [
        mixed_answer(1.0, 2.0, 3.0, 6.0, ask=0),
        mixed_answer(1.0, 6.0, ask=1),
        mixed_answer(2.0, 4.9, 6.0, ask=2),
        mixed_answer(1.0, 4.0, ask=0),
        mixed_answer(5.5, 7.0, ask=0),
    ]
    assert blinks.tokens_aboard(5.0, answers, texts) == (10 + 2) + 10 + (20 + 1) + 40


def test_as_few_streams_are_asked_for_as_have_a_number_of_tokens_but_one_at_least() -> None:
    answers = [StreamAnswer(i, 0.0, 1.0, (), (str(i),), "") for i in range(len(ASKED))]
    texts = Texts(ASKED, answers, [10] * len(ASKED), {})
    some = texts.few(40.0)
    assert [each.ask for each in some.expected] == [*range(len(some.asked))] and len(some.asked) >= 2
    assert sum(10 + ask.new_tokens for ask in some.asked) <= 40 and texts.few(0.0).asked == ASKED[:1]
    assert [ASKED[int(each.outcome[0])] for each in some.expected] == some.asked


def test_a_figure_says_whether_it_misses_its_target() -> None:
    assert [str(Figure(None)), str(Figure(0.5)), str(Figure(0.5, 0.5))] == ["–", "0.50", "0.50 (≤ 0.50)"]
    assert str(Figure(1.6, 1.5)) == "1.60 (≤ 1.50), missed" and not Figure(0.9, 0.8, is_least=True).is_missed
    assert str(Figure(0.7, 0.8, is_least=True)) == "0.70 (≥ 0.80), missed"


def crowd_of(segments: Sequence[Segment], *answers: StreamAnswer) -> blinks.Crowd:
    texts = Texts(ASKED, [], [10] * len(ASKED), {})
    server: Any = None  # nothing is asked of it
    crowd = blinks.Crowd(server, 1, signal.SIGKILL, texts, random.Random(1))
    crowd.segments, crowd.answers = list(segments), list(answers)
    return crowd


def test_blinks_have_gaps_goodput_and_bursts_with_their_targets_in_a_table() -> None:
    grammar = next(i for i, ask in enumerate(ASKED) if ask.kind == "grammar")
    answers = [
        mixed_answer(0.0, 1.0, 4.9, 8.9, 20.0),
        mixed_answer(0.0, 1.0, 4.0, 9.0, 20.0, ask=grammar),
        mixed_answer(0.0, 1.0, 4.0, 15.0, 20.0, ask=SLOW),
    ]
    turns = crowd_of([Segment(1.0, 100), Segment(10.0, 600, [kill_at(5.0)]), Segment(1.0, 100)], *answers)
    bursts = [[kill_at(5.0 + each) for each in late] for late in ((0.0, 0.4, 0.8), (0.0, 0.4, 1.2), (0.0, 0.4))]
    other = crowd_of([Segment(5.0, 10, kills) for kills in bursts], *answers)
    rows = {
        way: blinks.Blinks(way, 10.0, turns, 8.0, other, crowd_of([Segment(1.0, 10, [])])).rows()
        for way in blinks.WAYS[SHARD]
    }
    kept, recomputed = ([str(cell) for cell in each.values()] for each in rows.values())
    assert kept[:5] == ["4.00 (≤ 0.50), missed", "4.00 (≤ 1.50), missed", "5.00", "5.00", "0.60 (≥ 0.57)"]
    assert kept[5:8] == ["4.00", "4.00 (≤ 2.50), missed", "1 of 3"]
    aboard = 3 * 10 + 3 * 2
    assert recomputed[:2] == ["4.00", f"4.00 (≤ {0.8 + 1.3 * aboard / 10:.2f})"] and str(aboard) in recomputed
    turns.victim = ENGINE
    of_engines = blinks.Blinks("engine killed", 10.0, turns, 8.0).rows()
    assert str(of_engines["99th percentile"]) == "4.00 (≤ 2.00), missed" and "worst" not in of_engines


@pytest.mark.parametrize("name", ["demo, 1 shard", "demo, 2 shards", "m100, 1 shard", "m100, 2 shards"])
def test_the_readme_has_a_place_for_each_table_of_blinks(name: str) -> None:
    readme = (Path(__file__).parent / "README.md").read_text()
    for victims in ("", ", engines"):
        assert "| gap |" in replace_table(readme, "| gap |", f"blinks of {name}{victims}")


def test_the_launcher_survives_one_deadly_request_and_four_other_kills() -> None:
    assert MAX_LOSSES + 4 < MAX_DEATHS
