"""A jump over quiet steps leaves the same state as the same number of single steps."""

from collections import deque

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from text_generation_common.flags.kinds import AdmissionMode
from text_generation_common.flags.requests import SchedulingFlags
from text_generation_router.scheduling.jumps import jump, quiet_steps
from text_generation_router.scheduling.request import GenerationRequest, Limits, Share
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import ForwardStep, Step
from text_generation_router.scheduling.tests.answers import answer

END_TOKEN = 999


# In this example a jump is tried while two steps that only drop rows are in flight.
@example(5870, AdmissionMode.PEAK, 3)
@example(5870, AdmissionMode.PAST_FUTURE, 3)
@given(st.integers(0, 2**32), st.sampled_from(AdmissionMode), st.sampled_from([1, 3]))
def test_a_jump_equals_as_many_single_steps(seed: int, mode: AdmissionMode, owners: int) -> None:
    """Both schedulers get the same requests at the same steps. One of them jumps whenever no request can join or
    end."""
    assert play(seed, mode, owners, jumps=True) == play(seed, mode, owners, jumps=False)


@pytest.mark.parametrize("num_in_flight", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_quiet_steps_carry_the_rows_of_the_steps_in_flight_and_end_no_request(seed: int, num_in_flight: int) -> None:
    random = np.random.default_rng(seed)
    scheduler = Scheduler(Limits(400, 4, 16))
    for length, new in random.integers((1, 1), (30, 40), size=(12, 2)).tolist():
        scheduler.add(GenerationRequest(tuple(range(length)), new))
    in_flight: deque[Step] = deque()
    jumped = 0
    while not scheduler.is_idle:
        while len(in_flight) < num_in_flight and (step := scheduler.next_step()):
            in_flight.append(step)
        running = tuple(scheduler.active.running)
        for _ in range(quiet_steps(scheduler)):
            step = scheduler.next_step()
            assert isinstance(step, ForwardStep) and step.decode_ids == running and not step.chunks
            in_flight.append(step)
            assert not answer(scheduler, in_flight.popleft()).ended
            jumped += 1
        if step := in_flight.popleft() if in_flight else scheduler.next_step():
            answer(scheduler, step)
    assert jumped > 10


@pytest.mark.parametrize("num_in_flight", [0, 1, 2])
def test_a_lone_request_is_quiet_until_the_step_that_makes_its_last_token(num_in_flight: int) -> None:
    scheduler = Scheduler(Limits(100, 5, 16))
    request = scheduler.add(GenerationRequest((1, 2, 3), 20))
    for _ in range(4):
        answer(scheduler, scheduler.next_step())
    for _ in range(num_in_flight):
        scheduler.next_step()
    # A jump also answers every step that it adds, and the last step ends the request.
    not_quiet = 0 if num_in_flight else 1
    assert quiet_steps(scheduler) == 20 - request.num_sent - not_quiet


def play(seed: int, mode: AdmissionMode, owners: int, jumps: bool) -> tuple[object, ...]:
    """Runs 25 requests with two steps in flight. The scheduler does not know their output lengths. Returns everything
    that must not depend on `jumps`."""
    random = np.random.default_rng(seed)
    arrivals = sorted((int(t), int(n), int(o)) for t, n, o in random.integers((0, 1, 1), (150, 40, 20), size=(25, 3)))
    scheduler = Scheduler(Limits(100, 5, 16, SchedulingFlags(admission=mode)), end_tokens=frozenset({END_TOKEN}))
    requests: dict[int, Running] = {}
    lengths: dict[int, int] = {}
    ends: list[tuple[int, int]] = []
    in_flight: deque[Step] = deque()
    now = 0

    def token_of(request_id: int) -> int:
        return END_TOKEN if len(requests[request_id].output_ids) == lengths[request_id] - 1 else request_id

    def answer_oldest() -> None:
        ends.extend((now, request_id) for request_id in answer(scheduler, in_flight.popleft(), token_of).ended)

    while arrivals or not scheduler.is_idle or in_flight:
        while arrivals and arrivals[0][0] <= now:
            _, length, made = arrivals.pop(0)
            prompt = tuple(range(length * 7, length * 8))
            request = GenerationRequest(prompt, 20, share=Share(str(length % owners)))
            running = scheduler.add(request)
            requests[running.id], lengths[running.id] = running, made
        while len(in_flight) < 2 and (step := scheduler.next_step()):
            in_flight.append(step)
        if jumps and len(in_flight) == 2 and (steps := jumpable(scheduler, lengths, arrivals, now)):
            answer_oldest()
            jump(scheduler, steps, lambda request: request.id)
            now += steps + 1
        elif in_flight:
            answer_oldest()
            now += 1
        else:
            now = arrivals[0][0]
    return ends, scheduler.counters, scheduler.memory.slots.num_free, scheduler.memory.cache.num_tokens


def jumpable(scheduler: Scheduler, lengths: dict[int, int], arrivals: list[tuple[int, int, int]], now: int) -> int:
    """Number of steps that can be jumped over, because no request arrives or ends in them. Two steps are in flight, and
    the first is about to be answered."""
    quiet = quiet_steps(scheduler)
    if not quiet:
        return 0
    until_end = min(lengths[r.id] - len(r.output_ids) for r in scheduler.active.running.values()) - 2
    until_arrival = arrivals[0][0] - now - 1 if arrivals else quiet
    return max(0, min(quiet, until_end, until_arrival))
