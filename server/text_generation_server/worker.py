"""The one thread that runs steps, strictly in their order, whatever the order in which they arrive.

To run a step is to launch it, and to answer it when it is complete. Where the device works on by itself, the next step
is launched as soon as it is here, and a second thread, which does nothing else, waits for the device meanwhile.
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
from typing import Any, NoReturn

import torch

from text_generation_launcher import faults
from text_generation_server.errors import GroupBroken, StepAborted, StepFailed, StepRefused
from text_generation_server.results import Pending, completed

log = logging.getLogger("text_generation_server")

MAX_HELD = 4  # calls that came before their predecessor
HOLD_S = 5.0
MAX_LAUNCHED = 2


@dataclass(slots=True)
class Call:
    """A step of the sequence, waiting for its turn. `run` returns its result, or a Pending for it."""

    step: int
    run: Callable[["StepClock"], Any]
    clears: bool  # whether it ends the state after a failed step
    future: Future[Any]
    deadline: float


@dataclass(slots=True)
class Launched:
    """A step that the device may still be working on."""

    call: Call
    pending: Pending[Any]
    is_complete: bool


@dataclass(frozen=True, slots=True)
class StepClock:
    """What a step may say about the time before and after itself."""

    gap_ns: int  # how long the worker had nothing to run
    successor_queued: Callable[[], bool]  # or launched


class Worker:
    """`submit` may be called from any thread; the calls run in this object's own."""

    def __init__(self, generation: int, hold_s: float = HOLD_S) -> None:
        self.generation = generation
        self.phase = "load"  # or "warmup", "capture" (within a step or a warm-up), "ready"
        self.last_step = 0
        self.running_step = 0  # the oldest one that is not answered; 0: none
        self.progress = 0
        self._hold_s = hold_s
        self._next_step = 1  # the step that is launched next
        self._held: dict[int, Call] = {}
        self._launched: deque[Launched] = deque()
        self._failed_step: int | None = None
        self._changed = threading.Condition()
        self._outside: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._stopped = False
        self._ended_ns = time.perf_counter_ns()
        self._waiter = ThreadPoolExecutor(1, "waiter")
        self._thread = threading.Thread(target=self._loop, name="worker", daemon=True)
        self._thread.start()

    def submit(self, generation: int, step: int, run: Callable[[StepClock], Any], clears: bool = False) -> Future[Any]:
        """Queues a step. Its future raises StepRefused (stale), StepAborted (held too long, or after a failure) or
        StepFailed (it raised)."""
        call = Call(step, run, clears, _uncancellable(), time.monotonic() + self._hold_s)
        with self._changed:
            if refusal := self._refusal(generation, step):
                call.future.set_exception(refusal)
            else:
                self._held[step] = call
                self._changed.notify()
        return call.future

    def run_outside(self, run: Callable[[], Any], restart_sequence: bool = False) -> Future[Any]:
        """Runs something between steps that is not one of them (Warmup). `restart_sequence`: the next step is 1."""

        def call() -> Any:
            if restart_sequence:
                self._restart_sequence()
            return run()

        future = _uncancellable()
        with self._changed:
            self._outside.append((call, future))
            self._changed.notify()
        return future

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()
        self._waiter.shutdown()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What Health says meanwhile: the launcher allows the phases other than "ready" to stand still for longer."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def advance_progress(self) -> None:
        self.progress += 1

    def _refusal(self, generation: int, step: int) -> Exception | None:
        if generation != self.generation:
            return StepRefused(f"generation {generation} is over: this shard is generation {self.generation}")
        if step < self._next_step or step in self._held:
            return StepRefused(f"step {step} has been run already: the next one is {self._next_step}")
        if step > self._next_step and sum(held > self._next_step for held in self._held) >= MAX_HELD:
            return StepAborted(f"step {step} came too early: {MAX_HELD} others are waiting for step {self._next_step}")
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
            log.exception("the worker ended")
            exit_now()  # a shard that answers Health and runs no step would be worse than none

    def _wait_for_work(self) -> Callable[[], None] | None:
        """The next thing to do; None when stopped. Calls whose predecessor does not come are aborted meanwhile."""
        with self._changed:
            while self._launched or not self._stopped:
                if work := self._work():
                    return work
                self._changed.wait(self._abort_late())
            for call in self._held.values():
                call.future.set_exception(StepAborted("the shard is stopping"))
        return None

    def _work(self) -> Callable[[], None] | None:
        if self._launched and self._launched[0].is_complete:
            return self._answer_oldest
        if self._stopped:
            return None
        if self._outside and not self._launched:
            run, future = self._outside.pop(0)
            return partial(self._run_outside, run, future)
        call = self._held.get(self._next_step)
        if call is None:
            return None
        # What a failure has made void is cleared when the failure is known. What needs no device waits behind a step to
        # be answered in order, and keeps nobody else waiting.
        busy = len(self._launched) if call.clears else sum(not launched.is_complete for launched in self._launched)
        if busy >= (1 if call.clears else MAX_LAUNCHED):
            return None
        del self._held[self._next_step]
        self._next_step += 1
        return partial(self._launch, call)

    def _abort_late(self) -> float | None:
        """How many seconds there are until the next one is late; None if none can be."""
        if not self._held or self._next_step in self._held:
            return None
        now = time.monotonic()
        for step in [step for step, call in self._held.items() if call.deadline <= now]:
            reason = f"step {step} waited {self._hold_s} s for step {self._next_step}, which did not come"
            self._held.pop(step).future.set_exception(StepAborted(reason))
        return min((call.deadline - now for call in self._held.values()), default=None)

    def _launch(self, call: Call) -> None:
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
        except Exception as error:
            while self._launched:
                self._answer_oldest()
            self._fail(call, error)
            return
        self._launched.append(launched)
        if not launched.is_complete:
            self._waiter.submit(self._wait_for_device, launched)

    def _wait_for_device(self, launched: Launched) -> None:
        """In the waiter's thread."""
        try:
            launched.pending.block()
        except Exception as error:
            log.debug("step %d: %s", launched.call.step, error)  # raised again, and handled, when it is read
        with self._changed:
            launched.is_complete = True
            self._changed.notify()

    def _answer_oldest(self) -> None:
        """Waits for it if it is not complete."""
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

    def _fail(self, call: Call, error: Exception) -> None:
        """The one place where a step's exception ends: all rows are void, and the router hears which step it was."""
        if self._failed_step is not None:
            self._abort(call)
            return
        log.error("step %d failed: %s", call.step, error, exc_info=error)
        self._failed_step = call.step
        self._note_end(call)
        call.future.set_exception(StepFailed(f"step {call.step} failed: {type(error).__name__}: {error}"))
        faults.point("shard.between")

    def _abort(self, call: Call) -> None:
        self._note_end(call)
        call.future.set_exception(StepAborted(f"step {self._failed_step} failed; a ClearCache must come first"))

    def _note_end(self, call: Call) -> None:
        self.last_step = call.step
        self.running_step = self._launched[0].call.step if self._launched else 0
        self._ended_ns = time.perf_counter_ns()

    def _run_outside(self, run: Callable[[], Any], future: Future[Any]) -> None:
        _fulfil(future, run)
        self._ended_ns = time.perf_counter_ns()


def _is_complete(pending: Pending[Any]) -> bool:
    try:
        return pending.is_complete()
    except Exception as error:
        log.debug("the device failed: %s", error)
        return True  # it is raised again, and handled, when the result is read


@contextmanager
def _exit_if_broken(call: Call) -> Iterator[None]:
    try:
        yield
    except GroupBroken:
        log.exception("step %d failed in the middle of the group's work", call.step)
        exit_now()
    except torch.AcceleratorError:
        log.exception("step %d broke the device's context: only a new process has another", call.step)
        exit_now()


def exit_now() -> NoReturn:
    """Ends the process without a farewell: the others of its group may be waiting for it in a collective."""
    logging.shutdown()
    os._exit(1)


def _uncancellable() -> Future[Any]:
    """A step is part of the sequence and runs, even if whoever waits for its answer has gone."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _fulfil(future: Future[Any], run: Callable[[], Any]) -> None:
    try:
        future.set_result(run())
    except (GroupBroken, torch.AcceleratorError):
        log.exception("the group of shards, or the device's context, broke")
        exit_now()
    except Exception as error:
        future.set_exception(error)
