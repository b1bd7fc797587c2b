"""The limits and policies of the scheduler."""

from dataclasses import dataclass

from text_generation_common.flags.kinds import AdmissionMode


@dataclass(frozen=True, slots=True)
class Limits:
    """TGI's settings. New requests join running ones at `waiting_served_ratio` waiting requests per running request, or
    after `max_waiting_tokens` decode steps."""

    capacity: int  # token slots
    max_rows: int  # requests that may hold a row in the shards
    max_batch_prefill_tokens: int
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    max_batch_size: int | None = None
    admission: AdmissionMode = AdmissionMode.PAST_FUTURE
    prefix_caching: bool = True
    priority_between_tenants: bool = False  # False: priorities order only the requests of one tenant

    @property
    def max_running(self) -> int:
        return min(self.max_rows, self.max_batch_size or self.max_rows)
