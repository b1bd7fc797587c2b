"""When a router counts as hung: by its answers and the kernel's counts, with a clock that only the test moves."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from text_generation_launcher.kept_process import CHECK_S, Pulse, Vitals, idle_s, read_vitals, until_it_hangs

SLEEPS = Vitals("S", 1.0, 0.0)


class Watched:
    """A router whose answers and thread counts the test sets. The launcher checks every `check_s` seconds."""

    def __init__(self, begun: bool = True) -> None:
        self.now_s = 100.0
        self.pings = 0
        self.pulse = Pulse(self._ask, self.now_s)
        self.ran_s = self.waited_s = 0.0
        if begun:
            self.pulse.begin()

    def _ask(self) -> None:
        self.pings += 1

    def pass_s(
        self,
        seconds: float,
        state: str = "S",
        *,
        answers: bool = False,
        running: float = 0.0,
        waiting: float = 0.0,
        check_s: float = CHECK_S,
        known: bool = True,
    ) -> tuple[float, str] | None:
        """Advances the clock by `seconds`. Returns after how many seconds the router counts as hung, and why; None if
        it does not. `running` and `waiting` are shares of the time."""
        started_s = self.now_s
        while self.now_s < started_s + seconds - 1e-9:
            self.now_s += check_s
            self.ran_s += running * check_s
            self.waited_s += waiting * check_s
            if answers:
                self.pulse.answered()
            vitals = Vitals(state, self.ran_s, self.waited_s) if known else None
            reason = self.pulse.judge(self.now_s, vitals)
            if reason is not None:
                return self.now_s - started_s, reason
        return None


def test_a_router_that_answers_is_never_hung_and_gets_one_ping_for_each_check() -> None:
    router = Watched()
    assert router.pass_s(1000, answers=True) is None
    assert router.pings == 1000 / CHECK_S


def test_a_router_hangs_when_it_is_stopped_for_two_and_a_half_seconds_and_not_for_two() -> None:
    router = Watched()
    for _ in range(5):
        assert router.pass_s(3, answers=True) is None
        assert router.pass_s(2.25, "T") is None
    assert router.pass_s(3, answers=True) is None
    assert router.pass_s(10, "T") == (2.5, "its process has been stopped for 2.2 s")


def test_an_event_loop_that_does_not_answer_hangs_whether_it_sleeps_or_runs() -> None:
    for state, running in (("S", 0.0), ("D", 0.0), ("R", 1.0)):
        router = Watched()
        router.pass_s(5, answers=True)
        when_s, reason = router.pass_s(60, state, running=running) or (0.0, "")
        assert 8.0 <= when_s <= 8.5 and reason == "its event loop has not answered for 8.0 s"


def test_a_router_that_does_not_answer_has_one_ping_waiting_and_no_more() -> None:
    router = Watched()
    router.pass_s(7)
    assert router.pings == 1


@pytest.mark.parametrize(
    ("state", "running", "waiting"),
    [
        ("R", 0.0, 0.0),  # one long wait for a processor, which the kernel counts only when it is over
        ("R", 0.1, 0.9),
        ("S", 0.05, 0.95),
    ],
)
def test_a_router_without_a_processor_does_not_hang_for_a_minute(state: str, running: float, waiting: float) -> None:
    router = Watched()
    router.pass_s(5, answers=True)
    assert router.pass_s(60, state, running=running, waiting=waiting) is None


def test_a_router_with_little_processor_time_hangs_after_eight_seconds_of_it() -> None:
    router = Watched()
    when_s, _ = router.pass_s(600, "R", running=0.2, waiting=0.8) or (0.0, "")
    assert 40 <= when_s <= 41


def test_a_launcher_that_was_stopped_itself_counts_anew() -> None:
    """The first check after the launcher was stopped compares with counts from before the stop. The time between must
    not count."""
    router = Watched()
    assert router.pass_s(2.25, "T") is None
    assert router.pass_s(10, "T", check_s=10) is None
    assert router.pass_s(2, "T") is None
    router = Watched()
    assert router.pass_s(7.5) is None
    assert router.pass_s(10, check_s=10) is None
    assert router.pass_s(7.5) is None


def test_nothing_is_expected_of_a_router_that_does_not_serve_yet() -> None:
    router = Watched(begun=False)
    assert router.pass_s(600) is None
    assert router.pass_s(600, "T") is None
    assert router.pings == 0
    router.pulse.begin()
    assert router.pass_s(7.5) is None and router.pings == 1
    assert router.pass_s(1) is not None


def test_without_proc_only_missing_answers_count() -> None:
    when_s, _ = Watched().pass_s(60, known=False) or (0.0, "")
    assert 8.0 <= when_s <= 8.5


def test_idle_time_is_never_negative_and_never_longer_than_the_gap() -> None:
    assert idle_s(0.25, Vitals("S", 1, 1), Vitals("S", 1, 2)) == 0.0
    assert idle_s(0.25, Vitals("R", 1, 1), Vitals("R", 3, 1)) == 0.25
    assert idle_s(0.25, SLEEPS, SLEEPS) == idle_s(0.25, None, SLEEPS) == idle_s(0.25, SLEEPS, None) == 0.25


def child(code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-S", "-c", code])


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="there is no /proc here")
def test_vitals_of_running_sleeping_and_stopped_processes() -> None:
    with child("while True: pass") as process:
        try:
            wait_for(lambda: (vitals := read_vitals(process.pid)) is not None and vitals.ran_s > 0.1)
            assert (read_vitals(process.pid) or SLEEPS).state == "R"
            os.kill(process.pid, signal.SIGSTOP)
            wait_for(lambda: (read_vitals(process.pid) or SLEEPS).state == "T")
        finally:
            process.kill()
    assert read_vitals(process.pid) is None  # The process has ended.


def test_a_kernel_without_scheduler_statistics_gives_state_and_running_time(tmp_path: Path) -> None:
    thread = tmp_path / "7" / "task" / "7"
    thread.mkdir(parents=True)
    (thread / "stat").write_text("7 (a) b) R " + " ".join(["0"] * 10) + " 150 50 " + "0 " * 30)
    assert read_vitals(7, tmp_path) == Vitals("R", 200 / os.sysconf("SC_CLK_TCK"), 0.0)
    (thread / "schedstat").write_text("1500000000 250000000 9\n")
    assert read_vitals(7, tmp_path) == Vitals("R", 1.5, 0.25)
    assert read_vitals(8, tmp_path) is None


def test_checks_are_apart_and_others_run_between_them() -> None:
    pulse = Pulse(lambda: asked.append(time.monotonic()) or pulse.answered())
    asked: list[float] = []
    pulse.begin()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(until_it_hangs(pulse, os.getpid()), 3.5 * CHECK_S))
    assert 1 <= len(asked) <= 3


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="there is no /proc here")
def test_a_stopped_process_is_found_in_real_time() -> None:
    async def run(pid: int) -> str:
        pulse = Pulse(lambda: pulse.answered())
        pulse.begin()
        os.kill(pid, signal.SIGSTOP)
        return await asyncio.wait_for(until_it_hangs(pulse, pid), 30)

    with child("import time; time.sleep(60)") as process:
        try:
            assert asyncio.run(run(process.pid)).startswith("its process has been stopped for ")
        finally:
            process.kill()
