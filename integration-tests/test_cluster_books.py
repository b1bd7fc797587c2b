"""What `make test-cluster` computes of answers and logs: pure, without machines."""

import json
import random
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import cluster_chaos
import cluster_record
import logs
import psutil
import pytest
from asks import mixed_asks
from cluster_chaos import Injection, Plan
from cluster_faults import Begun, ClusterFault, turns
from cluster_record import NOTICED_LIMIT_S
from faults import poisoned
from logs import Notice
from machines import Machine
from streams import StreamAnswer, compare

ASKED = mixed_asks(14, (20, 40))
TARGET = "10.77.0.3:5000"


def answer(*arrivals_s: float, ask: int = 0, error: str = "", port: int = 1, outcome: str = "a") -> StreamAnswer:
    return StreamAnswer(ask, arrivals_s[0] - 1, arrivals_s[-1], arrivals_s, (outcome,), error, port)


def fault(kind: str = "power lost", at_s: float = 100.0, ports: frozenset[int] = frozenset()) -> ClusterFault:
    return ClusterFault(kind, "10.77.0.3", TARGET, at_s, at_s + 5, 7, ports)


def lost(at_s: float, front: str, target: str = TARGET) -> Notice:
    return Notice(at_s, target, front, True, "silent")


def connected(at_s: float) -> Notice:
    return Notice(at_s, TARGET, "0", False, "term 1")


def result(*answers: StreamAnswer, faults: tuple[ClusterFault, ...] = (), notices: tuple[Notice, ...] = ()):
    expected = [answer(1.0, ask=place) for place in range(len(ASKED))]
    return cluster_record.result(1, faults, notices, ASKED, expected, answers, ())


def test_a_stream_may_be_lost_only_with_the_front_that_had_its_connection() -> None:
    died = fault("front killed", 100.0, frozenset({7}))
    with_front, other = answer(99.0, error="cut", port=7), answer(99.0, error="cut", port=8)
    assert result(with_front, faults=(died,)).failures() == []
    assert result(with_front, faults=(died,)).with_front == 1
    assert "1 of 1 streams lost" in result(other, faults=(died,)).failures()[0]
    later = answer(200.0, error="cut", port=7)  # the kernel gives a port again
    assert "lost" in result(later, faults=(died,)).failures()[0]


def test_another_outcome_is_a_failure_that_names_the_first_difference() -> None:
    (failure,) = result(answer(1.0), answer(2.0, outcome="b")).failures()
    assert "1 outcomes differ" in failure and "event 0: b instead of a" in failure


def test_a_loss_is_noticed_when_the_last_front_has_noticed_and_streams_flow_when_the_slowest_does() -> None:
    streams = answer(90.0, 99.5, 104.0, 110.0), answer(99.0, 99.9, 105.5, 106.0)
    notices = (lost(99.0, "0"), lost(103.0, "1"), lost(103.5, "0"), lost(104.9, "0"), lost(109.0, "2", "another"))
    effect = cluster_record.effect(fault(), notices, streams)
    assert (effect.noticed_s, effect.flowing_s, effect.in_text) == (3.5, 2.0, 2)
    assert effect.gap_s == 6.0 and effect.failures() == []


def test_a_late_notice_and_streams_that_wait_after_it_are_failures_of_silent_faults() -> None:
    streams = [answer(99.0, 99.9, 120.0, 121.0)]
    late = cluster_record.effect(fault(), [lost(100 + NOTICED_LIMIT_S + 1, "0")], streams)
    assert ["noticed after 11.0 s" in late.failures()[0], "flow 9.0 s after" in late.failures()[1]] == [True, True]
    told = cluster_record.effect(fault("engine killed"), [lost(111.0, "0")], streams)
    assert told.failures() == []
    unnoticed = cluster_record.effect(fault("partition"), [connected(90.0)], streams)
    assert (unnoticed.noticed_s, unnoticed.flowing_s, unnoticed.failures()) == (None, None, [])


@pytest.mark.parametrize("kind", cluster_record.ENDED)
def test_the_end_of_an_engine_that_a_front_was_connected_to_has_to_be_noticed(kind: str) -> None:
    (failure,) = cluster_record.effect(fault(kind), [connected(90.0)], []).failures()
    assert "not noticed" in failure
    for notices in ([], [connected(80.0), lost(90.0, "0")], [connected(101.0)]):
        assert cluster_record.effect(fault(kind), notices, []).failures() == []


def test_a_run_of_all_faults_has_enough_of_each_kind() -> None:
    faults = [*[fault("power lost", at_s=100.0 + 50 * i) for i in range(3)], fault("partition", at_s=500.0)]
    assert result(faults=tuple(faults)).shortfalls(4, 1, 28) == []
    assert len(result(faults=tuple(faults)).shortfalls(5, 2, 29)) == 3


