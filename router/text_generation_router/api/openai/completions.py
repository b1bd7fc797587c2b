"""POST /v1/completions."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from text_generation_router.api.common.generation import Generation, Row, close_all
from text_generation_router.api.common.services import Services
from text_generation_router.api.openai import request as v1_request
from text_generation_router.api.openai.answers import (
    ChunkWriter,
    Made,
    TextSizes,
    all_completion_logprobs,
    chunk_json,
    completion_logprobs,
    merged,
    offsets_in,
    prompt_logprobs_json,
    row_of,
    rows_of,
    rows_of_prompt,
    text_of_prompt,
    until_done,
    usage_json,
)
from text_generation_router.api.openai.fields import COMPLETION_BODY
from text_generation_router.api.openai.schemas import CompletionRequest
from text_generation_router.errors import ValidationError
from text_generation_router.http.caller import Caller
from text_generation_router.http.sse import DirectWriter
from text_generation_router.text.tokens.events import PromptRows, TokenEvent
from text_generation_router.text.validation import Prompt

KIND = "text_completion"
NAMES = v1_request.NAMES | {"inputs": "prompt", "top_n_tokens": "logprobs"}


class CompletionRoutes:
    """The route of completions, which also provides the steps that differ between routes (see `AnswerDialect`)."""

    body_kind = COMPLETION_BODY
    refused_requests = 2  # requests to count for a refused body: the same number as for one prompt

    def __init__(self, services: Services) -> None:
        self._services = services
        self._style = services.style

    def num_requests(self, asked: CompletionRequest) -> int:
        return 1 + len(asked.prompt) * asked.choices

    async def prompts(self, asked: CompletionRequest, _: Caller) -> Sequence[Prompt]:
        v1_request.check_request(asked, self._services)
        if asked.echo and asked.truncate_prompt_tokens is not None:
            why = "must not be true with `truncate_prompt_tokens`: a cut prompt is not repeated"
            raise ValidationError.of("echo", why)
        echoed = asked.logprobs if asked.echo else None
        parameters = v1_request.parameters_of(asked, self._services, asked.max_tokens, asked.logprobs, echoed)
        parameters = replace(parameters, takes_no_tokens=bool(asked.echo))
        special = asked.add_special_tokens is not False
        return [
            _prompt(
                given,
                Prompt(
                    inputs="",
                    parameters=parameters,
                    add_special_tokens=special,
                    ids=None,
                    copies=asked.choices,
                    names=NAMES,
                ),
            )
            for given in asked.prompt
        ]

    def events(
        self, asked: CompletionRequest, generations: Sequence[Generation], writer: DirectWriter
    ) -> AsyncGenerator[bytes, None]:
        dialect = self._services.dialects.of("/v1/completions")
        return until_done(self._chunks(asked, generations, writer), dialect)

    async def answer(self, asked: CompletionRequest, results: Sequence[Generation]) -> dict[str, Any]:
        return self._head() | {
            "choices": [await self._choice(index, result, asked) for index, result in enumerate(results)],
            "usage": usage_json(results, asked.choices),
        }

    def _head(self) -> dict[str, Any]:
        services = self._services
        return chunk_json(KIND, self._style.identity("cmpl"), services.served_name, services.system_fingerprint)

    async def _choice(self, index: int, result: Generation, asked: CompletionRequest) -> dict[str, Any]:
        prompt, rows = await self._echo(index, asked), rows_of(result, asked.logprobs, self._style)
        choice = {
            "index": index,
            "text": prompt + result.finish.generated_text,
            "logprobs": None if asked.logprobs is None else await self._rows_json(asked, prompt, result.prompt, rows),
            "finish_reason": self._style.reasons[result.finish.reason],
        }
        if asked.prompt_logprobs is not None:
            choice["prompt_logprobs"] = await prompt_logprobs_json(result, asked.prompt_logprobs)
        if asked.return_token_ids:
            choice["prompt_token_ids"] = result.input_ids
            choice["token_ids"] = [token.id for token in result.tokens]
        return choice

    async def _echo(self, index: int, asked: CompletionRequest) -> str:
        """The text that `echo` puts before the text of a choice: the prompt, or nothing."""
        if not asked.echo:
            return ""
        given, skip = asked.prompt[index // asked.choices], asked.skip_special_tokens is not False
        return await text_of_prompt(given, self._services.tokenizer.tokenizer, skip)

    async def _chunks(
        self, asked: CompletionRequest, generations: Sequence[Generation], writer: DirectWriter
    ) -> AsyncGenerator[bytes, None]:
        write = ChunkWriter(self._head(), asked, self._style)
        sizes = self._sizes(asked, is_stream=True)
        encoders = [CompletionEncoder(i, generation, asked, write, sizes) for i, generation in enumerate(generations)]
        if len(generations) == 1:  # `merged` orders the events of several texts
            generations[0].write_through(writer, encoders[0])
        try:
            async for index, event in merged(generations):
                if asked.echo and not encoders[index].has_begun:
                    prompt = await self._echo(index, asked)
                    has_rows = asked.logprobs is not None
                    rows = await self._rows_json(asked, prompt, generations[index].prompt, []) if has_rows else None
                    yield encoders[index].echo(prompt, rows)
                yield encoders[index](event)
            if asked.include_usage:
                yield write.usage(generations)
        finally:
            close_all(generations)

    def _sizes(self, asked: CompletionRequest, is_stream: bool = False) -> TextSizes:
        """The sizes of tokens in a text. In TGI's streams special tokens are part of the text."""
        has_special = asked.skip_special_tokens is False or (is_stream and self._style.is_tgis)
        return TextSizes(self._services.inference.vocabulary, has_special)

    async def _rows_json(
        self, asked: CompletionRequest, prompt: str, prompt_rows: PromptRows | None, rows: Sequence[Row]
    ) -> dict[str, Any]:
        """The log-probabilities of an answer. `prompt`: the text before the answer. `rows`: the answer's tokens."""
        sizes = self._sizes(asked)
        offsets = sizes.offsets(rows, len(prompt))
        if not asked.echo or prompt_rows is None:
            return await all_completion_logprobs(rows, offsets)
        before = await rows_of_prompt(prompt_rows, asked.logprobs or 0)
        return await all_completion_logprobs([*before, *rows], [*offsets_in(prompt, before, sizes), *offsets])


