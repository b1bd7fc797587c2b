"""What a trace says about a generation: the HTTP request that it belongs to, its stages in time, and facts about it.

All of it is put together when the generation has ended, from numbers that the router has then. `otlp.py` sends it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from text_generation_common.logs import request_id
from text_generation_router.scheduling.request import GenerationRequest

AttributeValue = str | int | float | Sequence[str]
# Headers of W3C Trace Context: the caller's span, which becomes the parent of ours.
PARENT_HEADERS = (b"traceparent", b"tracestate")
FIRST_ERROR_STATUS = 400


@dataclass(slots=True)
class Origin:
    """An HTTP request whose generations are traced."""

    path: str
    parent: Mapping[str, str]  # the headers of PARENT_HEADERS that the request has
    request_id: str
    started_s: float  # time.perf_counter
    num_generations: int = 0  # number of generations that it has begun


# The HTTP request that is being answered.
origin: ContextVar[Origin | None] = ContextVar("origin", default=None)


class TraceStage(NamedTuple):
    """A part of a generation's time, by time.perf_counter."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class GenerationSummary:
    """How a generation went. `started_s`, `queued_s` and `ended_s` are times of time.perf_counter; all else is in
    seconds, and what happens after the first step is counted from the first step.
    """

    started_s: float  # the HTTP request was received
    queued_s: float  # the prompt was tokenized, and the request queued
    ended_s: float
    queue_s: float | None  # seconds in the queue; None: it never left the queue
    first_token_s: float | None  # None: there was no token
    last_token_s: float
    replays: tuple[tuple[float, float], ...]  # from each loss of the shards until the request was sent to shards again
    failure: str | None  # the `err` of tgi_request_failure; None: the generation is complete
    finish_reason: str | None
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    seed: int | None

    def stages(self) -> Iterator[TraceStage]:
        yield TraceStage("validate", self.started_s, self.queued_s)
        if self.queue_s is None:
            yield TraceStage("queue", self.queued_s, self.ended_s)
            return
        begun = self.queued_s + self.queue_s
        last = begun + self.last_token_s
        first = last if self.first_token_s is None else begun + self.first_token_s
        yield TraceStage("queue", self.queued_s, begun)
        yield TraceStage("prefill", begun, first)
        if first < last:
            yield TraceStage("decode", first, last)
        if self.failure is None:
            yield TraceStage("detokenize", last, self.ended_s)
        for start_s, end_s in self.replays:
            yield TraceStage("replay", begun + start_s, begun + end_s)


class GenerationTrace(Protocol):
    """The trace of a generation in progress."""

    def end(self, summary: GenerationSummary) -> None: ...


class Tracer(Protocol):
    def begin(self, request: GenerationRequest) -> GenerationTrace:
        """The trace of a generation that was queued while `origin` is answered."""
        ...

    def refused(self, refused: Origin, status: int) -> None:
        """Traces an HTTP request that was answered with an error before any generation began."""


def traced(app: ASGIApp, tracer: Tracer) -> ASGIApp:
    """The application. The origin of its generations is noted, and requests that are refused are traced."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            return await app(scope, receive, send)
        parent = {key.decode(): value.decode("latin-1") for key, value in scope["headers"] if key in PARENT_HEADERS}
        known = Origin(scope["path"], parent, request_id.get(), time.perf_counter())
        origin.set(known)

        async def send_noted(message: Message) -> None:
            is_error = message["type"] == "http.response.start" and message["status"] >= FIRST_ERROR_STATUS
            if is_error and not known.num_generations:
                tracer.refused(known, message["status"])
            await send(message)

        await app(scope, receive, send_noted)

    return answer


def attributes_of(known: Origin, model: str) -> dict[str, AttributeValue]:
    """Attributes of all spans without a stage. Attributes named `gen_ai…` are from OpenTelemetry's semantic
    conventions for generative AI."""
    return {
        "gen_ai.operation.name": operation_of(known.path),
        "gen_ai.provider.name": "tgi-py",
        "gen_ai.request.model": model,
        "url.path": known.path,
        "http.request.header.x-request-id": (known.request_id,),
    }


def operation_of(path: str) -> str:
    return "chat" if path.endswith("/chat/completions") else "text_completion"


def facts_of(summary: GenerationSummary, request: GenerationRequest, model: str) -> dict[str, AttributeValue]:
    """Attributes of the span of a generation: numbers only, no text of a prompt or an answer."""
    sampling = request.sampling
    found: dict[str, AttributeValue] = {
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": request.max_new_tokens,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.usage.input_tokens": summary.prompt_tokens,
        "gen_ai.usage.output_tokens": summary.generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": summary.cached_tokens,
    }
    if sampling.do_sample:
        found |= {"gen_ai.request.temperature": sampling.temperature, "gen_ai.request.top_p": sampling.top_p}
        found |= {"gen_ai.request.top_k": sampling.top_k} if sampling.top_k else {}
    if summary.seed is not None:
        found["gen_ai.request.seed"] = str(summary.seed)  # a number of 64 bits without sign, which OTLP's integers lack
    if summary.finish_reason is not None:
        found["gen_ai.response.finish_reasons"] = (summary.finish_reason,)
    if summary.failure is not None:
        found["error.type"] = summary.failure
    return found