def test_notices_are_read_from_the_fronts_log() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)

    def line(message: str) -> str:
        return json.dumps({"timestamp": at.isoformat(), "message": message, "worker": 1})

    log = "\n".join([
        line(f"engine {TARGET} is connected, term 5"), "not JSON", '{"cut', line("another"),
        line(f"engine {TARGET} is lost: silent for 3 s"),
    ])  # fmt: skip
    assert list(logs.read_notices(log)) == [
        Notice(at.timestamp(), TARGET, "1", False, "term 5"),
        Notice(at.timestamp(), TARGET, "1", True, "silent for 3 s"),
    ]


def test_a_growing_log_is_read_line_by_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = (
        json.dumps(
            {"timestamp": "2026-01-01T00:00:00+00:00", "message": f"engine {TARGET} is lost: closed", "worker": 1}
        )
        + "\n"
    )
    log.write_text(line + line[:30])
    notices = logs.NoticeLog(log)
    assert len(notices.read()) == len(notices.read()) == 1
    with log.open("a") as file:
        file.write(line[30:])
    assert [notice.target for notice in notices.read()] == [TARGET, TARGET]


class BrokenDeployment:
    """Becomes whole the first time only."""

    def __init__(self) -> None:
        self.times = 0

    def until_whole(self) -> None:
        self.times += 1
        if self.times > 1:
            raise RuntimeError("not whole")


def test_a_deployment_that_does_not_recover_ends_the_faults_and_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def impossible(injector: object) -> Begun:
        raise psutil.AccessDenied(1)

    machine = Machine("machine", "port", "10.77.0.3", ("bridge", "other"))
    kinds = {"power lost": lambda injector: Begun(machine, TARGET, 7, 100.0, range_s=(0, 0)), "impossible": impossible}
    monkeypatch.setattr(cluster_chaos, "GAP_S", (0.0, 0.0))
    monkeypatch.setattr(cluster_chaos, "OVERLAPPING", 0.0)
    way = cluster_chaos.WayToStart(BrokenDeployment, kinds, 0, "none", "none")
    notes: list[str] = []
    injection = Injection(BrokenDeployment(), Plan(1, ["power lost", "impossible"], 8), way, notes.append)
    injection.run()
    assert len(injection.problems) >= cluster_chaos.MAX_PROBLEMS
    assert len(injection.faults) < 8
    found = replace(result(), problems=tuple(injection.problems))
    assert any("not whole" in failure for failure in found.failures())
    assert any("impossible" in failure for failure in found.failures())


def test_a_replica_is_down_from_the_first_death_until_it_is_ready() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC).timestamp()

    def line(after_s: float, message: str) -> str:
        timestamp = datetime.fromtimestamp(at + after_s, UTC).isoformat()
        return json.dumps({"timestamp": timestamp, "message": message})

    died, ready = "fault injected: shard.chunk kill at pass 1", "Setting max batch total tokens to 512"
    log = "\n".join([line(0, ready), line(1, died), line(2, died), line(5, ready), line(9, died)])
    assert list(logs.down(log)) == [(at + 1, at + 5), (at + 9, float("inf"))]


def test_replicas_that_are_down_at_a_time_are_counted() -> None:
    assert logs.max_at_once([]) == 0
    assert logs.max_at_once([(1, 3), (3, 5), (6, 7)]) == 1
    assert logs.max_at_once([(1, 4), (3, 5), (6, 7)]) == 2


def test_a_poison_that_has_two_replicas_down_or_no_named_error_is_a_failure() -> None:
    same = compare([], [])
    assert poisoned([5], 1, ["they died 3 times on nothing else"], same, "on nothing else").failures() == []
    bad = poisoned([0], 2, ["Internal"], same, "on nothing else")
    words = ["a request killed", "2 replicas down", "a request ended"]
    assert [" ".join(failure.split()[:3]) for failure in bad.failures()] == words


def test_kinds_come_equally_often_in_an_order_of_the_seed() -> None:
    drawn = turns(["a", "b", "c"], 9, random.Random(1))
    assert sorted(drawn) == sorted("abc" * 3)
    assert drawn == turns(["a", "b", "c"], 9, random.Random(1)) != turns(["a", "b", "c"], 9, random.Random(2))


def test_the_table_counts_what_was_injected_and_lost() -> None:
    died = fault("front killed", 100.0, frozenset({7}))
    found = result(answer(99.0, 101.0), answer(99.0, error="cut", port=7), faults=(died, fault(at_s=200.0)))
    table = cluster_record.as_table(found)
    assert "| front killed | 1 | 7 |" in table and "| power lost | 1 | 7 |" in table
    assert "Seed 1: 2 faults, 14 requests on their victims" in table
    assert "2 streams of 1 kinds; 1 lost with their front" in table