def _prompt(given: str | tuple[int, ...], prompt: Prompt) -> Prompt:
    return replace(prompt, inputs=given) if isinstance(given, str) else replace(prompt, ids=given)


@dataclass(eq=False)
class CompletionEncoder:
    """Encodes the events of one text of a stream."""

    index: int
    generation: Generation
    asked: CompletionRequest
    write: ChunkWriter
    sizes: TextSizes
    has_begun: bool = False
    _offset: int = 0  # text offset of the next token

    def __post_init__(self) -> None:
        self._made = Made(self.generation)

    def echo(self, prompt: str, logprobs: dict[str, Any] | None) -> bytes:
        """The first event of a stream with `echo`: the prompt, and the log-probabilities of its tokens."""
        self.has_begun = True
        self._offset = len(prompt)
        choice = {"index": self.index, "text": prompt, "logprobs": logprobs, "finish_reason": None}
        return self.write.chunk(choice, self._made)

    def __call__(self, event: TokenEvent) -> bytes:
        asked, token, style = self.asked, event.token, self.write.style
        # In TGI's streams special tokens are part of the text.
        text = token.text if style.is_tgis and token is not None else event.text
        row = None
        if asked.logprobs is not None and token is not None:
            row = row_of(token, event.top_tokens, asked.logprobs, style)
        choice: dict[str, Any] = {
            "index": self.index,
            "text": text,
            "logprobs": None if row is None else completion_logprobs(row, self._offset),
            "finish_reason": self._reason(event),
        }
        if asked.return_token_ids:
            choice["token_ids"] = [] if token is None else [token.id]
            if not self._made.tokens:
                choice["prompt_token_ids"] = self.generation.input_ids
        self._offset += 0 if token is None else self.sizes.of(token)
        self._made.add(event)
        if style.is_tgis:
            return self.write.tgi_completion(choice, self.generation if event.finish is not None else None)
        return self.write.chunk(choice, self._made)

    def _reason(self, event: TokenEvent) -> str | None:
        """The finish reason. In streams of completions TGI uses the names of its own routes."""
        if self.write.style.is_tgis:
            return "" if event.finish is None else event.finish.reason.value
        return None if event.finish is None else self.write.style.reasons[event.finish.reason]
