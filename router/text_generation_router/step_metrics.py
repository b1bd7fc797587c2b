"""What is counted about steps: when one is sent, when it has answered, and when there is nothing to do."""

import time

from text_generation_router.metrics import Metrics
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import ForwardStep
from text_generation_router.shards import StepAnswer


class StepMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def sent(self, step: ForwardStep, scheduler: Scheduler) -> None:
        metrics = self._metrics
        metrics.batch_inference_count.labels(method=step.method).inc()
        metrics.batch_current_size.set(scheduler.num_running)
        metrics.batch_current_max_tokens.set(scheduler.num_reserved)
        metrics.slots_used.set(scheduler.slots.num_used)
        if step.joined:
            metrics.batch_next_size.observe(step.joined)
            metrics.queue_size.set(scheduler.num_waiting)
        if step.concat_reason:
            metrics.batch_concat.labels(reason=step.concat_reason).inc()

    def answered(self, step: ForwardStep, answer: StepAnswer, sent_s: float, received_s: float) -> None:
        metrics, method = self._metrics, step.method
        metrics.batch_inference_success.labels(method=method).inc()
        metrics.batch_inference_duration.labels(method=method).observe(time.perf_counter() - sent_s)
        metrics.batch_forward_duration.labels(method=method).observe(answer.total_ns / 1e9)
        metrics.batch_decode_duration.labels(method=method).observe(time.perf_counter() - received_s)
        metrics.request_skipped_tokens.observe(0)
        if method == "decode":
            metrics.shard_decode_steps.inc()
            metrics.shard_overlapped_steps.inc(int(answer.successor_queued))
            metrics.shard_step_gap_duration.observe(answer.gap_ns / 1e9)

    def filtered(self, sent_s: float, received_s: float) -> None:
        self._metrics.batch_filter_duration.labels(method="decode").observe(received_s - sent_s)

    def failed(self, step: ForwardStep) -> None:
        self._metrics.batch_inference_failure.labels(method=step.method).inc()

    def waiting(self, scheduler: Scheduler) -> None:
        self._metrics.queue_size.set(scheduler.num_waiting)

    def resting(self, scheduler: Scheduler) -> None:
        self._metrics.batch_current_size.set(0)
        self._metrics.batch_current_max_tokens.set(0)
        self._metrics.slots_used.set(scheduler.slots.num_used)
