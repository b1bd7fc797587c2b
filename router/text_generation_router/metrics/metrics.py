"""TGI's Prometheus metrics with the same names, labels and format, so that TGI's dashboards keep working.

prometheus_client holds the values; `page.py` prints them. Every series exists from the start, at 0. Durations
have TGI's buckets. Numbers of tokens and of requests have two buckets for each doubling, or TGI's 100 and 1,024
buckets, if an operator asks for these.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from text_generation_common.link import ReplicaReport, ReplicaState
from text_generation_router.metrics.adapter_usage import AdapterUsage
from text_generation_router.metrics.instruments import (
    Facts,
    PlainStepCounter,
    PlainStepHistogram,
    StepCounter,
    StepHistogram,
)
from text_generation_router.metrics.key_usage import key_usage
from text_generation_router.metrics.page import FamilySource, OwnFamilies

METHODS = ("prefill", "decode")


class Limit(StrEnum):
    """The limits that end requests and connections: the values of tgi_router_limit_hits' label."""

    CONNECTIONS = "connections"
    HEADER_SIZE = "header_size"
    HEADER_TIME = "header_time"
    BODY_SIZE = "body_size"
    BODY_TIME = "body_time"
    CHUNKS = "chunks"
    WRITE_TIME = "write_time"
    PIPELINE = "pipeline"


def duration_buckets() -> list[float]:
    """Bucket bounds from 0.00015 to 145.6 seconds, each 1.5 times the previous bound."""
    bounds, value = [], 0.0001
    for _ in range(35):
        value *= 1.5
        bounds.append(value)
    return bounds


def hundredths(maximum: int) -> list[float]:
    return [maximum / 100 * step for step in range(1, 101)]


def half_doublings(maximum: int) -> list[float]:
    """1, 2, 3, 4, 6, 8, 12, 16 … and at last `maximum`."""
    powers = [2**exponent for exponent in range(maximum.bit_length())]
    bounds = {float(bound) for power in powers for bound in (power, 1.5 * power) if bound < maximum and bound != 1.5}
    return sorted(bounds | {float(maximum)})


# Reasons why a request waits in the queue: earlier requests, TGI's joining rule, no free row, too little memory, the
# step's budget of prompt tokens, a prefix that is being computed for another request, or a LoRA adapter without a slot.
WAITS = ("turn", "rule", "rows", "memory", "budget", "prefix", "adapter")
MAX_REQUESTS = 1024  # requests: largest bucket of the histogram of batch sizes
# What fronts count about their engines (`RemoteCounts`): the end of each metric's name, and its description.
FRONT_COUNTS = {
    "lost_engines": ("lost_engines", "Connections to engines that were lost"),
    "resumes": ("resumes", "Requests that were sent to another engine after a loss"),
    "withdrawals": ("withdrawals", "Queued requests that were asked back from an engine"),
    "moves": ("moves", "Requests that left an engine for another one without a loss"),
    "late": ("late_messages", "Messages of engines about requests that had ended or moved"),
    "dropped_tokens": ("dropped_tokens", "Tokens of engines that were there before or came too late"),
    "broken_rules": ("broken_rules", "Times that an engine was cut off for breaking the protocol"),
    "news_bytes": ("news_bytes", "Bytes of news about loads and caches"),
    "news_gaps": ("news_gaps", "Times that an engine told its whole cache again, because news were missing"),
}
RATIOS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


