"""From a request to its answer, the same steps for every dialect of JSON.

The steps: read the body, count the requests, find the caller, make the prompts, generate, write the answer. A dialect
has its own body, prompts, events and answer, and nothing else.
"""

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from text_generation_router.api.common.body_kinds import B, RequestBody
from text_generation_router.api.common.fields import AnsweredRequest
from text_generation_router.api.common.generation import Generation, close_all
from text_generation_router.api.common.services import Services
from text_generation_router.http.caller import Caller
from text_generation_router.http.disconnect import end_at_half_close, unless_disconnected
from text_generation_router.http.encoding import json_response
from text_generation_router.http.sse import DirectWriter, EventStream
from text_generation_router.text.validation import Prompt

# The headers that successful answers carry.


def stream_headers(compute_type: str, characters: int) -> dict[str, str]:
    return {
        "x-compute-type": compute_type,
        "x-compute-characters": str(characters),
        "x-accel-buffering": "no",  # without this header nginx buffers events
    }


def timing_headers(compute_type: str, results: Sequence[Generation]) -> dict[str, str]:
    """Headers with the sums of times over all prompts of the request. Times are in milliseconds, except x-compute-time
    in seconds.
    """
    return {
        "x-compute-type": compute_type,
        "x-compute-time": str(sum(result.total_s for result in results)),
        "x-compute-characters": str(sum(result.prompt_characters for result in results)),
        "x-total-time": _milliseconds(result.total_s for result in results),
        "x-validation-time": _milliseconds(result.validation_s for result in results),
        "x-queue-time": _milliseconds(result.finish.queue_s for result in results),
        "x-inference-time": _milliseconds(result.finish.inference_s for result in results),
        "x-time-per-token": _milliseconds(result.finish.mean_token_s for result in results),
        "x-prompt-tokens": str(sum(result.prompt_tokens for result in results)),
        "x-generated-tokens": str(sum(result.finish.generated_tokens for result in results)),
    }


def _milliseconds(seconds: Iterable[float]) -> str:
    return str(sum(int(value * 1000) for value in seconds))


A = TypeVar("A", bound=AnsweredRequest)


class AnswerDialect(Protocol[A]):
    """The steps from a request to its answer that differ between the generating routes."""

    body_kind: RequestBody[A]
    refused_requests: int  # number of requests to count when a field of the body is refused

    def num_requests(self, asked: A) -> int:
        """Number of requests to count, by TGI's rules."""

    async def prompts(self, asked: A, caller: Caller) -> Sequence[Prompt]:
        """The prompts to generate texts from. Raises InferenceError, which is counted as a failure. Cancelled if the
        client disconnects.
        """

    def events(self, asked: A, generations: Sequence[Generation], writer: DirectWriter) -> AsyncGenerator[bytes, None]:
        """All events of the stream except those that `writer` has written. An error of a generation becomes an
        event."""

    async def answer(self, asked: A, results: Sequence[Generation]) -> dict[str, Any]: ...


class Answers:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._inference = services.inference

    async def answer(self, request: Request, dialect: AnswerDialect[A]) -> Response:
        """Answers a request, at once or as a stream. If the client disconnects before the answer begins, its prompts
        leave the queue in which they wait: to be rendered, to be tokenized, or to be computed.
        """
        started_s = time.perf_counter()
        asked = await self.read(request, dialect.body_kind, dialect.refused_requests)
        return await self.answer_read(request, dialect, asked, started_s)

    async def answer_read(self, request: Request, dialect: AnswerDialect[A], asked: A, started_s: float) -> Response:
        """As `answer`, for a body that has already been read."""
        services = self._services
        with self._inference.counted_refusals(dialect.refused_requests):
            services.ignored.note_model(request, asked.model, (services.served_name, services.config.tokenizer_name))
        self._services.metrics.count_requests(dialect.num_requests(asked))
        with self._inference.counted_failures():
            caller = services.caller_of(request)
        way = self._streamed if asked.stream else self._complete
        return await unless_disconnected(request.receive, way(dialect, asked, caller, started_s))

    async def read(self, request: Request, kind: RequestBody[B], refused_requests: int) -> B:
        """Reads the body. Raises BodyError or ValidationError, as `Bodies.read` does."""
        end_at_half_close(request.scope)
        with self._inference.counted_refusals(refused_requests):
            return await self._services.bodies.read(request, kind)

    def complete(self, answer: Any, results: Sequence[Generation]) -> Response:
        """A response with `answer` as JSON. Its headers contain the times of `results`."""
        return json_response(answer, timing_headers(self._services.config.compute_type, results))

    def stream(
        self,
        events: AsyncGenerator[bytes, None],
        characters: int,
        close: Callable[[], None] = lambda: None,
        writer: DirectWriter | None = None,
    ) -> Response:
        """Answers with a stream. `characters`: number of characters of all prompts. `close` is always called at the
        end, as by EventStream. `writer`: writes the events that `events` does not yield.
        """
        return EventStream(events, stream_headers(self._services.config.compute_type, characters), close, writer)

    async def _streamed(self, dialect: AnswerDialect[A], asked: A, caller: Caller, started_s: float) -> Response:
        prompts = await self._prompts(dialect, asked, caller)
        generations = await self._inference.start(prompts, caller, started_s)
        characters = sum(len(prompt.inputs) for prompt in prompts)
        writer = DirectWriter()
        events = dialect.events(asked, generations, writer)
        return self.stream(events, characters, partial(close_all, generations), writer)

    async def _complete(self, dialect: AnswerDialect[A], asked: A, caller: Caller, started_s: float) -> Response:
        prompts = await self._prompts(dialect, asked, caller)
        results = await self._inference.results(prompts, caller, started_s)
        return self.complete(await dialect.answer(asked, results), results)

    async def _prompts(self, dialect: AnswerDialect[A], asked: A, caller: Caller) -> Sequence[Prompt]:
        with self._inference.counted_failures():
            return await dialect.prompts(asked, caller)
