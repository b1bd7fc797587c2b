"""Statistics that several commands print: percentiles, and a median with its interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
FEWEST_TURNS = 6  # with fewer values, a median has no interval of this confidence


def percentile(ordered: Sequence[float] | npt.NDArray[np.float64], percent: float) -> float:
    """One of the sorted values, as in TGI: element floor(percent / 100 · n), or the last; 0 if there are none."""
    return float(ordered[min(len(ordered) - 1, int(percent * len(ordered) / 100))]) if len(ordered) else 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and bounds that contain the true median with a probability of at least CONFIDENCE."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def median_interval(values: Sequence[float]) -> Interval:
    """Assumes nothing about the distribution: the true median lies below the k-th smallest of n values only if fewer
    than k values fell below it, each with probability 1/2. ValueError for fewer than FEWEST_TURNS values."""
    ordered = sorted(values)
    n = len(ordered)
    if n < FEWEST_TURNS:
        raise ValueError(f"{n} values: an interval needs {FEWEST_TURNS}")
    outside, below = 0.0, 0  # probability that the interval without the `below` values at each end misses the median
    while outside + 2 * math.comb(n, below) / 2**n <= 1 - CONFIDENCE:
        outside += 2 * math.comb(n, below) / 2**n
        below += 1
    return Interval(median(ordered), ordered[below - 1], ordered[n - below])
