"""Checks the accounts of the token slots."""

from collections.abc import Sequence

from text_generation_router.scheduling.memory.holding import Holder
from text_generation_router.scheduling.memory.memory import Memory


def find_error(memory: Memory, holders: Sequence[Holder]) -> str | None:
    """An error in the accounts, or None. Each slot must be free, or cached, or owned by one request. While there are no
    `holders` (requests with slots), no cached slot may be locked.
    """
    slots, cache = memory.slots, memory.cache
    private = sum(holder.holding.num_private for holder in holders if holder.holding)
    if slots.num_free + cache.num_tokens + private != slots.capacity:
        return f"{slots.num_free} free + {cache.num_tokens} cached + {private} held != {slots.capacity} slots"
    if not holders and cache.num_evictable != cache.num_tokens:
        return f"{cache.num_tokens - cache.num_evictable} cached slots are locked, but no request holds slots"
    return None
