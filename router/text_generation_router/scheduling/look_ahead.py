"""After how many steps a request that arrives now would begin, if the outputs become as long as is expected.

A coarse look ahead for `Retry-After`: requests begin in order of arrival, one after the other, once a row and the slots
of their whole stay are free and the prompts before them are computed. Fair shares, preemption, shared prefixes and the
steps for which new requests are gathered are left out.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stay:
    """What a request still needs, from now to its end."""

    prompt_tokens: float  # to be computed
    output_tokens: float  # to be made, one a step
    slots: float  # at its longest


def steps_until_start(
    running: Iterable[Stay], waiting: Iterable[Stay], capacity: int, max_rows: int, budget: int
) -> float:
    """Of a request behind all that wait. `budget` is of prompt tokens a step."""
    now, computed = 0.0, 0.0  # when the last one began, and when all prompts up to its own are computed
    free_rows, free_slots = max_rows, float(capacity)
    ends: list[tuple[float, float]] = []  # when, and how many slots come free then
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
