"""Ends a driver whose own node of the Ray cluster has died.

Ray tells its drivers of dead actors by way of their machine's raylet. A driver that outlives its raylet, as on a head
that comes back, is told of nothing any more, and takes the engines of dead machines for engines that serve.
"""

import time
from collections.abc import Callable

LOOK_S = 2.0


def end_with_node(
    is_alive: Callable[[], bool | None], end: Callable[[], None], sleep: Callable[[float], None] = time.sleep
) -> None:
    """Asks every LOOK_S whether the node lives, and calls `end` once it does not. Without Ray's head it is
    unknown (None): then the driver stays, because another one could not reach the head either."""
    while is_alive() is not False:
        sleep(LOOK_S)
    end()
