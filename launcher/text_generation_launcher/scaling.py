"""Which replicas are started and which leave, and which failures end the server. Does no input or output."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from text_generation_common.link import ReplicaState

# Order in which replicas leave: those that serve least go first.
_LEAVE_FIRST = (ReplicaState.PENDING, ReplicaState.FAILED, ReplicaState.STARTING, ReplicaState.READY)


@dataclass(frozen=True, slots=True)
class SetChanges:
    """Numbers of replicas to start, and of those that are to drain."""

    start: tuple[int, ...] = ()
    drain: tuple[int, ...] = ()


def plan_changes(states: Mapping[int, ReplicaState], wanted: int, most: int) -> SetChanges:
    """What leads to `wanted` replicas. `states` has those that exist, `most` is the number of places for replicas: a
    place is free when the draining replica there has gone."""
    staying = [number for number, state in states.items() if state is not ReplicaState.DRAINING]
    if len(staying) > wanted:
        leaving = sorted(staying, key=lambda number: (_LEAVE_FIRST.index(states[number]), -number))
        return SetChanges(drain=tuple(leaving[: len(staying) - wanted]))
    free = [number for number in range(most) if number not in states]
    return SetChanges(start=tuple(free[: wanted - len(staying)]))


def ends_server(others: Collection[ReplicaState], has_served: bool) -> bool:
    """Whether the failure of a replica, which could not be kept alive, ends the server: no other replica (`others`)
    goes on, or the server never had a replica that was ready, so that the next start would fail like this one."""
    return not has_served or all(state is ReplicaState.FAILED for state in others)
