"""Puts the events of a stream together: the text of each event, and the whole answer that they make."""

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from text_generation.errors import UnknownError
from text_generation.types import (
    ChatComplete,
    ChatCompletionChunk,
    ChatCompletionComplete,
    ChoiceDelta,
    ChoiceDeltaToolCall,
    Completion,
    CompletionComplete,
    Details,
    Message,
    Response,
    StreamResponse,
    Token,
)

Event = TypeVar("Event")
Whole = TypeVar("Whole")


class Parts(ABC, Generic[Event, Whole]):
    """The events of one stream so far."""

    @staticmethod
    @abstractmethod
    def text_of(event: Event) -> str:
        """The text that this event adds to the answer; of several choices, to the first."""

    @abstractmethod
    def add(self, event: Event) -> None: ...

    @abstractmethod
    def whole(self) -> Whole:
        """The answer that the same call would have given without a stream. Called after the last event."""


class GeneratedParts(Parts[StreamResponse, Response]):
    def __init__(self) -> None:
        self._tokens: list[Token] = []
        self._top_tokens: list[list[Token]] = []
        self._last: StreamResponse | None = None

    @staticmethod
    def text_of(event: StreamResponse) -> str:
        return "" if event.token.special else event.token.text

    def add(self, event: StreamResponse) -> None:
        self._tokens.append(event.token)
        if event.top_tokens is not None:
            self._top_tokens.append(event.top_tokens)
        self._last = event

    def whole(self) -> Response:
        last = self._last
        if last is None or last.generated_text is None or last.details is None:
            raise UnknownError("the last event of the stream has no text or no details")
        end = last.details
        details = Details(
            finish_reason=end.finish_reason,
            generated_tokens=end.generated_tokens,
            seed=end.seed,
            cached_tokens=end.cached_tokens,
            prefill=[],
            # The last event of a text that ended at its deadline has a token that was not generated.
            tokens=self._tokens[: end.generated_tokens],
            top_tokens=self._top_tokens or None,
        )
        return Response(generated_text=last.generated_text, details=details)


class ChatParts(Parts[ChatCompletionChunk, ChatComplete]):
    def __init__(self) -> None:
        self._first: ChatCompletionChunk | None = None
        self._choices: dict[int, _ChoiceParts] = {}
        self._usage: dict[str, Any] = {}

    @staticmethod
    def text_of(event: ChatCompletionChunk) -> str:
        return "".join(choice.delta.content or "" for choice in event.choices if choice.index == 0)

    def add(self, event: ChatCompletionChunk) -> None:
        self._first = self._first or event
        self._usage = event.usage or self._usage
        for choice in event.choices:
            parts = self._choices.setdefault(choice.index, _ChoiceParts())
            parts.add(choice.delta.content, choice.logprobs, choice.finish_reason)
            parts.add_to_message(choice.delta)

    def whole(self) -> ChatComplete:
        first = _not_empty(self._first)
        return ChatComplete(
            id=first.id,
            object="chat.completion",
            created=first.created,
            model=first.model,
            system_fingerprint=first.system_fingerprint,
            choices=[parts.chat_choice(index) for index, parts in sorted(self._choices.items())],
            usage=self._usage,
        )


class CompletionParts(Parts[Completion, Completion]):
    def __init__(self) -> None:
        self._first: Completion | None = None
        self._choices: dict[int, _ChoiceParts] = {}
        self._usage: dict[str, Any] | None = None

    @staticmethod
    def text_of(event: Completion) -> str:
        return "".join(choice.text for choice in event.choices if choice.index == 0)

    def add(self, event: Completion) -> None:
        self._first = self._first or event
        self._usage = event.usage or self._usage
        for choice in event.choices:
            parts = self._choices.setdefault(choice.index, _ChoiceParts())
            parts.add(choice.text, choice.logprobs, choice.finish_reason)

    def whole(self) -> Completion:
        choices = [parts.completion_choice(index) for index, parts in sorted(self._choices.items())]
        return _not_empty(self._first).model_copy(update={"choices": choices, "usage": self._usage})


class _ChoiceParts:
    """The parts of one choice, of a chat or a completion."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._logprobs: dict[str, Any] | None = None
        self._finish_reason: str | None = None
        self._role = "assistant"
        self._tool_calls: dict[int, dict[str, Any]] = {}

    def add(self, text: str | None, logprobs: dict[str, Any] | None, finish_reason: str | None) -> None:
        if text is not None:
            self._texts.append(text)
        if logprobs is not None:
            self._logprobs = self._logprobs or {}
            _extend(self._logprobs, logprobs)
        self._finish_reason = finish_reason or self._finish_reason

    def add_to_message(self, delta: ChoiceDelta) -> None:
        self._role = delta.role or self._role
        for call in delta.tool_calls or ():
            _add_call(self._tool_calls, call)

    def chat_choice(self, index: int) -> ChatCompletionComplete:
        message = Message(
            role=self._role,
            content="".join(self._texts) if self._texts else None,
            tool_calls=[call for _, call in sorted(self._tool_calls.items())] or None,
        )
        return ChatCompletionComplete(
            index=index, message=message, logprobs=self._logprobs, finish_reason=self._finish_reason
        )

    def completion_choice(self, index: int) -> CompletionComplete:
        return CompletionComplete(
            index=index, text="".join(self._texts), logprobs=self._logprobs, finish_reason=self._finish_reason
        )


def _extend(logprobs: dict[str, Any], more: dict[str, Any]) -> None:
    """Adds to each list of `logprobs` the list of the same name."""
    for name, values in more.items():
        if not isinstance(values, list):
            logprobs.setdefault(name, values)
        elif logprobs.get(name) is None:
            logprobs[name] = list(values)
        else:
            logprobs[name].extend(values)


def _add_call(calls: dict[int, dict[str, Any]], part: ChoiceDeltaToolCall) -> None:
    """The first part of a call has its id and name, each part a piece of its arguments."""
    call = calls.setdefault(part.index, {"id": None, "type": "function", "function": {"name": None, "arguments": ""}})
    call["id"] = part.id or call["id"]
    call["type"] = part.type or call["type"]
    if part.function is not None:
        function = call["function"]
        function["name"] = part.function.name or function["name"]
        function["arguments"] += part.function.arguments or ""


def _not_empty(first: Event | None) -> Event:
    if first is None:
        raise UnknownError("the stream had no events")
    return first
