import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from text_generation_server.errors import StepAborted, StepFailed, StepRefused
from text_generation_server.worker import MAX_HELD, StepClock, Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(generation=3, hold_s=0.2)
    yield worker
    worker.stop()


def fails(clock: StepClock) -> None:
    raise ArithmeticError("overflow")


def result(future: Future[Any]) -> Any:
    return future.result(timeout=5)


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
        go.wait(5)
        return clock.successor_queued()

    one = worker.submit(3, 1, first)
    started.wait(5)
    two = worker.submit(3, 2, lambda clock: clock.successor_queued())
    go.set()
    assert result(one) is True and result(two) is False


def test_stale_and_repeated_steps_are_refused(worker: Worker) -> None:
    result(worker.submit(3, 1, lambda clock: None))
    for generation, step in ((2, 2), (3, 1)):
        with pytest.raises(StepRefused):
            result(worker.submit(generation, step, lambda clock: None))


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
    assert result(worker.submit(3, 3, lambda clock: "clear", clears=True)) == "clear"
    assert result(worker.submit(3, 4, lambda clock: "goes on")) == "goes on"


def test_an_abandoned_step_runs_all_the_same(worker: Worker) -> None:
    ran = threading.Event()
    early = worker.submit(3, 2, lambda clock: ran.set())
    assert not early.cancel()
    result(worker.submit(3, 1, lambda clock: None))
    assert ran.wait(5)


def test_a_warmup_starts_the_sequence_anew(worker: Worker) -> None:
    result(worker.submit(3, 1, lambda clock: None))
    result(worker.run_outside(lambda: None, restart_sequence=True))
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


@pytest.mark.parametrize("cause", ["GroupBroken('rank 1')", "SystemError('a bug of the worker')"])
def test_a_worker_that_cannot_go_on_ends_its_process(cause: str) -> None:
    """Others may wait for it in a collective; and a shard that only answers Health would be worse than none."""
    code = f"""
import time
from text_generation_server.errors import GroupBroken
from text_generation_server.worker import Worker
class Broken(Worker):
    def _run(self, call):
        if 'bug' in {cause!r}: raise {cause}
        super()._run(call)
def run(clock): raise {cause}
Broken(1).submit(1, 1, run)
time.sleep(30)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 1
