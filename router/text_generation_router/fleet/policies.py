"""The ways in which a front may choose an engine for a request."""

from enum import StrEnum

MAX_ENGINES = 1024  # most engines of a deployment


class PlacementPolicy(StrEnum):
    SCORE = "score"  # by what is cached and by the load (`choice.py`)
    LEAST_LOAD = "least-load"  # by the load alone
    LEAST_REQUESTS = "least-requests"  # the fewest unfinished requests of this front
    ROUND_ROBIN = "round-robin"
