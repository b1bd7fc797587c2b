"""Rows and queue of a scheduler as tables."""

import secrets
from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice

from text_generation_router.scheduling.request import Share
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.view.values import RowColumns, WaitColumns

# Most rows, and most waiting requests, of a state.
MAX_ROWS, MAX_WAITING = 256, 50
DIGEST_BYTES = 4


class TenantDigests:
    """Names of tenants that reveal nothing: owners have addresses of clients in them, which can be guessed, so the
    digests have a key that lives and ends with the process."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def of(self, share: Share) -> str:
        text = f"{share.owner}\n{share.tenant}".encode()
        return blake2b(text, key=self._key, digest_size=DIGEST_BYTES).hexdigest()


def rows_of(scheduler: Scheduler, digests: TenantDigests, now_s: float) -> RowColumns:
    requests = list(islice(scheduler.active.running.values(), MAX_ROWS))
    return RowColumns(
        id=tuple(r.id for r in requests),
        tenant=_tenants(requests, digests),
        age_s=_ages(requests, now_s),
        prompt=tuple(len(r.request.input_ids) for r in requests),
        cached=tuple(r.cached_tokens for r in requests),
        prefilled=tuple(r.prefilled for r in requests),
        prefill_to=tuple(r.prefill_to for r in requests),
        made=tuple(len(r.output_ids) for r in requests),
        most=tuple(r.request.max_new_tokens for r in requests),
        expected=tuple(r.estimate for r in requests),
        slots=tuple(len(r.slots) for r in requests),
        paused=tuple(int(r.paused) for r in requests),
    )


def queue_of(scheduler: Scheduler, digests: TenantDigests, now_s: float) -> WaitColumns:
    requests = list(islice(scheduler.queue.waiting(), MAX_WAITING))
    return WaitColumns(
        id=tuple(r.id for r in requests),
        tenant=_tenants(requests, digests),
        age_s=_ages(requests, now_s),
        prompt=tuple(len(r.request.input_ids) for r in requests),
        made=tuple(len(r.output_ids) for r in requests),
        most=tuple(r.request.max_new_tokens for r in requests),
        reason=tuple("paused" if r.paused else r.waited_for or "turn" for r in requests),
    )


def _tenants(requests: Iterable[Running], digests: TenantDigests) -> tuple[str, ...]:
    return tuple(digests.of(request.request.share) for request in requests)


def _ages(requests: Iterable[Running], now_s: float) -> tuple[float, ...]:
    return tuple(round(now_s - request.arrived_s, 1) for request in requests)
