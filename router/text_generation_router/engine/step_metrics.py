"""Updates the metrics of steps when a step is sent and when it has answered. What the scheduler knows is read from it
when the metrics page is made."""

import time
from collections.abc import Mapping

from text_generation_router.metrics.metrics import METHODS, Metrics
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.step import ForwardStep, StepAnswer
from text_generation_router.view.steps import StepRing


class MethodMetrics:
    """The metrics of forward steps with the label `method`: looked up once, because every step changes them."""

    def __init__(self, metrics: Metrics, method: str) -> None:
        self.sent = metrics.batch_inference_count.labels(method=method)
        self.answered = metrics.batch_inference_success.labels(method=method)
        self.inference = metrics.batch_inference_duration.labels(method=method)
        self.forward = metrics.batch_forward_duration.labels(method=method)
        self.decode = metrics.batch_decode_duration.labels(method=method)


class StepMetrics:
    def __init__(self, metrics: Metrics, scheduler: Scheduler) -> None:
        self._metrics = metrics
        self.ring: StepRing | None = None  # notes steps while the engine is watched
        self._by_method = {method: MethodMetrics(metrics, method) for method in METHODS}
        counters = scheduler.counters
        metrics.preemptions.set_function(lambda: counters.preemptions)
        metrics.recomputed_tokens.set_function(lambda: counters.recomputed_tokens)
        metrics.prefix_hit_tokens.set_function(lambda: counters.prefix_hit_tokens)
        metrics.prefilled_tokens.set_function(lambda: counters.prefilled_tokens)
        metrics.queue_size.set_function(lambda: len(scheduler.queue))
        metrics.batch_current_size.set_function(lambda: scheduler.active.num_running)
        metrics.batch_current_max_tokens.set_function(lambda: scheduler.active.num_reserved)
        metrics.tenants.labels(state="running").set_function(lambda: scheduler.queue.num_tenants_running)
        metrics.tenants.labels(state="waiting").set_function(lambda: scheduler.queue.num_tenants_waiting)
        metrics.slots_used.set_function(lambda: scheduler.memory.num_held)
        metrics.slots_cached.set_function(lambda: scheduler.memory.cache.num_evictable)
        metrics.slots_free.set_function(lambda: scheduler.memory.slots.num_free)

    def sent(self, step: ForwardStep) -> None:
        metrics = self._metrics
        self._by_method[step.method].sent.inc()
        if step.joined:
            metrics.batch_next_size.observe(step.joined)
        if step.concat_reason:
            metrics.batch_concat.labels(reason=step.concat_reason).inc()

    def answered(self, step: ForwardStep, answer: StepAnswer, sent_s: float, received_s: float) -> None:
        metrics, method, now = self._metrics, step.method, time.perf_counter()
        of_method = self._by_method[method]
        of_method.answered.inc()
        of_method.inference.observe(now - sent_s)
        of_method.forward.observe(answer.total_ns / 1e9)
        of_method.decode.observe(now - received_s)
        metrics.request_skipped_tokens.observe(0)
        if self.ring is not None:
            self.ring.note(step, answer)
        if method == "decode":
            metrics.shard_decode_steps.inc()
            metrics.shard_overlapped_steps.inc(int(answer.successor_queued))
            metrics.shard_step_gap_duration.observe(answer.gap_ns / 1e9)

    def joined_running(self, seconds: float) -> None:
        """Notes how long it took to decide, encode and send a step whose new rows join running rows."""
        self._metrics.batch_concat_duration.labels(method="decode").observe(seconds)

    def filtered(self, sent_s: float, received_s: float) -> None:
        self._metrics.batch_filter_duration.labels(method="decode").observe(received_s - sent_s)

    def failed(self, step: ForwardStep) -> None:
        self._metrics.batch_inference_failure.labels(method=step.method).inc()

    def began(self, request: Running, queue_s: float) -> None:
        reason = request.waited_for or "turn"
        self._metrics.queue_waits.labels(reason=reason).inc()
        self._metrics.queue_wait_seconds.labels(reason=reason).inc(queue_s)

    def resumed(self, requests: int) -> None:
        """Counts `requests` requests that were returned to the queue after a loss, with their tokens."""
        self._metrics.request_resumes.inc(requests)

    def finished(self, request: Running) -> None:
        self._metrics.length_estimate_ratio.observe(len(request.output_ids) / max(1, request.estimate))

    def waited_between_tokens(self, gaps_s: Mapping[float, int]) -> None:
        for gap_s, count in gaps_s.items():
            self._metrics.time_between_tokens.observe(gap_s, count)
