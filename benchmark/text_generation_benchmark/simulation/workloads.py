"""Traces drawn from stated distributions, and the three workloads that policies are compared on."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from text_generation_benchmark.simulation.trace import NO_PREFIX, Ints, Trace


class Lengths(Protocol):
    def draw(self, random: np.random.Generator, count: int) -> Ints: ...


@dataclass(frozen=True, slots=True)
class Constant:
    value: int

    def draw(self, random: np.random.Generator, count: int) -> Ints:
        return np.full(count, self.value, dtype=np.int64)

    def __str__(self) -> str:
        return f"{self.value:,}"


@dataclass(frozen=True, slots=True)
class Uniform:
    low: int
    high: int  # inclusive

    def draw(self, random: np.random.Generator, count: int) -> Ints:
        return random.integers(self.low, self.high, count, endpoint=True)

    def __str__(self) -> str:
        return f"{self.low:,} to {self.high:,}"


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution whose values are clipped to low … high."""

    median: float
    sigma: float  # standard deviation of the logarithm
    low: int
    high: int

    def draw(self, random: np.random.Generator, count: int) -> Ints:
        drawn = random.lognormal(np.log(self.median), self.sigma, count)
        return np.clip(np.rint(drawn), self.low, self.high).astype(np.int64)

    def __str__(self) -> str:
        return f"lognormal with median {self.median:,.0f} and sigma {self.sigma} within {self.low:,} to {self.high:,}"


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """Distributions of a trace's requests. `prompt` is the length in tokens without the shared prefix. The prefix is
    one of `num_prefixes`, all equally likely.
    """

    prompt: Lengths
    output: Lengths
    max_new_tokens: int
    num_prefixes: int = 0
    prefix: Lengths = Constant(0)

    def __str__(self) -> str:
        shared = f"{self.num_prefixes} shared prefixes of {self.prefix} tokens, then " if self.num_prefixes else ""
        return f"prompts: {shared}{self.prompt}; outputs: {self.output}; max_new_tokens {self.max_new_tokens:,}"


WORKLOADS = {
    # Conversations about as long as ShareGPT's, whose mean is some 220 tokens in and 200 out.
    "short-chat": TraceWorkload(LogNormal(150, 0.9, 8, 2048), LogNormal(150, 0.8, 1, 1024), 1024),
    # Questions about long documents, or requests with one of a few long system prompts.
    "long-prompts-shared-prefix": TraceWorkload(
        LogNormal(500, 0.8, 32, 4096), LogNormal(150, 0.6, 1, 512), 512, 16, Uniform(2000, 8000)
    ),
    # Clients that always ask for the largest output, from a model that stops long before that limit.
    "long-limits": TraceWorkload(LogNormal(80, 0.7, 8, 1024), LogNormal(260, 0.55, 1, 4096), 4096),
}


def generate(workload: TraceWorkload, rate: float, duration_s: float, seed: int) -> Trace:
    """Poisson arrivals, on average `rate` per second. The same arguments give the same trace."""
    random = np.random.default_rng(seed)
    count = int(random.poisson(rate * duration_s))
    arrival_s = np.sort(random.uniform(0, duration_s, count))
    own, output = workload.prompt.draw(random, count), workload.output.draw(random, count)
    prefix_id = np.full(count, NO_PREFIX, dtype=np.int64)
    prefix_tokens = np.zeros(count, dtype=np.int64)
    if workload.num_prefixes:
        prefix_id = random.integers(0, workload.num_prefixes, count)
        prefix_tokens = workload.prefix.draw(random, workload.num_prefixes)[prefix_id]
    limits = np.maximum(output, workload.max_new_tokens)
    return Trace(arrival_s, own + prefix_tokens, output, limits, prefix_id, prefix_tokens, np.zeros_like(output))