class Metrics:
    """All metrics. A description is printed as a HELP line; an empty description prints none."""

    # set_limits makes these three metrics: their buckets depend on limits that are known only after warm-up.
    request_input_length: Histogram
    request_max_new_tokens: Histogram
    request_generated_tokens: Histogram

    def __init__(self, tgi_buckets: bool = False) -> None:
        """`tgi_buckets`: TGI's buckets also for numbers of tokens and requests, 1,324 instead of about 100."""
        self.registry = CollectorRegistry()
        self.of_server: FamilySource = OwnFamilies(self.registry)  # what /metrics shows
        self.adapters = AdapterUsage()
        self._tgi_buckets = tgi_buckets
        self._add_request_metrics()
        self._add_batch_metrics()
        self._add_shard_metrics()
        self._add_scheduling_metrics()
        self._add_front_metrics()

    def set_limits(self, max_input_tokens: int, max_total_tokens: int) -> None:
        """To be called once, after warm-up and before the first request."""
        self.request_input_length = self._histogram(
            "tgi_request_input_length", "Prompt tokens of each validated request", self._lengths(max_input_tokens)
        )
        self.request_max_new_tokens = self._histogram(
            "tgi_request_max_new_tokens", "New tokens each request may make", self._lengths(max_total_tokens)
        )
        self.request_generated_tokens = self._histogram(
            "tgi_request_generated_tokens", "Tokens made by each finished request", self._lengths(max_total_tokens)
        )

    def add_adapters(self, names: Iterable[str], may_change: bool = False) -> None:
        """From now on, `adapters` counts the texts of adapters with these names. To be called at most once."""
        self.adapters = AdapterUsage(names, self.registry, may_change)

    def count_requests(self, count: int = 1) -> None:
        """Counts requests in all, and for the API key of the HTTP request in progress."""
        self.request_count.inc(count)
        if (usage := key_usage.get()) is not None:
            usage.requests.inc(count)

    def describe(self, facts: Callable[[], Mapping[str, str]]) -> None:
        """Adds `tgi_info`, whose labels are the facts about the server that `facts` returns, and what the operating
        system knows about this process, under the names that all Prometheus clients use. To be called once."""
        Facts("tgi_info", "What is served, in labels; always 1", facts, self.registry)
        ProcessCollector(registry=self.registry)

    def _lengths(self, most: int) -> list[float]:
        return hundredths(most) if self._tgi_buckets else half_doublings(most)

    def _add_request_metrics(self) -> None:
        self.request_count = self._counter("tgi_request_count", "Requests received")
        self.request_success = self._counter("tgi_request_success", "Requests answered in full")
        errors = ("overloaded", "validation", "template", "generation", "incomplete", "dropped", "deadline")
        self.request_failure = self._counter("tgi_request_failure", "", err=errors)
        self.request_duration = self._duration("tgi_request_duration", "Seconds from receipt to the last token")
        self.request_validation_duration = self._duration(
            "tgi_request_validation_duration", "Seconds from receipt to the queue"
        )
        self.request_queue_duration = self._duration("tgi_request_queue_duration", "Seconds in the queue")
        self.request_inference_duration = self._duration(
            "tgi_request_inference_duration", "Seconds from the first step to the last token"
        )
        self.request_mean_time_per_token_duration = self._duration(
            "tgi_request_mean_time_per_token_duration", "Mean seconds per generated token of a request"
        )
        # In TGI this metric is a summary, but TGI's dashboard queries it as a histogram.
        self.request_skipped_tokens = PlainStepHistogram(
            "tgi_request_skipped_tokens", "Speculated tokens accepted per generation message", [0.0], self.registry
        )
        self.ignored_parameters = Counter(
            "tgi_request_ignored_parameters",
            "Requests with a field that is unknown and has no effect, by its name",
            ["name"],
            registry=self.registry,
        )
        self.queue_size = self._gauge("tgi_queue_size", "Requests waiting in the queue")

    def _add_batch_metrics(self) -> None:
        sizes = [float(size) for size in range(1, MAX_REQUESTS + 1)]
        self.batch_next_size = self._histogram(
            "tgi_batch_next_size",
            "Size of each batch leaving the queue",
            sizes if self._tgi_buckets else half_doublings(MAX_REQUESTS),
        )
        self.batch_current_size = self._gauge("tgi_batch_current_size", "Requests in the running batch")
        self.batch_current_max_tokens = self._gauge(
            "tgi_batch_current_max_tokens", "Tokens the running batch may grow to"
        )
        self.batch_max_total_tokens = self._gauge("tgi_batch_max_total_tokens", "Tokens all running requests may hold")
        self.batch_concat = self._counter("tgi_batch_concat", "", reason=("backpressure", "wait_exceeded", "chunking"))
        self.batch_inference_count = self._step_counter("tgi_batch_inference_count", "Steps sent")
        self.batch_inference_success = self._step_counter("tgi_batch_inference_success", "Steps answered")
        self.batch_inference_failure = self._counter("tgi_batch_inference_failure", "", method=METHODS)
        self.batch_inference_duration = self._step_duration(
            "tgi_batch_inference_duration", "Seconds from sending a step to its tokens being sent on"
        )
        self.batch_forward_duration = self._step_duration(
            "tgi_batch_forward_duration", "Seconds a shard computes a step, sampling included"
        )
        self.batch_decode_duration = self._step_duration(
            "tgi_batch_decode_duration", "Seconds from ids to text and stop checks"
        )
        self.batch_filter_duration = self._duration(
            "tgi_batch_filter_duration", "Seconds to send tokens on and to filter the batch", METHODS
        )
        self.batch_concat_duration = self._duration(
            "tgi_batch_concat_duration",
            "Seconds to decide and send a step whose new rows join running rows",
            ("decode",),
        )

    def _add_shard_metrics(self) -> None:
        """Metrics about shards, which TGI does not have."""
        self.shard_decode_steps = self._plain_step_counter(
            "tgi_shard_decode_steps", "Decode steps answered by the shards"
        )
        self.shard_overlapped_steps = self._plain_step_counter(
            "tgi_shard_overlapped_steps", "Decode steps whose successor was queued when they ended"
        )
        self.shard_step_gap_duration = self._plain_step_duration(
            "tgi_shard_step_gap_duration", "Seconds the shard had nothing to run before a step"
        )
        self.shards_ready = self._gauge(
            "tgi_shards_ready",
            "Groups of shards that compute; 0 until the first group, and after a loss until the next",
        )
        self.shard_losses = self._counter("tgi_shard_losses", "Groups of shards that died, hung or were given up")
        self.shard_recovery_duration = self._duration(
            "tgi_shard_recovery_duration", "Seconds from the loss of a group to the readiness of the next"
        )
        self.request_resumes = self._counter(
            "tgi_request_resumes", "Times that a running request was put back into the queue, to be resumed"
        )
        self.limit_hits = self._counter(
            "tgi_router_limit_hits", "Requests and connections ended by a limit", limit=tuple(Limit)
        )

    def _add_scheduling_metrics(self) -> None:
        """Metrics about memory and waiting, which TGI does not have."""
        self.slots_used = self._gauge("tgi_slots_used", "Token slots that requests hold, each shared slot counted once")
        self.slots_cached = self._gauge("tgi_slots_cached", "Token slots of cached prefixes that no request holds")
        self.slots_free = self._gauge("tgi_slots_free", "Token slots that are neither held nor cached")
        self.prefix_hit_tokens = self._plain_step_counter(
            "tgi_prefix_hit_tokens", "Tokens of prompts that were found in the prefix cache"
        )
        self.prefilled_tokens = self._plain_step_counter("tgi_prefilled_tokens", "Tokens of prompts that were computed")
        self.preemptions = self._plain_step_counter(
            "tgi_request_preemptions", "Times that a running request was preempted"
        )
        self.recomputed_tokens = self._plain_step_counter(
            "tgi_recomputed_tokens", "Tokens that were computed again after a preemption or the loss of a shard"
        )
        self.queue_waits = self._counter(
            "tgi_queue_waits", "Requests that began, by the last reason for which they waited", reason=WAITS
        )
        self.queue_wait_seconds = self._counter(
            "tgi_queue_wait_seconds", "Seconds in the queue, by the last reason for which requests waited", reason=WAITS
        )
        self.tenants = Gauge(
            "tgi_tenants",
            "Tenants with requests that run, and with requests that wait",
            ("state",),
            registry=self.registry,
        )
        for state in ("running", "waiting"):
            self.tenants.labels(state=state)
        self.length_estimate_ratio = self._histogram(
            "tgi_request_length_estimate_ratio", "Tokens made over tokens expected at the start", RATIOS
        )
        self.time_to_first_token = self._duration(
            "tgi_request_time_to_first_token_duration", "Seconds from receipt to the first token"
        )
        self.time_between_tokens = self._plain_step_duration(
            "tgi_request_time_between_tokens_duration", "Seconds from a token of a request to its next"
        )
        self.books_errors = self._counter("tgi_books_errors", "Times that token slots or rows did not add up")

    def _add_front_metrics(self) -> None:
        """Metrics of a front whose engines are other processes; in other routers they stay at zero. None of them has a
        label for each engine: engines have pages of their own."""
        self.front_counters = {
            count: self._plain_step_counter(f"tgi_front_{name}", text) for count, (name, text) in FRONT_COUNTS.items()
        }
        self.front_engines = self._gauge("tgi_front_engines", "Engines that fronts are connected to, for each front")
        self.front_suspects = self._gauge("tgi_front_suspects", "Requests that may have ended an engine")
        self.front_cached_blocks = self._gauge(
            "tgi_front_cached_blocks", "Blocks that engines are known to have cached"
        )
        self._replicas = Gauge("tgi_replicas", "Replicas of this launcher", ("state",), registry=self.registry)
        self.note_replicas(ReplicaReport(0))

    def note_replicas(self, report: ReplicaReport) -> None:
        for state in ReplicaState:
            self._replicas.labels(state=state.value).set(report.count(state))

    def _counter(self, name: str, text: str, **labels: Sequence[str]) -> Counter:
        """A counter. `labels`: at most one label, and its values."""
        counter = Counter(name, text, labels.keys(), registry=self.registry)
        for label, values in labels.items():
            for value in values:
                counter.labels(**{label: value})
        return counter

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def _duration(self, name: str, text: str, methods: Sequence[str] = ()) -> Histogram:
        labels = ("method",) if methods else ()
        histogram = Histogram(name, text, labels, buckets=duration_buckets(), registry=self.registry)
        for method in methods:
            histogram.labels(method=method)
        return histogram

    def _step_counter(self, name: str, text: str) -> StepCounter:
        return StepCounter(name, text, METHODS, self.registry)

    def _plain_step_counter(self, name: str, text: str) -> PlainStepCounter:
        return PlainStepCounter(name, text, self.registry)

    def _step_duration(self, name: str, text: str) -> StepHistogram:
        return StepHistogram(name, text, duration_buckets(), METHODS, self.registry)

    def _plain_step_duration(self, name: str, text: str) -> PlainStepHistogram:
        return PlainStepHistogram(name, text, duration_buckets(), self.registry)
