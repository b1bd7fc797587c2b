"""How many connections each front of a server has, in memory that all of them map. Standard library only.

Each place is written by one front. A front that dies leaves its number there, until the launcher clears the place.
"""

import mmap
import os
import tempfile

PLACES = 256
NONE = -1  # there is no front
BYTES = 8  # size of each number


def make_file() -> int:
    """A file without a name and without fronts. Returns its descriptor, which fronts inherit."""
    with tempfile.TemporaryFile() as file:
        file.write(NONE.to_bytes(BYTES, "little", signed=True) * PLACES)
        file.flush()
        return os.dup(file.fileno())


class ConnectionCounts:
    """`descriptor`: that of `make_file`. OSError or ValueError if it is another one."""

    def __init__(self, descriptor: int) -> None:
        self._counts = memoryview(mmap.mmap(descriptor, PLACES * BYTES)).cast("q")

    def set(self, place: int, count: int) -> None:
        self._counts[place] = count

    def clear(self, place: int) -> None:
        self._counts[place] = NONE

    def elsewhere(self, place: int) -> list[int]:
        """The numbers of the other fronts."""
        counts = self._counts.tolist()
        del counts[place]
        return [count for count in counts if count != NONE]
