"""The client for asyncio programs. Its methods' names, and the names, order and defaults of their parameters, are
TGI's; each method passes its arguments on by name.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from text_generation.address import checked_url, shown_url
from text_generation.errors import TextGenerationError
from text_generation.mapping import OnError, checked_items, map_ordered, method_for
from text_generation.progress import progress_of
from text_generation.requests import (
    Messages,
    Tools,
    arguments_of,
    chat_request,
    completion_request,
    generate_request,
)
from text_generation.retries import Retries
from text_generation.session import Session
from text_generation.streams import AsyncStream
from text_generation.timeouts import Timeout
from text_generation.types import (
    ChatComplete,
    ChatCompletionChunk,
    Completion,
    Grammar,
    Response,
    StreamResponse,
)

if TYPE_CHECKING:
    import httpx


class AsyncClient:
    """A client of one server, for asyncio programs. It keeps connections open: use it as a context manager, or call
    `aclose()` in the end. Calls are awaited, and `chat` and `completion` with `stream=True` are awaited before their
    chunks are iterated over.

    `timeout` is a `Timeout`, or a number of seconds for the whole of a call. `retries` is a `Retries`, or how often a
    call is made again if the server is busy or not there. `transport` is httpx's, for tests. Every method raises
    subclasses of `text_generation.errors.TextGenerationError`.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        cookies: Mapping[str, str] | None = None,
        timeout: float | Timeout = Timeout(),  # noqa: B008  frozen, so calls may share it
        *,
        retries: int | Retries = Retries(),  # noqa: B008
        transport: "httpx.AsyncBaseTransport | None" = None,
    ) -> None:
        from text_generation.connection import Connection  # httpx is slow to load, and not needed by a mere import

        limits = Timeout.of(timeout)
        connection = Connection(headers, cookies, limits, transport)
        self._session = Session(checked_url(base_url), connection, limits, Retries.of(retries))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown_url(self.base_url)!r})"

    @property
    def base_url(self) -> str:
        return self._session.base_url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._session.aclose()

    async def generate(
        self, prompt: str, do_sample: bool = False, max_new_tokens: int = 20, best_of: int | None = None,
        repetition_penalty: float | None = None, frequency_penalty: float | None = None,
        return_full_text: bool = False, seed: int | None = None, stop_sequences: list[str] | None = None,
        temperature: float | None = None, top_k: int | None = None, top_p: float | None = None,
        truncate: int | None = None, typical_p: float | None = None, watermark: bool = False,
        decoder_input_details: bool = False, top_n_tokens: int | None = None, grammar: Grammar | None = None, *,
        min_p: float | None = None, presence_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None, stop_token_ids: list[int] | None = None,
        min_new_tokens: int | None = None, bad_words: list[str] | None = None,
        allowed_token_ids: list[int] | None = None, ignore_eos_token: bool | None = None, priority: int | None = None,
        timeout: float | None = None, cache_salt: str | None = None, adapter_id: str | None = None,
    ) -> Response:  # fmt: skip
        """The whole answer to a prompt, with details. TGI does not have the parameters after `grammar`; they are sent
        only if given. `timeout`: seconds that the server may take, after which it answers with the text that it has.
        """
        return await self._session.generate(generate_request(arguments_of(locals()), stream=False))

    def generate_stream(
        self, prompt: str, do_sample: bool = False, max_new_tokens: int = 20, repetition_penalty: float | None = None,
        frequency_penalty: float | None = None, return_full_text: bool = False, seed: int | None = None,
        stop_sequences: list[str] | None = None, temperature: float | None = None, top_k: int | None = None,
        top_p: float | None = None, truncate: int | None = None, typical_p: float | None = None,
        watermark: bool = False, top_n_tokens: int | None = None, grammar: Grammar | None = None, *,
        min_p: float | None = None, presence_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None, stop_token_ids: list[int] | None = None,
        min_new_tokens: int | None = None, bad_words: list[str] | None = None,
        allowed_token_ids: list[int] | None = None, ignore_eos_token: bool | None = None, priority: int | None = None,
        timeout: float | None = None, cache_salt: str | None = None, adapter_id: str | None = None,
    ) -> AsyncStream[StreamResponse, Response]:  # fmt: skip
        """The answer token by token; the last carries the whole text and the details. Parameters: see `generate`."""
        return self._session.generate_stream(generate_request(arguments_of(locals()), stream=True))

    @overload
    async def chat(
        self, messages: Messages, *, stream: Literal[False] = False, repetition_penalty: float | None = None,
        frequency_penalty: float | None = None, logit_bias: list[float] | Mapping[int, float] | None = None,
        logprobs: bool | None = None, top_logprobs: int | None = None, max_tokens: int | None = None,
        n: int | None = None, presence_penalty: float | None = None, seed: int | None = None,
        temperature: float | None = None, top_p: float | None = None, tools: Tools | None = None,
        tool_prompt: str | None = None, tool_choice: str | None = None, stop: list[str] | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> ChatComplete: ...  # fmt: skip
    @overload
    async def chat(
        self, messages: Messages, *, stream: Literal[True], repetition_penalty: float | None = None,
        frequency_penalty: float | None = None, logit_bias: list[float] | Mapping[int, float] | None = None,
        logprobs: bool | None = None, top_logprobs: int | None = None, max_tokens: int | None = None,
        n: int | None = None, presence_penalty: float | None = None, seed: int | None = None,
        temperature: float | None = None, top_p: float | None = None, tools: Tools | None = None,
        tool_prompt: str | None = None, tool_choice: str | None = None, stop: list[str] | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> AsyncStream[ChatCompletionChunk, ChatComplete]: ...  # fmt: skip
    async def chat(
        self, messages: Messages, repetition_penalty: float | None = None, frequency_penalty: float | None = None,
        logit_bias: list[float] | Mapping[int, float] | None = None, logprobs: bool | None = None,
        top_logprobs: int | None = None, max_tokens: int | None = None, n: int | None = None,
        presence_penalty: float | None = None, stream: bool = False, seed: int | None = None,
        temperature: float | None = None, top_p: float | None = None, tools: Tools | None = None,
        tool_prompt: str | None = None, tool_choice: str | None = None, stop: list[str] | None = None, *,
        extra_body: Mapping[str, Any] | None = None,
    ) -> ChatComplete | AsyncStream[ChatCompletionChunk, ChatComplete]:  # fmt: skip
        """The answer to a conversation, or with `stream=True` its chunks. `extra_body`: further fields of the request,
        sent as given.
        """
        request = chat_request(arguments_of(locals()))
        return self._session.chat_stream(request) if stream else await self._session.chat(request)

    @overload
    async def completion(
        self, prompt: str, *, stream: Literal[False] = False, frequency_penalty: float | None = None,
        max_tokens: int | None = None, repetition_penalty: float | None = None, seed: int | None = None,
        temperature: float | None = None, top_p: float | None = None, stop: list[str] | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> Completion: ...  # fmt: skip
    @overload
    async def completion(
        self, prompt: str, *, stream: Literal[True], frequency_penalty: float | None = None,
        max_tokens: int | None = None, repetition_penalty: float | None = None, seed: int | None = None,
        temperature: float | None = None, top_p: float | None = None, stop: list[str] | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> AsyncStream[Completion, Completion]: ...  # fmt: skip
    async def completion(
        self, prompt: str, frequency_penalty: float | None = None, max_tokens: int | None = None,
        repetition_penalty: float | None = None, seed: int | None = None, stream: bool = False,
        temperature: float | None = None, top_p: float | None = None, stop: list[str] | None = None, *,
        extra_body: Mapping[str, Any] | None = None,
    ) -> Completion | AsyncStream[Completion, Completion]:  # fmt: skip
        """The continuation of a prompt by the OpenAI route, or with `stream=True` its chunks. `extra_body`: further
        fields of the request, sent as given.
        """
        request = completion_request(arguments_of(locals()))
        return self._session.completion_stream(request) if stream else await self._session.completion(request)

    @overload
    async def map(
        self, prompts: Iterable[str], concurrency: int = 8, *, errors: Literal["raise"] = "raise",
        progress: bool | None = None, **options: Any,
    ) -> list[Response]: ...  # fmt: skip
    @overload
    async def map(
        self, prompts: Iterable[str], concurrency: int = 8, *, errors: Literal["return"],
        progress: bool | None = None, **options: Any,
    ) -> list[Response | TextGenerationError]: ...  # fmt: skip
    @overload
    async def map(
        self, prompts: Iterable[Messages], concurrency: int = 8, *, errors: Literal["raise"] = "raise",
        progress: bool | None = None, **options: Any,
    ) -> list[ChatComplete]: ...  # fmt: skip
    @overload
    async def map(
        self, prompts: Iterable[Messages], concurrency: int = 8, *, errors: Literal["return"],
        progress: bool | None = None, **options: Any,
    ) -> list[ChatComplete | TextGenerationError]: ...  # fmt: skip
    async def map(
        self, prompts: Iterable[str] | Iterable[Messages], concurrency: int = 8, *, errors: OnError = "raise",
        progress: bool | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """The answers to many prompts, in their order; a prompt that is a list of messages is a chat. `concurrency`:
        calls at a time. `errors`: "raise" cancels the rest at the first error, "return" puts an error in its answer's
        place. `progress`: draws a line on stderr; None: if stderr is a terminal. `options`: parameters of `generate`,
        or of `chat`.
        """
        items: list[Any] = checked_items(prompts, concurrency, errors, options, self)
        call = partial(method_for(items, self), **options)
        return await map_ordered(call, items, concurrency, errors, progress_of(len(items), progress))
