"""Limits how many large bodies of one owner are in memory at once. Other large bodies wait unread, in network
buffers.
"""

import sys
from contextlib import AbstractAsyncContextManager

from text_generation_router.fairness.slots import FairSlots
from text_generation_router.scheduling.request import Share


class OwnerLimits:
    """Lets each owner do a limited number of things at once, and all owners together any number."""

    def __init__(self, places: int, wait_s: float) -> None:
        """`places`: number of places that each owner has. `wait_s`: seconds that a body may wait for a place."""
        self._slots = FairSlots(sys.maxsize, sys.maxsize, max_held=places, wait_s=wait_s)

    @property
    def owners(self) -> int:
        return self._slots.num_owners

    def one_of(self, owner: str) -> AbstractAsyncContextManager[None]:
        """Holds one of the owner's places inside the context. Raises OverloadedError if no place becomes free within
        `wait_s` seconds.
        """
        return self._slots.slot(Share(owner), 1)
