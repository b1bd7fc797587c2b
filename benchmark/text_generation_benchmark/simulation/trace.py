"""A trace: when requests arrive, how long they are, and which prompts share a prefix. Read from and written to CSV, or
drawn from stated distributions, such as those of the three workloads that policies are compared on."""

import csv
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from text_generation_router.scheduling.request import GenerationRequest, Share

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NO_PREFIX = -1
# First token id of a shared prefix, and of the part of a prompt that is not shared. Each prefix and each part has its
# own first id; later ids may repeat.
FIRST_PREFIX_ID = 1_000_000
FIRST_OWN_ID = 2_000_000


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, an array for each property. ValueError for impossible values."""

    arrival_s: Floats
    prompt_tokens: Ints  # number of tokens, the shared prefix included
    output_tokens: Ints  # tokens that the request makes before it ends
    max_new_tokens: Ints
    prefix_id: Ints  # prompts with the same id begin with the same tokens; NO_PREFIX: nothing is shared
    prefix_tokens: Ints
    tenant: Ints

    def __post_init__(self) -> None:
        shared = self.prefix_id != NO_PREFIX
        self._check(np.diff(self.arrival_s, prepend=0) < 0, "arrives before the request above it, or before 0")
        self._check(self.output_tokens < 1, "makes no token: let it make at least 1")
        self._check(self.max_new_tokens < self.output_tokens, "makes more tokens than its max_new_tokens")
        self._check(self.prompt_tokens <= self.prefix_tokens, "has no token of its own after its prefix")
        self._check(shared != (self.prefix_tokens > 0), "has a prefix without an id or a length")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def _check(self, wrong: npt.NDArray[np.bool_], what: str) -> None:
        if wrong.any():
            raise ValueError(f"request {int(wrong.argmax()) + 1} of the trace {what}")

    @property
    def duration_s(self) -> float:
        """Seconds until the last request arrives."""
        return float(self.arrival_s[-1]) if len(self) else 0.0

    def dealt(self, engine: int, engines: int) -> "Trace":
        """The requests that the given engine gets when requests are dealt to `engines` engines in turn."""
        return Trace(*(getattr(self, column.name)[engine::engines] for column in fields(self)))

    def with_exact_lengths(self) -> "Trace":
        """The trace for a real server, which stops only at a request's limit: the limit is the number of tokens that
        the request makes.
        """
        return replace(self, max_new_tokens=self.output_tokens)


class RequestMaker:
    """Makes the requests of a trace one by one, so that a prompt's token ids take memory only while its request
    exists.
    """

    def __init__(self, trace: Trace) -> None:
        self._longest = int(trace.prompt_tokens.max(initial=1))
        self._filler = tuple(range(self._longest))
        # Lists, because reading one number from an array takes longer than all other work here.
        self._prompt_tokens, self._prefix_tokens = trace.prompt_tokens.tolist(), trace.prefix_tokens.tolist()
        self._max_new_tokens, self._prefix_id = trace.max_new_tokens.tolist(), trace.prefix_id.tolist()
        self._shares = [Share(str(tenant)) for tenant in trace.tenant.tolist()]

    def make(self, index: int) -> GenerationRequest:
        prefix = self._prefix_tokens[index]
        own = (FIRST_OWN_ID + index, *self._filler[: self._prompt_tokens[index] - prefix - 1])
        ids = (FIRST_PREFIX_ID + self._prefix_id[index], *self._filler[: prefix - 1], *own) if prefix else own
        return GenerationRequest(ids, self._max_new_tokens[index], share=self._shares[index])


def write_csv(trace: Trace, path: Path) -> None:
    columns = [column.name for column in fields(Trace)]
    with path.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(columns)
        writer.writerows(zip(*(getattr(trace, column).tolist() for column in columns), strict=True))


def read_csv(path: Path) -> Trace:
    """Reads a trace. The columns `prefix_id`, `prefix_tokens`, `tenant` and `max_new_tokens` (default: `output_tokens`)
    are optional. ValueError if the file is not a trace.
    """
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    if not rows:
        raise ValueError(f"{path} has no requests: write one per line, below the line with the names of the columns")
    missing = {"arrival_s", "prompt_tokens", "output_tokens"} - rows[0].keys()
    if missing:
        raise ValueError(f"{path} has no column {', '.join(sorted(missing))}: name the columns in its first line")

    def column(name: str, read: Callable[[str], Any], default: Any = None) -> Any:
        try:
            return np.array([read(row[name]) for row in rows]) if name in rows[0] else default
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, column {name}: {error}") from None

    none = np.zeros(len(rows), dtype=np.int64)
    output_tokens = column("output_tokens", int)
    return Trace(
        column("arrival_s", float),
        column("prompt_tokens", int),
        output_tokens,
        column("max_new_tokens", int, output_tokens),
        prefix_id=column("prefix_id", int, none + NO_PREFIX),
        prefix_tokens=column("prefix_tokens", int, none),
        tenant=column("tenant", int, none),
    )


class Lengths(Protocol):
    def draw(self, random: np.random.Generator, count: int) -> Ints: ...


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
    prefix: Lengths = Uniform(0, 0)

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
    prefixes = {"prefix_id": prefix_id, "prefix_tokens": prefix_tokens}
    return Trace(arrival_s, own + prefix_tokens, output, limits, tenant=np.zeros_like(output), **prefixes)
