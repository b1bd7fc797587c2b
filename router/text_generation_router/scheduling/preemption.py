"""Chooses the running request that gives up its slots when there are too few slots for the next tokens."""

from collections.abc import Sequence

from text_generation_router.scheduling.active import ActiveRequests
from text_generation_router.scheduling.memory.memory import Memory
from text_generation_router.scheduling.running import Running


def find_victim(active: ActiveRequests, memory: Memory) -> Running | None:
    """The request to preempt: a paused request first, then the request with the fewest slots of its own, then the
    newest. None if fewer than two requests run, or all are about to end.
    """
    if active.num_running < 2:
        return None
    able = (request for request in active.running.values() if not request.is_ending)
    return min(able, key=lambda r: (not r.paused, memory.num_exclusive(r), r.newness), default=None)


def num_soon_free(active: ActiveRequests, memory: Memory) -> int:
    """Number of slots that steps in flight, or the steps after them, will free without preemption."""
    ending = [request for request in active.running.values() if request.is_ending]
    going: Sequence[Running] = [*active.leaving, *ending]
    return sum(memory.exclusives(going))
