"""The limits and policies of the scheduler."""

# ruff: noqa: RUF009  (a frozen dataclass is a constant)

from dataclasses import dataclass

from text_generation_common.flags.requests import SchedulingFlags


@dataclass(frozen=True, slots=True)
class Limits:
    capacity: int  # number of token slots
    max_rows: int  # most requests that may hold a row in the shards
    max_batch_prefill_tokens: int
    policy: SchedulingFlags = SchedulingFlags()

    @property
    def max_running(self) -> int:
        return min(self.max_rows, self.policy.max_batch_size or self.max_rows)
