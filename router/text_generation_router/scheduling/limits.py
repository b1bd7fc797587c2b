"""What the scheduler may use, and how."""

from dataclasses import dataclass

from text_generation_router.scheduling.admission import AdmissionMode


@dataclass(frozen=True, slots=True)
class Limits:
    """TGI's knobs. `waiting_served_ratio`: that many waiting per running request may interrupt; after
    `max_waiting_tokens` decode steps any may."""

    capacity: int  # token slots
    max_rows: int  # requests that may hold a row in the shards
    max_batch_prefill_tokens: int
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    max_batch_size: int | None = None
    admission: AdmissionMode = AdmissionMode.PAST_FUTURE
    prefix_caching: bool = True
    priority_between_tenants: bool = False  # else it orders the requests within one tenant only

    @property
    def max_running(self) -> int:
        return min(self.max_rows, self.max_batch_size or self.max_rows)
