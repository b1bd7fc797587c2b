"""Forecasts after how many steps a request that arrives now will start, if outputs reach their expected lengths.

A coarse forecast for `Retry-After`: requests start in order of arrival, once there is a free row, there are slots for
the request's greatest length, and the prompts before it are computed. Equal shares, preemption, shared prefixes and
TGI's joining rule are left out.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stay:
    """The work that a request still needs from now until its end."""

    prompt_tokens: float  # number of prompt tokens that still have to be computed
    output_tokens: float  # number of output tokens that still have to be made, one in each step
    slots: float  # number of slots at the request's greatest length


def steps_until_start(
    running: Iterable[Stay], waiting: Iterable[Stay], capacity: int, max_rows: int, budget: int
) -> float:
    """Steps until a request behind all waiting requests starts. `budget`: prompt tokens computed in one step."""
    now, computed = 0.0, 0.0  # steps until the last request starts, and steps until its prompt is computed
    free_rows, free_slots = max_rows, float(capacity)
    ends: list[tuple[float, float]] = []  # for each request: steps until its end, and slots that it then frees
    for stay in running:
        computed += stay.prompt_tokens / budget
        ends.append((stay.output_tokens + (computed if stay.prompt_tokens else 0.0), stay.slots))
        free_rows, free_slots = free_rows - 1, free_slots - stay.slots
    heapq.heapify(ends)
    for stay in (*waiting, Stay(0, 0, 0)):
        while ends and (free_rows < 1 or free_slots < stay.slots):
            end, slots = heapq.heappop(ends)
            now = max(now, end)
            free_rows, free_slots = free_rows + 1, free_slots + slots
        now = max(now, computed)
        computed = now + stay.prompt_tokens / budget
        heapq.heappush(ends, (computed + stay.output_tokens, stay.slots))
        free_rows, free_slots = free_rows - 1, free_slots - stay.slots
    return now
