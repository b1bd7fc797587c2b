"""Room for connections: which of them the limit admits, and which ends for a new one. And room for large bodies of one
owner.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from text_generation_router.fairness import FairSlots
from text_generation_router.scheduling.request import Share

# Maximum number of connections beyond the limit whose first requests are read: /live is answered, others are refused.
MAX_BEYOND = 64


class Occupant(Protocol):
    def make_room(self) -> None:
        """Ends the connection at once. Never called for an admitted connection that has a whole request."""


class ConnectionRoom:
    """Room for `max_connections` connections, those of other processes (`num_elsewhere`) included.

    One address may have them all. When none is left, an address with more connections without a whole request than a
    newcomer's address gives one up: the one that has waited for its request for the longest time. So connections that
    never send a whole request cannot keep other addresses out, and requests that are being answered lose nothing.
    """

    def __init__(self, max_connections: int, num_elsewhere: Callable[[], int]) -> None:
        self._max_connections = max_connections
        self._num_elsewhere = num_elsewhere
        self._addresses: dict[Occupant, str] = {}  # address of each admitted connection
        # Admitted connections without a whole request by address, longest wait first.
        self._waiting: dict[str, dict[Occupant, None]] = {}
        self._beyond: dict[Occupant, None] = {}  # connections beyond the limit, oldest first

    def admits(self, newcomer: Occupant, address: str) -> bool:
        """Whether the connection is within the limit; if need be, another connection is ended for it. A connection
        beyond the limit may only be told so, and stays until MAX_BEYOND others have come."""
        is_full = len(self._addresses) + self._num_elsewhere() >= self._max_connections
        if is_full and not self._make_room_for(address):
            self._beyond[newcomer] = None
            if len(self._beyond) > MAX_BEYOND:
                self._end(next(iter(self._beyond)))
            return False
        self._addresses[newcomer] = address
        self.wait(newcomer)
        return True

    def wait(self, connection: Occupant) -> None:
        """From now on the connection has no whole request that is unanswered."""
        address = self._addresses.get(connection)
        if address is not None:
            self._waiting.setdefault(address, {})[connection] = None

    def work(self, connection: Occupant) -> None:
        """From now on the connection has a whole request."""
        address = self._addresses.get(connection, "")
        waiting = self._waiting.get(address)
        if waiting is not None:
            waiting.pop(connection, None)
            if not waiting:
                del self._waiting[address]

    def leave(self, connection: Occupant) -> None:
        self.work(connection)
        self._addresses.pop(connection, None)
        self._beyond.pop(connection, None)

    def _make_room_for(self, address: str) -> bool:
        counts = {known: len(waiting) for known, waiting in self._waiting.items()}
        largest = max(counts, key=counts.__getitem__, default=address)
        if counts.get(largest, 0) <= counts.get(address, 0):
            return False
        self._end(next(iter(self._waiting[largest])))
        return True

    def _end(self, connection: Occupant) -> None:
        self.leave(connection)
        connection.make_room()


# Limits how many large bodies of one owner are in memory at once. Other large bodies wait unread, in network buffers.
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
