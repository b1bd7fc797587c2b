"""Traces: a span for each generation, with its stages and the caller's span as its parent, received over OTLP."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from text_generation_router.api.tests.conftest import Server
from text_generation_router.engine.protocol import Ended
from text_generation_router.http.answer_headers import identified
from text_generation_router.metrics import tracing
from text_generation_router.metrics.tracing import GenerationSummary, operation_of
from text_generation_router.scheduling.request import EndReason

NEEDS = "needs OpenTelemetry: `pip install 'tgi-py[otlp]'`, then run this test again"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"content-type": "application/json", "x-request-id": "mine-1"}
CANARY = "canary-7f3a"


def summary(**changes: Any) -> GenerationSummary:
    known: dict[str, Any] = {
        "started_s": 100.0, "queued_s": 101.0, "ended_s": 110.0, "queue_s": 2.0, "first_token_s": 1.0,
        "last_token_s": 6.5, "replays": (), "failure": None, "finish_reason": "length", "prompt_tokens": 3,
        "generated_tokens": 4, "cached_tokens": 0, "seed": None,
    }  # fmt: skip
    return GenerationSummary(**known | changes)


WHOLE = [("validate", 100, 101), ("queue", 101, 103), ("prefill", 103, 104), ("decode", 104, 109.5)]


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({}, [*WHOLE, ("detokenize", 109.5, 110)]),
        ({"replays": ((2.0, 4.0),)}, [*WHOLE, ("detokenize", 109.5, 110), ("replay", 105, 107)]),
        ({"failure": "dropped"}, WHOLE),
        ({"first_token_s": None, "failure": "dropped"}, [*WHOLE[:2], ("prefill", 103, 109.5)]),
        ({"queue_s": None, "first_token_s": None, "failure": "dropped"}, [WHOLE[0], ("queue", 101, 110)]),
        ({"first_token_s": 6.5}, [*WHOLE[:2], ("prefill", 103, 109.5), ("detokenize", 109.5, 110)]),
    ],
)
def test_the_stages_of_a_generation_follow_each_other(changes: dict[str, Any], stages: list[Any]) -> None:
    assert list(summary(**changes).stages()) == stages


def test_chats_are_told_from_completions() -> None:
    assert [operation_of(path) for path in ("/v1/chat/completions", "/generate")] == ["chat", "text_completion"]


class Collector:
    """A TraceService: `spans` has the spans that were sent, by name."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

        self.sent: list[Any] = []
        self.services: list[dict[str, Any]] = []
        collector = self

        class Servicer(service.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:
                for found in request.resource_spans:
                    collector.services.append(attributes(found.resource))
                    collector.sent += [span for scope in found.scope_spans for span in scope.spans]
                return messages.ExportTraceServiceResponse()

        self.server = grpc.server(ThreadPoolExecutor(1))
        service.add_TraceServiceServicer_to_server(Servicer(), self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    @property
    def roots(self) -> list[Any]:
        names = {span.span_id for span in self.sent}
        return [span for span in self.sent if span.parent_span_id not in names]

    def children(self, span: Any) -> dict[str, Any]:
        return {found.name: found for found in self.sent if found.parent_span_id == span.span_id}


def attributes(of: Any) -> dict[str, Any]:
    def value(kept: Any) -> Any:
        kind = kept.WhichOneof("value")
        return [value(item) for item in kept.array_value.values] if kind == "array_value" else getattr(kept, kind)

    return {pair.key: value(pair.value) for pair in of.attributes}


def seconds(span: Any) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


class TracedServer:
    def __init__(self, make_server: Any) -> None:
        from text_generation_router.metrics.otlp import OtlpTracer

        self.collector = Collector()
        self._tracer = OtlpTracer(f"http://127.0.0.1:{self.collector.port}", "mine", "1.2.3", "org/m")
        self.server: Server = make_server(tracer=self._tracer)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        return self.server.post(path, body, HEADERS | (headers or {}))

    def spans(self) -> Collector:
        asyncio.run(self._tracer.close())
        return self.collector


@pytest.fixture
def traced(make_server: Any) -> Iterator[TracedServer]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter", reason=NEEDS)
    traced = TracedServer(make_server)
    yield traced
    traced.spans().server.stop(None).wait()


def test_a_generation_is_a_span_with_its_stages_below_the_callers_span(traced: TracedServer) -> None:
    parent = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    parameters = {"do_sample": True, "temperature": 0.5, "seed": 7, "max_new_tokens": 5}
    answer = traced.post("/generate", {"inputs": "Hi", "parameters": parameters}, parent)
    assert answer.status == 200
    spans = traced.spans()
    (root,) = spans.roots
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert root.name == "text_completion org/m" and root.kind == root.SPAN_KIND_SERVER and not root.status.code
    found = attributes(root)
    assert found["http.request.header.x-request-id"] == ["mine-1"] and found["url.path"] == "/generate"
    assert found["gen_ai.usage.input_tokens"] == 2 and found["gen_ai.usage.output_tokens"] == 2
    assert found["gen_ai.request.max_tokens"] == 5 and found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.request.seed"] == "7" and len(found["gen_ai.response.finish_reasons"]) == 1
    stages = spans.children(root)
    assert list(stages) == ["validate", "queue", "prefill", "detokenize"]
    # The fake queue and shards report these times.
    assert seconds(stages["queue"]) == pytest.approx(0.25) and seconds(stages["prefill"]) == pytest.approx(0.5)
    assert {span.trace_id for span in spans.sent} == {root.trace_id}
    assert spans.services[0]["service.name"] == "mine" and spans.services[0]["service.version"] == "1.2.3"


def test_each_generation_of_a_request_has_a_span_and_streams_have_one_too(traced: TracedServer) -> None:
    message = {"role": "user", "content": "Hi"}
    assert traced.post("/v1/chat/completions", {"messages": [message], "n": 2}).status == 200
    assert traced.post("/generate_stream", {"inputs": "Hi"}).status == 200
    roots = traced.spans().roots
    assert [root.name for root in roots] == ["chat org/m", "chat org/m", "text_completion org/m"]
    assert all(attributes(root)["http.request.header.x-request-id"] == ["mine-1"] for root in roots)


def test_failures_and_refusals_are_spans_with_their_kind_of_error(traced: TracedServer) -> None:
    assert traced.post("/generate", {"inputs": ""}).status == 422
    assert traced.post("/generate", b"[").status == 400
    traced.server.engine.script.ends_after = (1, Ended(EndReason.FAILED, 0.5, "boom", 0.25))
    assert traced.post("/generate", {"inputs": "Hi"}).status == 424
    spans = traced.spans()
    kinds = [(attributes(root)["error.type"], bool(root.status.code)) for root in spans.roots]
    assert kinds == [("422", False), ("400", False), ("generation", True)]
    assert list(spans.children(spans.roots[2])) == ["validate", "queue", "prefill"]


def test_no_span_has_a_text(traced: TracedServer) -> None:
    traced.server.engine.script.texts = (CANARY, CANARY)
    message = {"role": "user", "content": CANARY}
    for stream in (False, True):
        traced.post("/generate", {"inputs": CANARY, "stream": stream})
        traced.post("/v1/chat/completions", {"messages": [message], "stream": stream, "stop": [CANARY]})
    spans = traced.spans()
    assert len(spans.roots) == 4 and not any(CANARY.encode() in span.SerializeToString() for span in spans.sent)


def test_a_caller_that_is_not_sampled_is_not_traced(traced: TracedServer) -> None:
    assert traced.post("/generate", {"inputs": "Hi"}, {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}).status == 200
    assert not traced.spans().sent


def test_without_a_tracer_the_application_has_nothing_for_traces(make_server: Any) -> None:
    layers = {middleware.cls for middleware in make_server().app.user_middleware}
    assert identified in layers and tracing.traced not in layers
