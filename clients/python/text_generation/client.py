"""The client for ordinary, synchronous programs: the asynchronous one, driven from a thread."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from text_generation.address import shown_url
from text_generation.async_client import AsyncClient
from text_generation.errors import TextGenerationError
from text_generation.loop_thread import LoopThread
from text_generation.mapping import OnError, checked_items
from text_generation.requests import Messages, Tools, arguments_of
from text_generation.retries import Retries
from text_generation.streams import Stream
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


class Client:
    """A client of one server, for synchronous code; threads may share it. Use it as a context manager, or call
    `close()` in the end.

    Calls run `AsyncClient` in an event loop, because only there can a limit on the next *token* be kept: a socket's own
    timeout starts again with every keep-alive comment of the server. The arguments are those of `AsyncClient`.
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
        self._async = AsyncClient(base_url, headers, cookies, timeout, retries=retries, transport=transport)
        self._loop = LoopThread(self, self._async.aclose)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown_url(self.base_url)!r})"

    @property
    def base_url(self) -> str:
        return self._async.base_url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._loop.close()

    def generate(
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
        return self._loop.run(self._async.generate(**arguments_of(locals())))

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
    ) -> Stream[StreamResponse, Response]:  # fmt: skip
        """The answer token by token; the last carries the whole text and the details. Parameters: see `generate`."""
        return Stream(self._async.generate_stream(**arguments_of(locals())), self._loop, self)

    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[False] = False, repetition_penalty: float | None = None,
        frequency_penalty: float | None = None, logit_bias: list[float] | Mapping[int, float] | None = None,
        logprobs: bool | None = None, top_logprobs: int | None = None, max_tokens: int | None = None,
        n: int | None = None, presence_penalty: float | None = None, seed: int | None = None,
        temperature: float | None = None, top_p: float | None = None, tools: Tools | None = None,
        tool_prompt: str | None = None, tool_choice: str | None = None, stop: list[str] | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> ChatComplete: ...  # fmt: skip
    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[True], repetition_penalty: float | None = None,
        frequency_penalty: float | None = None, logit_bias: list[float] | Mapping[int, float] | None = None,
        logprobs: bool | None = None, top_logprobs: int | None = None, max_tokens: int | None = None,
        n: int | None = None, presence_penalty: float | None = None, seed: int | None = None,
        temperature: float | None = None, top_p: float | None = None, tools: Tools | None = None,
        tool_prompt: str | None = None, tool_choice: str | None = None, stop: list[str] | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> Stream[ChatCompletionChunk, ChatComplete]: ...  # fmt: skip
    def chat(
        self, messages: Messages, repetition_penalty: float | None = None, frequency_penalty: float | None = None,
        logit_bias: list[float] | Mapping[int, float] | None = None, logprobs: bool | None = None,
        top_logprobs: int | None = None, max_tokens: int | None = None, n: int | None = None,
        presence_penalty: float | None = None, stream: bool = False, seed: int | None = None,
        temperature: float | None = None, top_p: float | None = None, tools: Tools | None = None,
        tool_prompt: str | None = None, tool_choice: str | None = None, stop: list[str] | None = None, *,
        extra_body: Mapping[str, Any] | None = None,
    ) -> ChatComplete | Stream[ChatCompletionChunk, ChatComplete]:  # fmt: skip
        """The answer to a conversation, or with `stream=True` its chunks. `extra_body`: further fields of the request,
        sent as given.
        """
        answer: Any = self._loop.run(self._async.chat(**arguments_of(locals())))
        return Stream(answer, self._loop, self) if stream else answer

    @overload
    def completion(
        self, prompt: str, *, stream: Literal[False] = False, frequency_penalty: float | None = None,
        max_tokens: int | None = None, repetition_penalty: float | None = None, seed: int | None = None,
        temperature: float | None = None, top_p: float | None = None, stop: list[str] | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> Completion: ...  # fmt: skip
    @overload
    def completion(
        self, prompt: str, *, stream: Literal[True], frequency_penalty: float | None = None,
        max_tokens: int | None = None, repetition_penalty: float | None = None, seed: int | None = None,
        temperature: float | None = None, top_p: float | None = None, stop: list[str] | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> Stream[Completion, Completion]: ...  # fmt: skip
    def completion(
        self, prompt: str, frequency_penalty: float | None = None, max_tokens: int | None = None,
        repetition_penalty: float | None = None, seed: int | None = None, stream: bool = False,
        temperature: float | None = None, top_p: float | None = None, stop: list[str] | None = None, *,
        extra_body: Mapping[str, Any] | None = None,
    ) -> Completion | Stream[Completion, Completion]:  # fmt: skip
        """The continuation of a prompt by the OpenAI route, or with `stream=True` its chunks. `extra_body`: further
        fields of the request, sent as given.
        """
        answer: Any = self._loop.run(self._async.completion(**arguments_of(locals())))
        return Stream(answer, self._loop, self) if stream else answer

    @overload
    def map(
        self, prompts: Iterable[str], concurrency: int = 8, *, errors: Literal["raise"] = "raise",
        progress: bool | None = None, **options: Any,
    ) -> list[Response]: ...  # fmt: skip
    @overload
    def map(
        self, prompts: Iterable[str], concurrency: int = 8, *, errors: Literal["return"],
        progress: bool | None = None, **options: Any,
    ) -> list[Response | TextGenerationError]: ...  # fmt: skip
    @overload
    def map(
        self, prompts: Iterable[Messages], concurrency: int = 8, *, errors: Literal["raise"] = "raise",
        progress: bool | None = None, **options: Any,
    ) -> list[ChatComplete]: ...  # fmt: skip
    @overload
    def map(
        self, prompts: Iterable[Messages], concurrency: int = 8, *, errors: Literal["return"],
        progress: bool | None = None, **options: Any,
    ) -> list[ChatComplete | TextGenerationError]: ...  # fmt: skip
    def map(
        self, prompts: Iterable[str] | Iterable[Messages], concurrency: int = 8, *, errors: OnError = "raise",
        progress: bool | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """The answers to many prompts, in their order; a prompt that is a list of messages is a chat. `concurrency`:
        calls at a time. `errors`: "raise" cancels the rest at the first error, "return" puts an error in its answer's
        place. `progress`: draws a line on stderr; None: if stderr is a terminal. `options`: parameters of `generate`,
        or of `chat`.
        """
        items: list[Any] = checked_items(prompts, concurrency, errors, options, self)
        return self._loop.run(self._async.map(items, concurrency, errors=errors, progress=progress, **options))
