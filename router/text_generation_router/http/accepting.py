"""Accepts connections of a socket that several fronts share, so that all fronts get about equally many.

The kernel wakes all fronts for a connection, and the first front would take all that wait. So a front with more
connections than another front waits for a moment, in which the other one may take the next.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from text_generation_common.connection_counts import ConnectionCounts

logger = logging.getLogger(__name__)

# Seconds that a front with more connections leaves to the others: the shortest time that uvloop's clock has.
WAIT_S = 0.001
# A front may have one connection more than another one, and one more for as many of them.
SLACK_PER = 8
# Seconds without a try, after the kernel has refused a connection, such as for want of descriptors.
REFUSED_S = 0.1


class SharedPlace:
    """This front among those that share a socket."""

    def __init__(self, counts: ConnectionCounts, number: int) -> None:
        self._counts = counts
        self._number = number

    def note(self, connections: int) -> None:
        self._counts.set(self._number, connections)

    def leave(self) -> None:
        """From now on the other fronts share out new connections among themselves."""
        self._counts.clear(self._number)

    def others(self) -> list[int]:
        return self._counts.elsewhere(self._number)

    def num_elsewhere(self) -> int:
        """Number of connections of the other fronts."""
        return sum(self.others())


def takes_next(own: int, others: Sequence[int]) -> bool:
    """Whether a front with `own` connections takes the next one at once."""
    if not others:
        return True
    least = min(others)
    return own <= least + least // SLACK_PER


class SharedListener:
    """Stands in for asyncio's Server. `own` returns the number of this front's connections."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        own: Callable[[], int],
        place: SharedPlace,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._own = own
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._waiting: asyncio.TimerHandle | None = None
        self._is_serving = False

    def listen(self, backlog: int) -> None:
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self._is_serving = True
        self.note()
        self._loop.add_reader(self._listener, self._note_waiting)

    def is_serving(self) -> bool:
        return self._is_serving

    def close(self) -> None:
        """Accepts no more. Other processes' copies of the socket stay open."""
        if self._is_serving:
            self._is_serving = False
            self._loop.remove_reader(self._listener)
            if self._waiting is not None:
                self._waiting.cancel()
            self._listener.close()
            self._place.leave()

    async def wait_closed(self) -> None:
        """Connections that were accepted are opened nevertheless."""
        await asyncio.gather(*self._opening)

    def note(self) -> None:
        """Tells the other fronts how many connections this one has."""
        if self._is_serving:
            self._place.note(self._num_own)

    def _note_waiting(self) -> None:
        if takes_next(self._num_own, self._place.others()):
            self._accept()
        else:
            self._pause(WAIT_S)

    @property
    def _num_own(self) -> int:
        return self._own() + len(self._opening)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._waiting = self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._waiting = None
        self._loop.add_reader(self._listener, self._note_waiting)
        self._accept()

    def _accept(self) -> None:
        """Accepts one connection: another front may be awake by now, and fewer connections each time are fairer."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another front has taken it, or its client has gone
        except OSError as error:
            logger.error("a connection cannot be accepted: %s", error.strerror)
            if self._waiting is None:
                self._pause(REFUSED_S)
            return
        opening = self._loop.create_task(self._open(connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        self.note()

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        await self._loop.connect_accepted_socket(self._make_protocol, connection)
