"""POST /v1/completions."""

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from fastapi import Request, Response

from text_generation_router.api.answer import Answers
from text_generation_router.api.asking import COMPLETION
from text_generation_router.api.generation import Generation, Result, close_all
from text_generation_router.api.openai import (
    all_completion_logprobs,
    chunk_json,
    completion_logprobs,
    finish_reason,
    merged,
    start_of_choices,
    until_done,
    usage_json,
)
from text_generation_router.api.schemas import CompletionRequest
from text_generation_router.api.services import Services
from text_generation_router.http.direct import DirectWriter
from text_generation_router.http.encoding import to_event, to_event_with
from text_generation_router.scheduling.share import Share
from text_generation_router.text.events import TokenEvent
from text_generation_router.text.validation import Prompt

KIND = "text_completion"


class CompletionRoutes:
    """The route of completions, which also provides the steps that differ between routes (see `AnswerDialect`)."""

    question = COMPLETION
    refused_requests = 2  # requests to count for a refused body: the same number as for one prompt

    def __init__(self, services: Services) -> None:
        self._services = services
        self._answers = Answers(services)

    async def completions(self, request: Request) -> Response:
        """Continue one or several prompts, at once or as a stream."""
        return await self._answers.answer(request, self)

    def num_requests(self, asked: CompletionRequest) -> int:
        return 1 + len(asked.prompt)

    async def prompts(self, asked: CompletionRequest, _: Share) -> Sequence[Prompt]:
        parameters = asked.sampling_parameters(asked.max_tokens, asked.logprobs)
        return [Prompt(text, parameters) for text in asked.prompt]

    def events(
        self, asked: CompletionRequest, generations: Sequence[Generation], writer: DirectWriter
    ) -> AsyncGenerator[bytes, None]:
        return until_done(self._chunks(asked, generations, writer))

    async def answer(self, asked: CompletionRequest, results: Sequence[Result]) -> dict[str, Any]:
        return self._head() | {
            "choices": [await _choice(index, result, asked) for index, result in enumerate(results)],
            "usage": usage_json([result.timing for result in results]),
        }

    def _head(self) -> dict[str, Any]:
        return chunk_json(KIND, self._services.config.tokenizer_name, self._services.system_fingerprint)

    async def _chunks(
        self, asked: CompletionRequest, generations: Sequence[Generation], writer: DirectWriter
    ) -> AsyncGenerator[bytes, None]:
        head = self._head()
        start = start_of_choices(head)
        offsets = [0] * len(generations)

        def encode(index: int, event: TokenEvent) -> bytes:
            choice = _chunk_choice(index, event, asked, offsets[index])
            offsets[index] += len(choice["text"])
            timing = generations[index].timing
            if event.finish is None or timing is None:
                return to_event_with(start, choice, b"]}")
            # TGI sends each prompt's usage in its last chunk. OpenAI's `include_usage` asks for one final sum.
            usage = None if asked.include_usage else usage_json([timing])
            return to_event(head | {"choices": [choice], "usage": usage})

        if len(generations) == 1:  # the events of several prompts are put in order by `merged`
            generations[0].write_through(writer, partial(encode, 0))
        try:
            async for index, event in merged(generations):
                yield encode(index, event)
            if asked.include_usage:
                timings = [generation.timing for generation in generations if generation.timing is not None]
                yield to_event(head | {"choices": [], "usage": usage_json(timings)})
        finally:
            close_all(generations)


async def _choice(index: int, result: Result, asked: CompletionRequest) -> dict[str, Any]:
    return {
        "index": index,
        "text": result.finish.generated_text,
        "logprobs": None if asked.logprobs is None else await all_completion_logprobs(result.rows),
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
