"""The methods of both clients. Their names, and the names, order and defaults of their parameters, are TGI's."""

from abc import ABC, abstractmethod
from typing import Generic, Literal, TypeVar, Unpack, overload

from text_generation.requests import (
    ChatOptions,
    CompletionOptions,
    Messages,
    Tools,
    chat_request,
    completion_request,
    generate_request,
)
from text_generation.types import ChatRequest, CompletionRequest, Grammar, Request

# Types that a client returns for a whole answer, and for a stream of its parts.
Generated = TypeVar("Generated")
GeneratedParts = TypeVar("GeneratedParts")
Chat = TypeVar("Chat")
ChatParts = TypeVar("ChatParts")
Completed = TypeVar("Completed")
CompletedParts = TypeVar("CompletedParts")


class Calls(ABC, Generic[Generated, GeneratedParts, Chat, ChatParts, Completed, CompletedParts]):
    """Base of both clients: turns arguments into requests. A subclass sends the requests, and returns their answers."""

    def generate(
        self,
        prompt: str,
        do_sample: bool = False,
        max_new_tokens: int = 20,
        best_of: int | None = None,
        repetition_penalty: float | None = None,
        frequency_penalty: float | None = None,
        return_full_text: bool = False,
        seed: int | None = None,
        stop_sequences: list[str] | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        truncate: int | None = None,
        typical_p: float | None = None,
        watermark: bool = False,
        decoder_input_details: bool = False,
        top_n_tokens: int | None = None,
        grammar: Grammar | None = None,
    ) -> Generated:
        """The whole answer to a prompt, with details."""
        request = generate_request(
            prompt, stop_sequences, False, do_sample=do_sample, max_new_tokens=max_new_tokens, best_of=best_of,
            repetition_penalty=repetition_penalty, frequency_penalty=frequency_penalty,
            return_full_text=return_full_text, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p,
            truncate=truncate, typical_p=typical_p, watermark=watermark, decoder_input_details=decoder_input_details,
            top_n_tokens=top_n_tokens, grammar=grammar,
        )  # fmt: skip
        return self._generate(request)

    def generate_stream(
        self,
        prompt: str,
        do_sample: bool = False,
        max_new_tokens: int = 20,
        repetition_penalty: float | None = None,
        frequency_penalty: float | None = None,
        return_full_text: bool = False,
        seed: int | None = None,
        stop_sequences: list[str] | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        truncate: int | None = None,
        typical_p: float | None = None,
        watermark: bool = False,
        top_n_tokens: int | None = None,
        grammar: Grammar | None = None,
    ) -> GeneratedParts:
        """The answer token by token; the last one carries the whole text and the details."""
        request = generate_request(
            prompt, stop_sequences, True, do_sample=do_sample, max_new_tokens=max_new_tokens,
            repetition_penalty=repetition_penalty, frequency_penalty=frequency_penalty,
            return_full_text=return_full_text, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p,
            truncate=truncate, typical_p=typical_p, watermark=watermark, top_n_tokens=top_n_tokens, grammar=grammar,
        )  # fmt: skip
        return self._generate_stream(request)

    @overload
    def chat(self, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[ChatOptions]) -> Chat: ...
    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]) -> ChatParts: ...
    def chat(
        self,
        messages: Messages,
        repetition_penalty: float | None = None,
        frequency_penalty: float | None = None,
        logit_bias: list[float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        max_tokens: int | None = None,
        n: int | None = None,
        presence_penalty: float | None = None,
        stream: bool = False,
        seed: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        tools: Tools | None = None,
        tool_prompt: str | None = None,
        tool_choice: str | None = None,
        stop: list[str] | None = None,
    ) -> Chat | ChatParts:
        """The answer to a conversation, or with `stream=True` its chunks."""
        request = chat_request(
            messages, repetition_penalty=repetition_penalty, frequency_penalty=frequency_penalty,
            logit_bias=logit_bias, logprobs=logprobs, top_logprobs=top_logprobs, max_tokens=max_tokens, n=n,
            presence_penalty=presence_penalty, stream=stream, seed=seed, temperature=temperature, top_p=top_p,
            tools=tools, tool_prompt=tool_prompt, tool_choice=tool_choice, stop=stop,
        )  # fmt: skip
        return self._chat_stream(request) if stream else self._chat(request)

    @overload
    def completion(
        self, prompt: str, *, stream: Literal[False] = False, **options: Unpack[CompletionOptions]
    ) -> Completed: ...
    @overload
    def completion(
        self, prompt: str, *, stream: Literal[True], **options: Unpack[CompletionOptions]
    ) -> CompletedParts: ...
    def completion(
        self,
        prompt: str,
        frequency_penalty: float | None = None,
        max_tokens: int | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stream: bool = False,
        temperature: float | None = None,
        top_p: float | None = None,
        stop: list[str] | None = None,
    ) -> Completed | CompletedParts:
        """The continuation of a prompt by the OpenAI route, or with `stream=True` its chunks."""
        request = completion_request(
            prompt, frequency_penalty=frequency_penalty, max_tokens=max_tokens, repetition_penalty=repetition_penalty,
            seed=seed, stream=stream, temperature=temperature, top_p=top_p, stop=stop,
        )  # fmt: skip
        return self._completion_stream(request) if stream else self._completion(request)

    @abstractmethod
    def _generate(self, request: Request) -> Generated: ...

    @abstractmethod
    def _generate_stream(self, request: Request) -> GeneratedParts: ...

    @abstractmethod
    def _chat(self, request: ChatRequest) -> Chat: ...

    @abstractmethod
    def _chat_stream(self, request: ChatRequest) -> ChatParts: ...

    @abstractmethod
    def _completion(self, request: CompletionRequest) -> Completed: ...

    @abstractmethod
    def _completion_stream(self, request: CompletionRequest) -> CompletedParts: ...
