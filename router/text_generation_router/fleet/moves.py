"""Which queued requests move to another engine, by Withdraw. Each moves at most once, and off an engine that drains.
Running requests leave such an engine too, a few at a time.

The wait that an engine tells is the wait of a request behind all others. So a front looks at its newest queued requests
first: for these, it is about right.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from text_generation_router.fleet.choice import EngineLoad

# A request moves only if its wait falls to at most this part of what it is, and by at least GAIN_S seconds.
PART, GAIN_S = 0.5, 2.0
# Running requests leave an engine that drains for engines that expect a wait of at most LEAVE_WAIT_S seconds and have
# at most LEAVE_TOKENS tokens to compute: LEAVE_AT_ONCE of them at most, or as many as have LEAVE_TOKENS together.
LEAVE_WAIT_S, LEAVE_TOKENS, LEAVE_AT_ONCE = 1.0, 4096, 8


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request of this front that has made no token, and whose engine is not known to have begun it."""

    index: int  # rises with the requests that a front sends to an engine
    engine: int
    tokens: int  # tokens of its prompt that are to be computed
    has_moved: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    index: int
    source: int
    target: int


def takes_leavers(load: EngineLoad) -> bool:
    """Whether the engine can take running requests of an engine that drains, without holding up its own."""
    return load.is_open and load.wait_s <= LEAVE_WAIT_S and load.uncomputed <= LEAVE_TOKENS


def plan_leaves(tokens: Iterable[int]) -> int:
    """How many requests leave at a time, of running requests that have these numbers of tokens to compute again."""
    count = total = 0
    for each in tokens:
        if count == LEAVE_AT_ONCE or (count and total + each > LEAVE_TOKENS):
            break
        count, total = count + 1, total + each
    return count


def plan_moves(queued: Iterable[QueuedRequest], loads: Mapping[int, EngineLoad]) -> list[Move]:
    """The moves that shorten waits, newest request first. `loads`: what each engine told last; an engine that is not in
    it is never a target. Each planned move changes the waits that the next one is compared with: by its tokens, at the
    engine's own rate of tokens queued and seconds expected.

    An engine that does not drain loses one request at a time, because all fronts see the same waits: if each moved all
    that seems right, they would move too many. The next loads that engines tell show what is left to move."""
    if not any(load.is_draining or load.wait_s >= GAIN_S for load in loads.values()):
        return []
    waits = {engine: load.wait_s for engine, load in loads.items()}
    targets = [engine for engine, load in loads.items() if load.is_open]
    target, moves, left = min(targets, key=waits.__getitem__, default=None), list[Move](), set[int]()
    for request in sorted(queued, key=lambda each: each.index, reverse=True):
        source = loads.get(request.engine)
        if source is None or target is None or request.engine == target:
            continue
        rate_s = _seconds_per_token(source) or _seconds_per_token(loads[target])
        here, there = waits[request.engine], waits[target] + request.tokens * rate_s
        gains = not request.has_moved and there <= min(PART * here, here - GAIN_S)
        if source.is_draining or (gains and request.engine not in left):
            left.add(request.engine)
            moves.append(Move(request.index, request.engine, target))
            waits[target], waits[request.engine] = there, max(0.0, here - request.tokens * rate_s)
            target = min(targets, key=waits.__getitem__)
    return moves


def _seconds_per_token(load: EngineLoad) -> float:
    return load.wait_s / load.uncomputed if load.uncomputed else 0.0
