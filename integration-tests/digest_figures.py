"""What one run of `make digest` found, and what must be equal in several runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CROWDED = ("storm", "line")
MIN_PREEMPTIONS = 21


@dataclass(frozen=True, slots=True)
class Work:
    """Counts of the work that the shards did in one run."""

    forwards: int
    rows: int  # number of rows of all forward steps: one for each request that decodes in a step
    prompt_tokens: int  # number of tokens that chunks computed; tokens of preempted requests count each time
    wasted_rows: (
        int  # rows whose token is in no text; plus one for each request preempted before its prompt was computed
    )


@dataclass(frozen=True, slots=True)
class Digest:
    run: str
    num_shard: int
    kernels: str
    sha256: str
    answers: int
    preemptions: int
    failed: Sequence[str]
    work: Work | None = None  # None in runs other than the line, whose counts are not comparable

    def failures(self) -> list[str]:
        is_few = self.run in CROWDED and self.preemptions < MIN_PREEMPTIONS
        few = [f"{self.preemptions} preemptions only"] if is_few else []
        return [f"{self.run}, {self.num_shard} shards: {failure}" for failure in [*self.failed, *few]]


def differences(found: Sequence[Digest]) -> Iterator[str]:
    """A line for each value that should be equal in all runs with the same number of shards, and is not."""
    for num_shard in sorted({digest.num_shard for digest in found}):
        runs = [digest for digest in found if digest.num_shard == num_shard]
        if len({digest.sha256 for digest in runs if digest.run in CROWDED}) > 1:
            yield f"{num_shard} shards: storms and lines have different digests"
        for name in sorted({digest.run for digest in runs} - {*CROWDED}):
            if len({digest.sha256 for digest in runs if digest.run == name}) > 1:
                yield f"{num_shard} shards: the {name} have different digests"
        if len({(digest.work, digest.preemptions) for digest in runs if digest.run == "line"}) > 1:
            yield f"{num_shard} shards: the lines took different steps"
