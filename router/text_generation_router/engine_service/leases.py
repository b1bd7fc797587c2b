"""Permits of an engine, shared out among the fronts: how many requests each front may have on it."""

from collections.abc import Hashable, Mapping
from typing import TypeVar

F = TypeVar("F", bound=Hashable)


def leases(permits: int, used: Mapping[F, int]) -> dict[F, int]:
    """The lease of each front: what it uses now, and an equal part of the permits that are free. The leases' sum is
    `permits`, or what is used, if that is more. `used`: requests that each front has on the engine.
    """
    free = max(0, permits - sum(used.values()))
    part, rest = divmod(free, max(1, len(used)))
    return {front: count + part + (place < rest) for place, (front, count) in enumerate(used.items())}
