"""When a shard counts as hung: tables of its answers over time; and how answers are read."""

import asyncio
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest

from text_generation_launcher import shard_group
from text_generation_launcher.shard_group import HealthAnswer, HealthClient, Watchdog
from text_generation_proto import generate_pb2 as pb
from text_generation_proto import generate_pb2_grpc

READY = HealthAnswer("ready", progress=10, running_step=0, longest_pause_s=0.0)
AT_WORK = replace(READY, running_step=7)
LOADING = replace(READY, phase="load")
WARMING = replace(READY, phase="warmup")


def first_verdict(history: list[tuple[float, HealthAnswer | None]]) -> tuple[float, str] | None:
    """The time at which the watchdog first says that the shard hangs, and the reason. `history` holds times and
    answers."""
    watchdog = Watchdog(0.0)
    for now_s, answer in history:
        verdict = watchdog.judge(now_s, answer)
        if verdict is not None:
            return now_s, verdict
    return None


def every(period_s: float, until_s: float, answer: HealthAnswer | None) -> list[tuple[float, HealthAnswer | None]]:
    return [(number * period_s, answer) for number in range(1, round(until_s / period_s) + 1)]


@pytest.mark.parametrize("phase", ["load", "warmup", None])
def test_a_preparing_shard_may_stand_still_for_300_s(phase):
    answer = None if phase is None else replace(READY, phase=phase)
    when_s, verdict = first_verdict(every(2.0, 600.0, answer))
    assert 300.0 <= when_s <= 302.0
    assert verdict == f"phase {phase or 'start'} stands still for 300 s"


def test_each_tensor_that_is_loaded_starts_the_clock_anew():
    history = [(now_s, replace(LOADING, progress=number)) for number, now_s in enumerate(range(0, 6000, 200))]
    assert first_verdict(history) is None


@pytest.mark.parametrize("preparing", [LOADING, WARMING])
def test_ten_missing_answers_in_a_row_while_preparing_are_a_hang(preparing):
    silence = [(2.0 * number, None) for number in range(1, 10)]
    assert first_verdict([(0.5, preparing), *silence, (20.0, preparing), *silence]) is None
    verdict = "Health was not answered 10 times in a row"
    assert first_verdict([(0.5, preparing), *silence, (20.0, None)]) == (20.0, verdict)


def test_a_shard_that_never_answered_may_be_silent_for_300_s():
    assert first_verdict(every(2.0, 298.0, None)) is None


def test_two_missing_answers_in_a_row_are_a_hang_and_one_is_not():
    assert first_verdict([(0.5, READY), (2.5, None), (3.0, READY), (5.0, None), (5.5, READY)]) is None
    assert first_verdict([(0.5, READY), (2.5, None), (4.5, None)]) == (4.5, "Health was not answered 2 times in a row")


def test_an_idle_shard_may_stand_still_for_ever():
    assert first_verdict(every(0.5, 3600.0, READY)) is None


def test_a_step_that_stands_still_for_five_seconds_is_a_hang():
    assert first_verdict([(0.5, READY), *every(0.5, 60.0, AT_WORK)[1:]]) == (6.0, "step 7 stands still for 5 s")


def test_a_step_that_makes_progress_does_not_hang():
    history = [(0.5 * n, replace(AT_WORK, progress=n // 8)) for n in range(1000)]
    assert first_verdict(history) is None


def test_steps_that_follow_each_other_do_not_hang_even_without_progress():
    history = [(0.5 * n, replace(AT_WORK, running_step=n // 8)) for n in range(1, 1000)]
    assert first_verdict(history) is None


def test_idle_time_before_a_step_does_not_count():
    history = every(0.5, 100.0, READY) + [(100.0 + now_s, answer) for now_s, answer in every(0.5, 4.5, AT_WORK)]
    assert first_verdict(history) is None


def test_a_step_may_stand_still_for_ten_times_the_longest_pause():
    slow = replace(AT_WORK, longest_pause_s=3.0)
    when_s, verdict = first_verdict(every(0.5, 60.0, slow))
    assert (when_s, verdict) == (30.5, "step 7 stands still for 30 s")


def test_missing_answers_between_answers_count_as_standing_still():
    history = [(0.5, AT_WORK), (2.5, None), (3.0, AT_WORK), (5.0, None), (5.5, AT_WORK)]
    assert first_verdict(history) == (5.5, "step 7 stands still for 5 s")


def test_a_launcher_that_was_stopped_itself_blames_no_shard():
    assert first_verdict([(0.5, AT_WORK), (1.0, AT_WORK), (4000.0, AT_WORK)]) is None
    assert first_verdict([(0.5, AT_WORK), (4000.0, None), (4000.5, replace(AT_WORK, progress=11))]) is None


class Shard(generate_pb2_grpc.TextGenerationServiceServicer):
    def Health(self, request, context):
        return pb.HealthResponse(phase="warmup", progress=5, running_step=6, longest_pause_ms=1500, last_step=4)


def ask(socket_path: str) -> HealthAnswer | None:
    async def run() -> HealthAnswer | None:
        client = HealthClient(socket_path)
        try:
            return await client.ask()
        finally:
            await client.close()

    return asyncio.run(run())


def test_health_is_read_field_by_field(monkeypatch):
    monkeypatch.setattr(shard_group, "ANSWER_S", 60.0)  # a busy machine may delay the answer
    with tempfile.TemporaryDirectory() as folder:  # not pytest's tmp_path, because socket paths must be short
        server = grpc.server(ThreadPoolExecutor(1))
        generate_pb2_grpc.add_TextGenerationServiceServicer_to_server(Shard(), server)
        server.add_insecure_port(f"unix://{folder}/shard-0")
        server.start()
        try:
            assert ask(f"{folder}/shard-0") == HealthAnswer("warmup", 5, 6, 1.5)
        finally:
            server.stop(None).wait()


def test_a_missing_shard_gives_no_answer(tmp_path):
    assert ask(str(tmp_path / "s")) is None
