import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import pytest

from text_generation_common.forked import BROKEN_STATUS
from text_generation_server.errors import StepAborted, StepFailed, StepRefused
from text_generation_server.step.results import Pending
from text_generation_server.worker import MAX_HELD, PACE, StepClock, Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(epoch=3, hold_s=0.2)
    yield worker
    worker.stop()


def fails(clock: StepClock) -> None:
    raise ArithmeticError("overflow")


def result(future: Future[Any]) -> Any:
    return future.result(timeout=60)


class Device:
    """A fake device, which completes launched steps when it is told to."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.has_launched = threading.Condition()
        self.moments: dict[str, FakeMoment] = {}

    def launch(self, name: str) -> Callable[[StepClock], Pending[str]]:
        def run(clock: StepClock) -> Pending[str]:
            with self.has_launched:
                self.moments[name] = FakeMoment()
                self.launched.append(name)
                self.has_launched.notify_all()
            return Pending(self.moments[name], lambda: self.read(name))

        return run

    def read(self, name: str) -> str:
        self.moments[name].wait()
        return name

    def until(self, count: int) -> list[str]:
        with self.has_launched:
            assert self.has_launched.wait_for(lambda: len(self.launched) >= count, 60)
        return self.launched

    def complete(self, name: str, error: Exception | None = None) -> None:
        self.moments[name].error = error
        self.moments[name].event.set()


class FakeMoment:
    def __init__(self) -> None:
        self.event = threading.Event()
        self.error: Exception | None = None

    def has_come(self) -> bool:
        return self.event.is_set()

    def wait(self) -> None:
        assert self.event.wait(10)
        if self.error:
            raise self.error

    def ns_since(self, earlier: "FakeMoment") -> int:
        return 0


@pytest.fixture
def device() -> Device:
    return Device()


def test_steps_run_in_their_order_whatever_the_order_of_arrival(worker: Worker) -> None:
    ran: list[int] = []
    futures = [worker.submit(3, step, lambda clock, step=step: ran.append(step)) for step in (3, 2, 5, 4, 1)]
    for future in futures:
        result(future)
    assert ran == [1, 2, 3, 4, 5] and worker.last_step == 5


def test_a_step_learns_whether_its_successor_is_already_here(worker: Worker) -> None:
    started, go = threading.Event(), threading.Event()

    def first(clock: StepClock) -> bool:
        started.set()
        go.wait(60)
        return clock.successor_queued()

    one = worker.submit(3, 1, first)
    started.wait(60)
    two = worker.submit(3, 2, lambda clock: clock.successor_queued())
    go.set()
    assert result(one) is True and result(two) is False


def test_stale_and_repeated_steps_are_refused(worker: Worker) -> None:
    result(worker.submit(3, 1, lambda clock: None))
    for epoch, step in ((2, 2), (3, 1)):
        with pytest.raises(StepRefused):
            result(worker.submit(epoch, step, lambda clock: None))


def test_a_step_whose_predecessor_does_not_come_is_aborted(worker: Worker) -> None:
    with pytest.raises(StepAborted, match="step 1"):
        result(worker.submit(3, 2, lambda clock: None))
    assert result(worker.submit(3, 1, lambda clock: "ran")) == "ran"


def test_only_a_few_early_steps_are_held(worker: Worker) -> None:
    early = [worker.submit(3, step, lambda clock: None) for step in range(2, 3 + MAX_HELD)]
    with pytest.raises(StepAborted, match="too early"):
        early[-1].result(timeout=0)
    result(worker.submit(3, 1, lambda clock: None))
    for future in early[:-1]:
        result(future)


def test_after_a_failure_steps_are_aborted_until_a_clear_comes(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StepFailed, match="step 1 failed: ArithmeticError"):
        result(worker.submit(3, 1, fails))
    with pytest.raises(StepAborted):
        result(worker.submit(3, 2, lambda clock: None))
    assert worker.num_pending == 0
    assert result(worker.submit(3, 3, lambda clock: "clear", clears=True)) == "clear"
    assert result(worker.submit(3, 4, lambda clock: "goes on")) == "goes on"


def test_an_abandoned_step_still_runs(worker: Worker) -> None:
    ran = threading.Event()
    early = worker.submit(3, 2, lambda clock: ran.set())
    assert not early.cancel()
    result(worker.submit(3, 1, lambda clock: None))
    assert ran.wait(60)


def test_a_warmup_starts_the_sequence_anew(worker: Worker) -> None:
    result(worker.submit(3, 1, lambda clock: None))
    assert worker.last_step == 1
    result(worker.run_outside(lambda: None, restart_sequence=True))
    assert worker.last_step == 0, "Health says that no step of the new sequence has run"
    assert result(worker.submit(3, 1, lambda clock: "first again")) == "first again"


def test_health_shows_which_step_runs(worker: Worker) -> None:
    running, finish = threading.Event(), threading.Event()

    def run(clock: StepClock) -> None:
        running.set()
        finish.wait(10)

    assert worker.running_step == 0
    future = worker.submit(3, 1, run)
    assert running.wait(10) and worker.running_step == 1
    finish.set()
    future.result(10)
    assert worker.running_step == 0 and worker.last_step == 1


def test_the_next_step_is_launched_before_the_last_one_is_complete(worker: Worker, device: Device) -> None:
    one = worker.submit(3, 1, device.launch("one"))
    assert device.until(1) == ["one"] and worker.running_step == 1
    two = worker.submit(3, 2, device.launch("two"))
    assert device.until(2) == ["one", "two"]
    assert not one.done() and worker.running_step == 1 and worker.last_step == 0
    device.complete("one")
    assert result(one) == "one" and not two.done()
    device.complete("two")
    assert result(two) == "two" and (worker.running_step, worker.last_step) == (0, 2)


def test_no_more_than_two_steps_are_on_the_device(worker: Worker, device: Device) -> None:
    futures = [worker.submit(3, step, device.launch(str(step))) for step in (1, 2, 3)]
    device.until(2)
    time.sleep(0.3)  # longer than a call is held while its predecessor is missing
    assert device.launched == ["1", "2"]
    device.complete("1")
    assert result(futures[0]) == "1" and device.until(3) == ["1", "2", "3"]
    device.complete("2")
    device.complete("3")
    assert [result(future) for future in futures] == ["1", "2", "3"]


def test_a_step_that_fails_on_the_device_fails_the_step_behind_it(worker: Worker, device: Device) -> None:
    one, two = (worker.submit(3, step, device.launch(str(step))) for step in (1, 2))
    device.until(2)
    device.complete("1", ArithmeticError("overflow"))
    with pytest.raises(StepFailed, match="step 1 failed: ArithmeticError: overflow"):
        result(one)
    with pytest.raises(StepAborted, match="step 1 failed"):
        result(two)
    with pytest.raises(StepAborted, match="step 1 failed"):
        result(worker.submit(3, 3, lambda clock: "never"))
    device.complete("2")
    assert result(worker.submit(3, 4, lambda clock: "clear", clears=True)) == "clear"
    assert result(worker.submit(3, 5, lambda clock: "goes on")) == "goes on"


def test_a_step_that_cannot_be_launched_fails_after_the_one_before_it_is_answered(
    worker: Worker, device: Device
) -> None:
    one = worker.submit(3, 1, device.launch("one"))
    device.until(1)
    two = worker.submit(3, 2, fails)
    time.sleep(0.05)
    assert not one.done() and not two.done()
    device.complete("one")
    assert result(one) == "one"
    with pytest.raises(StepFailed, match="step 2 failed"):
        result(two)


def test_of_two_failures_the_first_is_named(worker: Worker, device: Device) -> None:
    one = worker.submit(3, 1, device.launch("one"))
    device.until(1)
    two = worker.submit(3, 2, fails)
    device.complete("one", ArithmeticError("first"))
    with pytest.raises(StepFailed, match="step 1 failed"):
        result(one)
    with pytest.raises(StepAborted, match="step 1 failed"):
        result(two)


def test_a_clear_waits_until_a_failure_is_known(worker: Worker, device: Device) -> None:
    one = worker.submit(3, 1, device.launch("one"))
    device.until(1)
    clear = worker.submit(3, 2, lambda clock: "clear", clears=True)
    after = worker.submit(3, 3, lambda clock: "goes on")
    device.complete("one", ArithmeticError("late"))
    with pytest.raises(StepFailed):
        result(one)
    assert (result(clear), result(after)) == ("clear", "goes on")


def test_a_filter_is_not_answered_before_the_step_that_it_follows(worker: Worker, device: Device) -> None:
    one = worker.submit(3, 1, device.launch("one"))
    device.until(1)
    filtered = threading.Event()
    two = worker.submit(3, 2, lambda clock: filtered.set())
    assert filtered.wait(60) and not two.done()
    device.complete("one")
    assert result(one) == "one" and result(two) is None


def test_a_filter_behind_a_step_does_not_delay_the_next_step(worker: Worker, device: Device) -> None:
    one = worker.submit(3, 1, device.launch("one"))
    two, three = worker.submit(3, 2, lambda clock: "filtered"), worker.submit(3, 3, device.launch("three"))
    device.until(2)
    assert not one.done() and not two.done()
    for name in ("three", "one"):
        device.complete(name)
    assert (result(one), result(two), result(three)) == ("one", "filtered", "three")


def test_a_warmup_waits_for_the_device(worker: Worker, device: Device) -> None:
    one = worker.submit(3, 1, device.launch("one"))
    device.until(1)
    warmup = worker.run_outside(lambda: "warm", restart_sequence=True)
    assert not warmup.done() and worker.num_pending == 2
    device.complete("one")
    assert (result(one), result(warmup)) == ("one", "warm")
    assert result(worker.run_outside(lambda: worker.num_pending)) == 1, "the call itself"


def test_a_worker_that_stops_answers_what_it_has_launched(device: Device) -> None:
    worker = Worker(epoch=3)
    one = worker.submit(3, 1, device.launch("one"))
    device.until(1)
    threading.Timer(0.05, device.complete, ["one"]).start()
    worker.stop()
    assert one.done() and not worker._thread.is_alive()
    assert result(one) == "one"


def test_a_worker_has_stopped_when_its_last_answer_has_been_read_however_long_that_takes() -> None:
    worker, moment = Worker(epoch=3), FakeMoment()
    reading = threading.Event()

    def read() -> str:
        reading.set()
        time.sleep(0.1)
        return "one"

    one = worker.submit(3, 1, lambda clock: Pending(moment, read))
    moment.event.set()
    assert reading.wait(60)
    worker.stop()
    assert one.done() and not worker._thread.is_alive()


def test_a_worker_that_stops_makes_the_last_calls_after_the_steps(device: Device) -> None:
    worker = Worker(epoch=3)
    one = worker.submit(3, 1, device.launch("one"))
    device.until(1)
    last = worker.run_outside(lambda: one.done())
    threading.Timer(0.05, device.complete, ["one"]).start()
    assert worker.stop()
    assert result(last) is True


def test_a_worker_that_cannot_end_is_left_alone_after_the_deadline() -> None:
    worker, closed = Worker(epoch=3), threading.Event()
    closing = worker.run_outside(lambda: closed.wait(10))
    assert not worker.stop(within_s=0.05) and not closing.done()
    closed.set()
    assert worker.stop(within_s=10) and result(closing) is True


def test_a_step_that_waits_for_its_predecessor_is_aborted_when_the_worker_stops() -> None:
    worker = Worker(epoch=3)
    early = worker.submit(3, 2, lambda clock: None)
    worker.stop()
    with pytest.raises(StepAborted, match="stopping"):
        early.result(timeout=0)


def test_the_gap_before_a_step_is_the_time_in_which_nothing_ran(device: Device) -> None:
    began_ns = time.perf_counter_ns()
    worker = Worker(epoch=3)
    try:
        time.sleep(0.02)
        first = result(worker.submit(3, 1, lambda clock: clock.gap_ns))
        assert 0.02e9 <= first <= time.perf_counter_ns() - began_ns
        result(worker.submit(3, 2, lambda clock: time.sleep(0.05)))
        ended_ns = time.perf_counter_ns()
        worker.submit(3, 3, device.launch("three"))
        overlapping = worker.submit(3, 4, lambda clock: clock.gap_ns)
        device.until(1)
        device.complete("three")
        assert result(overlapping) <= time.perf_counter_ns() - ended_ns
    finally:
        worker.stop()


def test_idle_work_is_done_a_piece_at_a_time_and_steps_come_first(worker: Worker) -> None:
    done: list[str] = []
    step_runs, has_ended = threading.Event(), threading.Event()

    def piece() -> bool:
        done.append("piece")
        if len(done) == 2:
            worker.submit(3, 1, lambda clock: done.append("step")).add_done_callback(lambda _: step_runs.set())
        if len(done) == 5:
            has_ended.set()
        return len(done) < 5

    worker.run_outside(lambda: worker.when_idle(piece)).result(10)
    assert step_runs.wait(10) and has_ended.wait(10)
    worker.run_outside(lambda: None).result(10)
    time.sleep(0.1)
    assert done == ["piece", "piece", "step", "piece", "piece"]


@pytest.mark.parametrize("between", [True, False])
def test_under_load_idle_work_goes_on_between_steps_where_it_must_and_takes_a_small_part_of_the_time(
    worker: Worker, between: bool
) -> None:
    """Each step submits the next one, so that there always is one."""
    pieces: list[tuple[float, float]] = []
    done_under_load: Future[int] = Future()

    def piece() -> bool:
        began_s = time.monotonic()
        time.sleep(0.002)
        pieces.append((began_s, time.monotonic()))
        return len(pieces) < 4

    def step(number: int) -> None:
        if len(pieces) < 4 and number < (100_000 if between else 500):
            worker.submit(3, number + 1, lambda clock: step(number + 1))
        else:
            done_under_load.set_result(len(pieces))

    def first(clock: StepClock) -> None:
        worker.when_idle(piece, between)
        step(1)

    worker.submit(3, 1, first)
    assert done_under_load.result(60) == (4 if between else 0)
    for (began_s, ended_s), (next_s, _) in pairwise(pieces):
        assert next_s - ended_s >= PACE * (ended_s - began_s)


def test_a_phase_within_a_phase_ends_where_it_began(worker: Worker) -> None:
    assert worker.phase == "load"
    worker.phase = "ready"
    with worker.during("warmup"):
        with worker.during("load"):
            assert worker.phase == "load"
        assert worker.phase == "warmup"
    assert worker.phase == "ready"


CANNOT_GO_ON = """
import os, time
import torch
from text_generation_server.errors import GroupBroken
from text_generation_server.worker import Worker

class Broken(Worker):
    def _launch(self, call):
        if isinstance(cause, SystemError):
            raise cause
        super()._launch(call)

def run(clock):
    raise cause

for cause in (GroupBroken("rank 1"), torch.AcceleratorError("lost"), SystemError("a bug of the worker")):
    child = os.fork()
    if not child:
        Broken(1).submit(1, 1, run)
        time.sleep(30)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_worker_that_cannot_go_on_ends_its_process() -> None:
    """The process must end, because other ranks may wait for it in a collective, and because a shard that only answers
    Health is never replaced."""
    done = subprocess.run([sys.executable, "-c", CANNOT_GO_ON], stdout=subprocess.PIPE, text=True, timeout=60)
    assert [*map(int, done.stdout.split())] == [BROKEN_STATUS] * 3
