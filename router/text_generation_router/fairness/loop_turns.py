"""Does at most a few things in each turn of the event loop, owners in turn.

Between two turns the loop does its other work, so that a burst of one kind of work (requests that begin, readers that
get tokens) delays neither other work nor other owners for long.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

# Does one thing. Returns False if there was nothing to do any more; another thing is then done in its place.
Action = Callable[[], bool]


class LoopTurns:
    def __init__(self, per_turn: int) -> None:
        """`per_turn`: most things in one turn of the event loop."""
        self._per_turn = per_turn
        self._num_done = 0  # things done since `_begin_turn`, at most `per_turn`
        self._lines: OrderedDict[str, deque[Action]] = OrderedDict()  # waiting things by owner; the first owner is next

    def put(self, owner: str, action: Action) -> None:
        """Calls `action` at once if fewer than `per_turn` things were done in this turn, else in a later turn."""
        if self._num_done >= self._per_turn:
            if (line := self._lines.get(owner)) is None:
                line = self._lines[owner] = deque()
            line.append(action)
        elif action():
            self._count()

    def _count(self) -> None:
        """Counts a thing that was done. Few things in each turn need no callback of the loop."""
        self._num_done += 1
        if self._num_done == self._per_turn:
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        """Called in the turn after `per_turn` things were done, in one turn or in several."""
        self._num_done = 0
        while self._lines and self._num_done < self._per_turn:
            owner, line = self._lines.popitem(last=False)
            action = line.popleft()
            if line:
                self._lines[owner] = line
            if action():
                self._count()
