"""Permits of an engine, shared out among the fronts: how many requests each front may have on it."""

from collections.abc import Hashable, Mapping
from typing import TypeVar

F = TypeVar("F", bound=Hashable)


def leases(permits: int, used: Mapping[F, int]) -> dict[F, int]:
    """The lease of each front: the permits that the others do not use, so that one front may have the whole load.
    `used`: requests that each front has on the engine. Fronts that take permits at the same time may take more than
    there are, until they are told of each other.
    """
    total = sum(used.values())
    return {front: max(0, permits - (total - count)) for front, count in used.items()}
