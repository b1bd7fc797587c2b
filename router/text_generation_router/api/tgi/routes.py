"""TGI's own routes: POST /generate, POST /generate_stream, and POST /, which is one of the two by its field
`stream`.
"""

import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from text_generation_router.api.common.answer import Answers
from text_generation_router.api.common.generation import Generation, close_all
from text_generation_router.api.common.services import Services
from text_generation_router.api.tgi.fields import COMPAT_GENERATE_BODY, GENERATE_BODY
from text_generation_router.api.tgi.schemas import CompatGenerateRequest, GenerateParameters, GenerateRequest
from text_generation_router.errors import (
    IncompleteGenerationError,
    IncompleteStreamError,
    InferenceError,
    ValidationError,
)
from text_generation_router.http.dialects import NATIVE
from text_generation_router.http.disconnect import unless_disconnected
from text_generation_router.http.encoding import rows_json, text_json, to_event, to_json
from text_generation_router.http.sse import DirectWriter
from text_generation_router.text.tokens.events import Finish, PromptRow, PromptRows, Token, TokenEvent
from text_generation_router.text.validation import Prompt

# Number of requests counted for one body, as in TGI: one, even if `best_of` is greater.
REQUESTS = 1


class GenerateRoutes:
    """TGI's routes have no AnswerDialect, because they take other steps: the time of a request begins once its body has
    been read, one refusal is not counted, and in a stream every refusal of a complete body is an event."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._inference = services.inference
        self._answers = Answers(services)

    async def generate(self, request: Request) -> Response:
        """Generate tokens; answers when the text is complete."""
        asked = await self._answers.read(request, GENERATE_BODY, REQUESTS)
        answer, best = await self._generate(request, asked, asked.parameters.return_full_text or False)
        return self._answers.complete(answer, [best])

    async def generate_stream(self, request: Request) -> Response:
        """Generate tokens; answers with one server-sent event for each. Errors are events as well."""
        try:
            asked = await self._answers.read(request, GENERATE_BODY, REQUESTS)
        except ValidationError as error:
            return self._answers.stream(_failed(error), characters=0)
        return self._stream(request, asked, asked.parameters.return_full_text or False)

    async def compat_generate(self, request: Request) -> Response:
        """/generate in a list of one, or /generate_stream if `stream` is true."""
        return await self.compat(request, await self._answers.read(request, COMPAT_GENERATE_BODY, REQUESTS))

    async def compat(self, request: Request, asked: CompatGenerateRequest) -> Response:
        full_text = asked.parameters.return_full_text
        # TGI's default for text-generation models, and for models without a task on the hub.
        full_text = True if full_text is None else full_text
        if asked.stream:
            return self._stream(request, asked, full_text)
        answer, best = await self._generate(request, asked, full_text)
        return self._answers.complete([answer], [best])

    async def _generate(
        self, request: Request, asked: GenerateRequest, full_text: bool
    ) -> tuple[dict[str, Any], Generation]:
        started_s = time.perf_counter()
        self._services.metrics.count_requests(REQUESTS)
        self._inference.validator.check_best_of(asked.parameters.best_of)
        with self._inference.counted_failures():
            caller = self._services.callers.caller_of(request)
            prompts = self._prompts(asked)
        results = await unless_disconnected(request.receive, self._inference.results(prompts, caller, started_s))
        # If several results have the highest mean, `max` takes the first, as TGI does.
        best = results[0] if len(results) == 1 else max(results, key=lambda result: result.mean_logprob)
        prefix = asked.inputs if full_text else ""
        answer: dict[str, Any] = {"generated_text": prefix + best.finish.generated_text}
        if asked.parameters.details or asked.parameters.decoder_input_details:
            others = [result for result in results if result is not best]
            answer["details"] = await details_json(best, others, prefix, await prefill_json(results[0].prompt))
        return answer, best

    def _prompts(self, asked: GenerateRequest) -> list[Prompt]:
        """A prompt for each sequence. All of them have the same tokens, so only the first one is to get their
        log-probabilities."""
        prompt = native_prompt(asked)
        others = [prompt] * (max(asked.parameters.best_of or 1, 1) - 1)
        if asked.parameters.decoder_input_details and self._services.config.requests.enable_prefill_logprobs:
            prompt = replace(prompt, parameters=replace(prompt.parameters, prompt_logprobs=0))
        return [prompt, *others]

    def _stream(self, request: Request, asked: GenerateRequest, full_text: bool) -> Response:
        writer = DirectWriter()
        events = self._events(request, asked, full_text, writer)
        return self._answers.stream(events, len(asked.inputs), writer=writer)

    async def _events(
        self, request: Request, asked: GenerateRequest, full_text: bool, writer: DirectWriter
    ) -> AsyncGenerator[bytes, None]:
        started_s = time.perf_counter()
        self._services.metrics.count_requests(REQUESTS)
        generations: list[Generation] = []
        try:
            with self._inference.counted_failures():
                check_streamable(asked.parameters)
                caller = self._services.callers.caller_of(request)
                prompt = native_prompt(asked)
            generations = await self._inference.start([prompt], caller, started_s)
            [generation] = generations
            encode = EventEncoder(asked, generation.prompt_tokens, full_text)
            generation.write_through(writer, encode)
            async for event in generation:
                yield encode(event)
        except IncompleteGenerationError:
            yield NATIVE.event(IncompleteStreamError())
        except InferenceError as error:
            yield NATIVE.event(error)
        finally:
            close_all(generations)


async def _failed(error: InferenceError) -> AsyncGenerator[bytes, None]:
    yield NATIVE.event(error)


def native_prompt(asked: GenerateRequest) -> Prompt:
    return Prompt(asked.inputs, asked.parameters.sampling_parameters())


def check_streamable(asked: GenerateParameters) -> None:
    if asked.best_of not in (None, 1):
        raise ValidationError.of("best_of", "!= 1 is not supported when streaming tokens")
    if asked.decoder_input_details:
        raise ValidationError.of("decoder_input_details", "== true is not supported when streaming tokens")


class EventEncoder:
    """Encodes the events of one stream."""

    def __init__(self, asked: GenerateRequest, prompt_tokens: int, full_text: bool) -> None:
        self._asked = asked
        self._prompt_tokens = prompt_tokens
        self._full_text = full_text
        self._index = 0

    def __call__(self, event: TokenEvent) -> bytes:
        self._index += 1
        token, _, top_tokens, finish, _ = event
        if token is None or top_tokens or finish is not None:
            return to_event(event_json(self._index, event, self._asked, self._prompt_tokens, self._full_text))
        special = b"true" if token.special else b"false"
        logprob = to_json(np.float32(token.logprob))
        return PLAIN_EVENT % (self._index, token.id, text_json(token.text), logprob, special)


# Writes the same bytes as `event_json` for a token without top tokens or an end, as nearly all tokens are, in a third
# of the time.
PLAIN_EVENT = (
    b'data: {"index":%d,"token":{"id":%d,"text":%b,"logprob":%b,"special":%b},"generated_text":null,"details":null}\n\n'
)


def event_json(
    index: int, event: TokenEvent, asked: GenerateRequest, prompt_tokens: int, full_text: bool
) -> dict[str, Any]:
    """The JSON of one event."""
    value: dict[str, Any] = {"index": index, "token": token_json(event.token or deadline_token(event.text))}
    if event.top_tokens:
        value["top_tokens"] = [token_json(token) for token in event.top_tokens]
    finish = event.finish
    if finish is None:
        value["generated_text"] = value["details"] = None
        return value
    value["generated_text"] = asked.inputs + finish.generated_text if full_text else finish.generated_text
    value["details"] = finish_json(finish) | {"input_length": prompt_tokens} if asked.parameters.details else None
    return value


def token_json(token: Token) -> dict[str, Any]:
    return {"id": token.id, "text": token.text, "logprob": np.float32(token.logprob), "special": token.special}


def deadline_token(text: str) -> Token:
    """A placeholder for events without a token: clients demand a token in every event, and do not show special
    tokens."""
    return Token(id=0, text=text, logprob=0.0, special=not text)


def finish_json(finish: Finish) -> dict[str, Any]:
    found = {
        "finish_reason": finish.reason.value,
        "generated_tokens": finish.generated_tokens,
        "seed": finish.seed,
        "cached_tokens": finish.cached_tokens,
    }
    return found | ({"adapter_id": finish.adapter} if finish.adapter else {})


async def prefill_json(prompt: PromptRows | None) -> orjson.Fragment:
    """The prompt's tokens, as TGI lists them; an empty list without `--enable-prefill-logprobs`."""
    if prompt is None:
        return orjson.Fragment(b"[]")

    def row_json(row: PromptRow) -> dict[str, Any]:
        token = row[0]
        return {"id": token.id, "text": prompt.text_alone(row), "logprob": np.float32(token.logprob)}

    return await rows_json(prompt, row_json)


async def details_json(
    best: Generation, others: list[Generation], prefix: str, prefill: orjson.Fragment
) -> dict[str, Any]:
    """The JSON of `details`. `prefill`: the list of the prompt's tokens."""
    details = finish_json(best.finish) | {"prefill": prefill, "tokens": await rows_json(best.tokens, token_json)}
    if others:
        details["best_of_sequences"] = [
            {"generated_text": prefix + other.finish.generated_text}
            | finish_json(other.finish)
            | {"prefill": prefill, "tokens": await rows_json(other.tokens, token_json)}
            | await top_tokens_json(other)
            for other in others
        ]
    return details | await top_tokens_json(best)


async def top_tokens_json(result: Generation) -> dict[str, Any]:
    if not any(result.top_tokens):
        return {}
    return {"top_tokens": await rows_json(result.top_tokens, lambda row: [token_json(token) for token in row])}
