"""A thread that runs all steps strictly in the order of their numbers, in whatever order they arrive.

A step is launched, and answered when the device has completed it. On a GPU the next step is launched as soon as it
arrives, while a second thread waits for the device.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch

from text_generation_common import faults
from text_generation_common.forked import BROKEN_STATUS
from text_generation_server.errors import GroupBroken, StepAborted, StepFailed, StepRefused
from text_generation_server.step.results import Pending, completed

logger = logging.getLogger("text_generation_server")

T = TypeVar("T")

MAX_HELD = 4  # most calls that may wait for an earlier step to arrive
HOLD_S = 5.0
MAX_LAUNCHED = 2
# Seconds without work after which the idle work goes on.
IDLE_S = 0.01
# Where it goes on between steps as well, the next piece comes when this many times the last one's time has passed.
PACE = 20


@dataclass(slots=True)
class StepCall:
    """A step that has been submitted and not launched. `run` launches it, and returns its result or a Pending."""

    step: int
    run: Callable[["StepClock"], Any]
    clears: bool  # whether the step is a ClearCache, after which steps run again if one has failed
    future: Future[Any]
    deadline: float


@dataclass(slots=True)
class Launched:
    """A step that has been launched and not answered."""

    call: StepCall
    pending: Pending[Any]
    is_complete: bool


@dataclass(frozen=True, slots=True)
class StepClock:
    """Facts that the code of a step may use about the time before and after the step."""

    gap_ns: int  # nanoseconds before the step in which the worker had no step to run
    successor_queued: Callable[[], bool]  # whether the next step has arrived


class Worker:
    """Runs all calls in its own thread. `submit` may be called from any thread."""

    def __init__(self, epoch: int, hold_s: float = HOLD_S) -> None:
        self.epoch = epoch
        self.phase = "load"  # "load", "join", "warmup" or "ready"
        self.last_step = 0
        self.running_step = 0  # number of the oldest step that is launched and not answered; 0: no step
        self.progress = 0
        self._hold_s = hold_s
        self._next_step = 1  # number of the step that is launched next
        self._held: dict[int, StepCall] = {}
        self._launched: deque[Launched] = deque()
        self._failed_step: int | None = None
        self._changed = threading.Condition()
        self._outside: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._num_outside = 0  # number of calls outside steps that have not ended
        # What the worker does while there is nothing else to do, a piece at a time. Returns whether more may be left.
        self._idle_work: Callable[[], bool] | None = None
        self._is_done_between = False  # whether also between steps
        self._next_piece_s = 0.0
        self._stopped = False
        self._ended_ns = time.perf_counter_ns()
        self._waiter = ThreadPoolExecutor(1, "waiter")
        self._thread = threading.Thread(target=self._loop, name="worker", daemon=True)
        self._thread.start()

    def submit(
        self, epoch: int, step: int, run: Callable[[StepClock], Pending[T] | T], clears: bool = False
    ) -> Future[T]:
        """Queues a step. The future's exception is StepRefused if the step's number or epoch is out of date,
        StepAborted if it waited too long or comes after a failure, and StepFailed if `run` raised.
        """
        call = StepCall(step, run, clears, _uncancellable(), time.monotonic() + self._hold_s)
        with self._changed:
            if refusal := self._refusal(epoch, step):
                call.future.set_exception(refusal)
            else:
                self._held[step] = call
                self._changed.notify()
        return call.future

    def run_outside(self, run: Callable[[], T], restart_sequence: bool = False) -> Future[T]:
        """Runs a call that is not a step, such as Warmup, between steps. `restart_sequence`: the next step has
        number 1."""

        def call() -> T:
            if restart_sequence:
                self._restart_sequence()
            return run()

        future: Future[T] = _uncancellable()
        with self._changed:
            self._outside.append((call, future))
            self._num_outside += 1
            self._changed.notify()
        return future

    @property
    def num_pending(self) -> int:
        """Number of steps and other calls that have come and not ended."""
        with self._changed:
            return self._num_outside + len(self._held) + self._next_step - 1 - self.last_step

    def when_idle(self, work: Callable[[], bool], between: bool = False) -> None:
        """From now on does `work` while there is no step, until it returns False. `between`: also between steps, in a
        small part of the time, for work that must be done in the end. To be called by the worker."""
        self._idle_work, self._is_done_between = work, between

    def stop(self, within_s: float | None = None) -> bool:
        """Answers the steps that are launched, and makes the calls outside steps that were asked for. Returns whether
        the worker has ended; within_s: the longest time to wait for it.
        """
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(within_s)
        has_ended = not self._thread.is_alive()
        self._waiter.shutdown(wait=has_ended)
        return has_ended

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Makes Health report `phase` inside this context. Phases other than "ready" may make no progress for a longer
        time.
        """
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def advance_progress(self) -> None:
        self.progress += 1

    def _refusal(self, epoch: int, step: int) -> Exception | None:
        if epoch != self.epoch:
            return StepRefused(f"epoch {epoch} is over: this shard is of epoch {self.epoch}")
        if step < self._next_step or step in self._held:
            return StepRefused(f"step {step} has been run already: the next one is {self._next_step}")
        if step > self._next_step and sum(held > self._next_step for held in self._held) >= MAX_HELD:
            return StepAborted(
                f"step {step} came too early: {MAX_HELD} other steps are waiting for step {self._next_step}"
            )
        return None

    def _restart_sequence(self) -> None:
        with self._changed:
            for call in self._held.values():
                call.future.set_exception(StepAborted(f"step {call.step} belongs to the time before a Warmup"))
            self._held.clear()
            self._next_step, self.last_step, self._failed_step = 1, 0, None

    def _loop(self) -> None:
        try:
            while (work := self._wait_for_work()) is not None:
                work()
        except BaseException:
            logger.exception("the worker ended")
            exit_now()  # The process exits: a shard that answers Health and runs no steps would never be replaced.

    def _wait_for_work(self) -> Callable[[], None] | None:
        """Waits for the next work; None when stopped. Aborts calls whose predecessor does not come in time."""
        with self._changed:
            while self._launched or self._outside or not self._stopped:
                if work := self._work():
                    return work
                late_s = self._abort_late()
                if self._idle_work is None or self._launched or self._held:
                    self._changed.wait(late_s)
                elif not self._changed.wait(IDLE_S):
                    return self._do_idle_work
            for call in self._held.values():
                call.future.set_exception(StepAborted("the shard is stopping"))
        return None

    def _do_idle_work(self) -> None:
        while self._idle_work is not None and not (self._held or self._outside or self._stopped):
            self._do_piece(self._idle_work)

    def _do_piece(self, work: Callable[[], bool]) -> None:
        began_s = time.monotonic()
        if not work():
            self._idle_work = None
        ended_s = time.monotonic()
        self._next_piece_s = ended_s + PACE * (ended_s - began_s)

    def _work(self) -> Callable[[], None] | None:
        if self._launched and self._launched[0].is_complete:
            return self._answer_oldest
        if self._outside and not self._launched:
            run, future = self._outside.pop(0)
            return partial(self._run_outside, run, future)
        if self._stopped:
            return None
        call = self._held.get(self._next_step)
        if call is None:
            return None
        # A clearing call waits until every launched step has been answered: only then are all failures known. For other
        # calls, completed steps that wait to be answered in order do not count towards MAX_LAUNCHED.
        busy = len(self._launched) if call.clears else sum(not launched.is_complete for launched in self._launched)
        if busy >= (1 if call.clears else MAX_LAUNCHED):
            return None
        del self._held[self._next_step]
        self._next_step += 1
        return partial(self._launch, call)

    def _abort_late(self) -> float | None:
        """Aborts the calls that have waited too long for their predecessor. Returns the seconds until the next call has
        waited too long, or None if no call waits.
        """
        if not self._held or self._next_step in self._held:
            return None
        now = time.monotonic()
        for step in [step for step, call in self._held.items() if call.deadline <= now]:
            reason = f"step {step} waited {self._hold_s} s for step {self._next_step}, which did not come"
            self._held.pop(step).future.set_exception(StepAborted(reason))
        return min((call.deadline - now for call in self._held.values()), default=None)

    def _launch(self, call: StepCall) -> None:
        if call.clears:
            self._failed_step = None
        if self._failed_step is not None:
            self._abort(call)
            return
        gap_ns = 0 if self._launched else time.perf_counter_ns() - self._ended_ns
        clock = StepClock(gap_ns, lambda: self._next_step > call.step + 1 or call.step + 1 in self._held)
        self.running_step = self.running_step or call.step
        try:
            with _exit_if_broken(call):
                result = call.run(clock)
                pending = result if isinstance(result, Pending) else completed(result)
                launched = Launched(call, pending, _is_complete(pending))
        except Exception as error:  # the exception is the answer to the step
            while self._launched:
                self._answer_oldest()
            self._fail(call, error)
            return
        self._launched.append(launched)
        if not launched.is_complete:
            self._waiter.submit(self._wait_for_device, launched)

    def _wait_for_device(self, launched: Launched) -> None:
        """Runs in the waiter's thread: waits until the device has completed the step, and wakes the worker."""
        try:
            launched.pending.block()
        finally:  # An error stays in the waiter's future: `_answer_oldest` gets the same error, and handles it.
            with self._changed:
                launched.is_complete = True
                self._changed.notify()

    def _answer_oldest(self) -> None:
        """Answers the oldest launched step. Waits for the device if the step is not complete."""
        launched = self._launched[0]
        try:
            with _exit_if_broken(launched.call):
                result = launched.pending.wait()
        except Exception as error:
            self._launched.popleft()
            self._fail(launched.call, error)
            while self._launched:
                self._abort(self._launched.popleft().call)
            return
        self._launched.popleft()
        self._note_end(launched.call)
        launched.call.future.set_result(result)
        faults.point("shard.between")
        if self._idle_work is not None and self._is_done_between and time.monotonic() >= self._next_piece_s:
            self._do_piece(self._idle_work)
            self._ended_ns = time.perf_counter_ns()

    def _fail(self, call: StepCall, error: Exception) -> None:
        """Handles the exception of a step: all rows are invalid from now on, and the answer names the failed step."""
        if self._failed_step is not None:
            self._abort(call)
            return
        logger.error("step %d failed: %s", call.step, error, exc_info=error)
        self._failed_step = call.step
        self._note_end(call)
        call.future.set_exception(StepFailed(f"step {call.step} failed: {type(error).__name__}: {error}"))
        faults.point("shard.between")

    def _abort(self, call: StepCall) -> None:
        self._note_end(call)
        call.future.set_exception(StepAborted(f"step {self._failed_step} failed; a ClearCache must come first"))

    def _note_end(self, call: StepCall) -> None:
        self.last_step = call.step
        self.running_step = self._launched[0].call.step if self._launched else 0
        self._ended_ns = time.perf_counter_ns()

    def _run_outside(self, run: Callable[[], Any], future: Future[Any]) -> None:
        _fulfil(future, run)
        with self._changed:
            self._num_outside -= 1
        self._ended_ns = time.perf_counter_ns()


