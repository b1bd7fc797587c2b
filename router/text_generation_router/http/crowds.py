"""Gives memory back when a crowd of connections has gone.

A connection's objects refer to each other, so only Python's garbage collector frees them. The collector runs when many
new objects have been made, and a server that has become quiet makes few.
"""

from collections.abc import Callable

# Connections that are a crowd: each takes about 30 KB while it has a request.
CROWD = 256


class Crowds:
    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back = give_back
        self._most = 0  # most connections since memory was last given back

    def note(self, num_connections: int) -> None:
        """Notes the number of open connections. Calls `give_back` when three quarters of a crowd have gone."""
        self._most = max(self._most, num_connections)
        if self._most >= CROWD and num_connections <= self._most // 4:
            self._most = num_connections
            self._give_back()
