"""POST /v1/completions."""

import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import Request, Response

from text_generation_router.api.asking import COMPLETION
from text_generation_router.api.generation import Generation, Result, close_all
from text_generation_router.api.headers import stream_headers, timing_headers
from text_generation_router.api.openai import (
    all_completion_logprobs,
    chunk_json,
    completion_logprobs,
    finish_reason,
    guarded,
    merged,
    usage_json,
)
from text_generation_router.api.schemas import CompletionRequest
from text_generation_router.api.services import Services
from text_generation_router.http.disconnect import unless_disconnected
from text_generation_router.http.encoding import json_response
from text_generation_router.http.sse import EventStream
from text_generation_router.scheduling.request import TokenEvent
from text_generation_router.text.validation import Prompt

KIND = "text_completion"


class CompletionRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._inference = services.inference

    async def completions(self, request: Request) -> Response:
        """Continue one or several prompts, at once or as a stream."""
        started = time.perf_counter()
        with self._inference.counted_refusals(2):
            asked = await self._services.bodies.read(request, COMPLETION)
        self._services.metrics.request_count.inc(1 + len(asked.prompt))
        with self._inference.counted_failures():
            caller = self._services.callers.caller_of(request)
        parameters = asked.sampling_parameters(asked.max_tokens, asked.logprobs)
        prompts = [Prompt(text, parameters) for text in asked.prompt]
        if asked.stream:
            generations = await unless_disconnected(request.receive, self._inference.start(prompts, caller, started))
            headers = stream_headers(self._services.config.compute_type, sum(map(len, asked.prompt)))
            events = guarded(self._chunks(asked, generations))
            return EventStream(events, headers, close=partial(close_all, generations))
        results = await unless_disconnected(request.receive, self._inference.results(prompts, caller, started))
        timings = [result.timing for result in results]
        answer = self._head() | {
            "choices": [await _choice(index, result, asked) for index, result in enumerate(results)],
            "usage": usage_json(timings),
        }
        return json_response(answer, timing_headers(self._services.config.compute_type, timings))

    def _head(self) -> dict[str, Any]:
        return chunk_json(KIND, self._services.config.tokenizer_name, self._services.system_fingerprint)

    async def _chunks(
        self, asked: CompletionRequest, generations: list[Generation]
    ) -> AsyncGenerator[dict[str, Any], None]:
        head = self._head()
        offsets = [0] * len(generations)
        try:
            async for index, event in merged(generations):
                choice = _chunk_choice(index, event, asked, offsets[index])
                offsets[index] += len(choice["text"])
                timing = generations[index].timing
                if event.finish is None or timing is None:
                    yield head | {"choices": [choice]}
                else:
                    # TGI sends each prompt's usage in its last chunk. OpenAI's `include_usage` asks for one final sum.
                    yield head | {
                        "choices": [choice],
                        "usage": None if asked.include_usage else usage_json([timing]),
                    }
            if asked.include_usage:
                timings = [one.timing for one in generations if one.timing is not None]
                yield head | {"choices": [], "usage": usage_json(timings)}
        finally:
            close_all(generations)


async def _choice(index: int, result: Result, asked: CompletionRequest) -> dict[str, Any]:
    rows = tuple(zip(result.tokens, result.top_tokens, strict=True))
    return {
        "index": index,
        "text": result.finish.generated_text,
        "logprobs": None if asked.logprobs is None else await all_completion_logprobs(rows),
        "finish_reason": finish_reason(result.finish.reason),
    }


def _chunk_choice(index: int, event: TokenEvent, asked: CompletionRequest, offset: int) -> dict[str, Any]:
    token = event.token
    return {
        "index": index,
        "text": event.text if token is None else token.text,
        "logprobs": None
        if asked.logprobs is None or token is None
        else completion_logprobs((token, event.top_tokens), offset),
        "finish_reason": "" if event.finish is None else finish_reason(event.finish.reason),
    }