def _is_complete(pending: Pending[Any]) -> bool:
    try:
        return pending.is_complete()
    except RuntimeError as error:  # torch raises RuntimeError for all failures of a device
        logger.debug("the device failed: %s", error)
        return True  # `_answer_oldest` gets the same error, and handles it.


@contextmanager
def _exit_if_broken(call: StepCall) -> Iterator[None]:
    try:
        yield
    except GroupBroken:
        logger.exception("step %d failed in the middle of the group's work", call.step)
        exit_now()
    except torch.AcceleratorError:
        logger.exception(
            "step %d broke the device's context: the process ends, because only a new process gets another context",
            call.step,
        )
        exit_now()


def exit_now() -> NoReturn:
    """Ends the process at once, without any cleanup: other ranks may be waiting for it in a collective."""
    logging.shutdown()
    os._exit(BROKEN_STATUS)


def _uncancellable() -> Future[Any]:
    """A future that cannot be cancelled: a step must run in its turn, even if its caller has disconnected."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _fulfil(future: Future[Any], run: Callable[[], Any]) -> None:
    try:
        future.set_result(run())
    except (GroupBroken, torch.AcceleratorError):
        logger.exception("the group of shards, or the device's context, broke")
        exit_now()
    except Exception as error:  # the caller that waits for the future gets the exception
        future.set_exception(error)
