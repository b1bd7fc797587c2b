"""Sends traces to a collector, over OTLP and gRPC. Needs OpenTelemetry's packages: `pip install 'tgi-py[otlp]'`. This
file is imported only if --otlp-endpoint is given."""

import asyncio
import time
from dataclasses import dataclass

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from text_generation_common.logs import request_id
from text_generation_router.metrics.tracing import (
    AttributeValue,
    GenerationSummary,
    Origin,
    TraceStage,
    attributes_of,
    facts_of,
    operation_of,
    origin,
)
from text_generation_router.scheduling.request import GenerationRequest

# Seconds that one batch of spans may take to be sent, and so the longest that `close` waits for a collector.
SEND_S = 5
FIRST_SERVER_ERROR = 500


class OtlpTracer:
    """A Tracer. Spans are sent by a thread, in batches; while the collector is away at most 2,048 spans wait, and
    further ones are dropped. `model` is the name of the model for clients."""

    def __init__(self, endpoint: str, service_name: str, version: str, model: str) -> None:
        self._model = model
        resource = Resource.create({"service.name": service_name, "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=SEND_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("text_generation_router", version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, request: GenerationRequest) -> "OtlpTrace":
        known = origin.get() or Origin("", {}, request_id.get(), time.perf_counter())
        known.num_generations += 1
        return OtlpTrace(self, known, request)

    def refused(self, refused: Origin, status: int) -> None:
        attributes: dict[str, AttributeValue] = {"http.response.status_code": status, "error.type": str(status)}
        now = time.perf_counter()
        self._send(refused, TraceStage("refused", refused.started_s, now), attributes, status >= FIRST_SERVER_ERROR, ())

    def end(self, known: Origin, request: GenerationRequest, summary: GenerationSummary) -> None:
        whole = TraceStage("", summary.started_s, summary.ended_s)
        facts = facts_of(summary, request, self._model)
        self._send(known, whole, facts, summary.failure is not None, tuple(summary.stages()))

    def _send(
        self,
        known: Origin,
        whole: TraceStage,
        attributes: dict[str, AttributeValue],
        failed: bool,
        stages: tuple[TraceStage, ...],
    ) -> None:
        zero_ns = time.time_ns() - round(time.perf_counter() * 1e9)  # time.time_ns where time.perf_counter is 0
        span = self._tracer.start_span(
            f"{operation_of(known.path)} {self._model}",
            context=self._propagator.extract(dict(known.parent)),
            kind=SpanKind.SERVER,
            attributes=attributes_of(known, self._model) | attributes,
            start_time=zero_ns + round(whole.start_s * 1e9),
        )
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        for stage in stages:
            child = self._tracer.start_span(stage.name, context=inside, start_time=zero_ns + round(stage.start_s * 1e9))
            child.end(zero_ns + round(stage.end_s * 1e9))
        span.end(zero_ns + round(whole.end_s * 1e9))

    async def close(self) -> None:
        """Sends the spans that wait. A collector that does not answer is given up after SEND_S."""
        await asyncio.to_thread(self._provider.shutdown)


@dataclass(frozen=True, slots=True)
class OtlpTrace:
    """A GenerationTrace."""

    tracer: OtlpTracer
    origin: Origin
    request: GenerationRequest

    def end(self, summary: GenerationSummary) -> None:
        self.tracer.end(self.origin, self.request, summary)
