"""The one thread that runs steps, strictly in their order, whatever the order in which they arrive."""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from text_generation_launcher import faults
from text_generation_server.errors import GroupBroken, StepAborted, StepFailed, StepRefused

log = logging.getLogger("text_generation_server")

MAX_HELD = 4  # calls that came before their predecessor
HOLD_S = 5.0


@dataclass(slots=True)
class Call:
    """A step of the sequence, waiting for its turn."""

    step: int
    run: Callable[["StepClock"], Any]
    clears: bool  # whether it ends the state after a failed step
    future: Future[Any]
    deadline: float


@dataclass(frozen=True, slots=True)
class StepClock:
    """What a step may say about the time before and after itself."""

    gap_ns: int  # how long the worker had nothing to run
    successor_queued: Callable[[], bool]


class Worker:
    """`submit` may be called from any thread; the calls run in this object's own."""

    def __init__(self, generation: int, hold_s: float = HOLD_S) -> None:
        self.generation = generation
        self.last_step = 0
        self.running_step = 0  # 0: none
        self.progress = 0
        self._hold_s = hold_s
        self._next_step = 1  # the step that runs next
        self._held: dict[int, Call] = {}
        self._failed_step: int | None = None
        self._changed = threading.Condition()
        self._outside: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._stopped = False
        self._ended_ns = time.perf_counter_ns()
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
                self._ended_ns = time.perf_counter_ns()
        except BaseException:
            log.exception("the worker ended")
            exit_now()  # a shard that answers Health and runs no step would be worse than none

    def _wait_for_work(self) -> Callable[[], None] | None:
        """The next thing to run; None when stopped. Calls whose predecessor does not come are aborted meanwhile."""
        with self._changed:
            while not self._stopped:
                if self._outside:
                    run, future = self._outside.pop(0)
                    return partial(_fulfil, future, run)
                if call := self._held.pop(self._next_step, None):
                    self._next_step += 1
                    return partial(self._run, call)
                self._abort_late()
                self._changed.wait(min((c.deadline for c in self._held.values()), default=1e9) - time.monotonic())
            for call in self._held.values():
                call.future.set_exception(StepAborted("the shard is stopping"))
        return None

    def _abort_late(self) -> None:
        for step in [step for step, call in self._held.items() if call.deadline <= time.monotonic()]:
            reason = f"step {step} waited {self._hold_s} s for step {self._next_step}, which did not come"
            self._held.pop(step).future.set_exception(StepAborted(reason))

    def _successor_queued(self) -> bool:
        return self._next_step in self._held

    def _run(self, call: Call) -> None:
        if call.clears:
            self._failed_step = None
        if self._failed_step is not None:
            self.last_step = call.step
            call.future.set_exception(StepAborted(f"step {self._failed_step} failed; a ClearCache must come first"))
            return
        clock = StepClock(time.perf_counter_ns() - self._ended_ns, self._successor_queued)
        self.running_step = call.step
        try:
            result = call.run(clock)
        except GroupBroken:
            log.exception("step %d failed in the middle of the group's work", call.step)
            exit_now()
        except Exception as error:
            # The one place where a step's exception ends: all rows are void, and the router hears which step it was.
            log.error("step %d failed: %s", call.step, error, exc_info=error)
            self._failed_step = call.step
            result = StepFailed(f"step {call.step} failed: {type(error).__name__}: {error}")
        self.last_step, self.running_step = call.step, 0
        if isinstance(result, StepFailed):
            call.future.set_exception(result)
        else:
            call.future.set_result(result)
        faults.point("shard.between")


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
    except GroupBroken:
        log.exception("the group of shards broke")
        exit_now()
    except Exception as error:
        future.set_exception(error)
