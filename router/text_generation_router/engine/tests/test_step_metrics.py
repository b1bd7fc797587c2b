"""The metrics of steps, read from the metrics page."""

import time

import numpy as np
import pytest

from text_generation_router.engine.step_metrics import StepMetrics
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.metrics.page import render
from text_generation_router.scheduling.request import GenerationRequest, Limits
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import Chunk, ForwardStep, StepAnswer

NO_SLOTS = np.empty(0, np.int32)


def step(chunks: int = 0, joined: int = 0, concat_reason: str | None = None) -> ForwardStep:
    made = tuple(Chunk(i, 0, 1, True, None) for i in range(chunks))
    return ForwardStep(1, (7,), NO_SLOTS, made, joined, concat_reason)


def answer(successor_queued: bool = True) -> StepAnswer:
    return StepAnswer(1, [], [], [], [], [], [], 10**9, 2 * 10**9, 3 * 10**9, successor_queued)


class Page:
    """The values on the metrics page, by name."""

    def __init__(self, metrics: Metrics) -> None:
        self._registry = metrics.registry

    def of(self, name: str, **label: str) -> float:
        labels = "".join(f'{{{key}="{value}"}}' for key, value in label.items())
        lines = dict(line.rsplit(" ", 1) for line in render(self._registry).splitlines() if line[:1] not in ("#", ""))
        return float(lines[f"tgi_{name}{labels}"])

    def shows(self, **numbers: float) -> None:
        assert {name: self.of(name) for name in numbers} == numbers


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def page(metrics: Metrics) -> Page:
    return Page(metrics)


def make_scheduler() -> Scheduler:
    return Scheduler(Limits(capacity=500, max_rows=1, max_batch_prefill_tokens=64))


def test_a_step_that_is_sent_shows_what_the_scheduler_holds_and_what_has_happened_since(
    metrics: Metrics, page: Page
) -> None:
    scheduler = make_scheduler()
    counts = StepMetrics(metrics, scheduler)
    for _ in range(2):
        scheduler.add(GenerationRequest((1, 2, 3, 4), 5))
    page.shows(queue_size=2)
    sent = scheduler.next_step()
    assert isinstance(sent, ForwardStep)
    counts.sent(sent)
    page.shows(batch_current_size=1, batch_current_max_tokens=8, queue_size=1, batch_next_size_sum=1)
    page.shows(slots_used=4, slots_free=496, slots_cached=0, prefilled_tokens=4, request_preemptions=0)
    assert page.of("tenants", state="running") == page.of("tenants", state="waiting") == 1
    counts.sent(sent)
    assert page.of("batch_inference_count", method="prefill") == 2
    page.shows(prefilled_tokens=4)
    page.shows(batch_next_size_count=2)
    scheduler.cancel(1)
    page.shows(batch_current_size=0, batch_current_max_tokens=0, slots_used=4)


def test_every_counter_of_the_scheduler_grows_by_what_is_new(metrics: Metrics, page: Page) -> None:
    scheduler = make_scheduler()
    StepMetrics(metrics, scheduler)
    counters = scheduler.counters
    for times in (1, 2):
        counters.preemptions, counters.recomputed_tokens = 1 * times, 20 * times
        counters.prefix_hit_tokens, counters.prefilled_tokens = 300 * times, 4000 * times
        page.shows(
            request_preemptions=1 * times, recomputed_tokens=20 * times, prefix_hit_tokens=300 * times,
            prefilled_tokens=4000 * times,
        )  # fmt: skip


def test_the_next_batch_counts_only_requests_that_begin(metrics: Metrics, page: Page) -> None:
    scheduler = make_scheduler()
    counts = StepMetrics(metrics, scheduler)
    counts.sent(step())
    page.shows(batch_next_size_count=0)
    counts.sent(step(chunks=2, joined=2, concat_reason="backpressure"))
    page.shows(batch_next_size_count=1, batch_next_size_sum=2)
    assert page.of("batch_concat", reason="backpressure") == 1


def test_an_answer_is_timed_from_its_sending_and_its_gap_counts_where_nothing_else_ran(
    metrics: Metrics, page: Page
) -> None:
    counts, now = StepMetrics(metrics, make_scheduler()), time.perf_counter()
    counts.answered(step(chunks=1), answer(), now - 20, now - 5)
    page.shows(shard_decode_steps=0, shard_overlapped_steps=0, shard_step_gap_duration_count=0)
    for queued in (True, False):
        counts.answered(step(), answer(queued), now - 20, now - 5)
    page.shows(shard_decode_steps=2, shard_overlapped_steps=1, shard_step_gap_duration_sum=6)
    for method, steps in (("prefill", 1), ("decode", 2)):
        assert page.of("batch_inference_success", method=method) == steps
        assert page.of("batch_forward_duration_sum", method=method) == 2 * steps
        for name, seconds in (("inference", 20), ("decode", 5)):
            total = page.of(f"batch_{name}_duration_sum", method=method)
            assert total == pytest.approx(seconds * steps, abs=1.0)
    page.shows(request_skipped_tokens_count=3, request_skipped_tokens_sum=0)


def test_filters_failures_and_gaps_between_tokens_have_their_own_numbers(metrics: Metrics, page: Page) -> None:
    counts = StepMetrics(metrics, make_scheduler())
    counts.filtered(10.0, 10.5)
    counts.failed(step(chunks=1))
    counts.waited_between_tokens({0.5: 3, 2.0: 1})
    assert page.of("batch_filter_duration_sum", method="decode") == 0.5
    assert page.of("batch_inference_failure", method="prefill") == 1
    page.shows(request_time_between_tokens_duration_count=4, request_time_between_tokens_duration_sum=3.5)


def test_a_request_counts_by_what_it_waited_for_and_how_well_its_length_was_guessed(
    metrics: Metrics, page: Page
) -> None:
    counts = StepMetrics(metrics, make_scheduler())
    running = Running(1, GenerationRequest((1, 2), 9))
    counts.began(running, 1.5)
    running.waited_for = "memory"
    counts.began(running, 0.5)
    for reason, seconds in (("turn", 1.5), ("memory", 0.5)):
        assert page.of("queue_waits", reason=reason) == 1
        assert page.of("queue_wait_seconds", reason=reason) == seconds
    running.output_ids, running.estimate = [3, 3, 3], 2
    counts.finished(running)
    running.estimate = 0
    counts.finished(running)
    page.shows(request_length_estimate_ratio_count=2, request_length_estimate_ratio_sum=1.5 + 3.0)
