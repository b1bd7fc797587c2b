"""Converts the body of /v1/responses to the body of a chat: pure functions, without input or output."""

from collections.abc import Iterable
from typing import Any

from text_generation_router.api.common.body_kinds import check
from text_generation_router.api.common.messages import MessageBody
from text_generation_router.api.openai.schemas import ChatOptions, ChatRequest, RenderedChat
from text_generation_router.api.responses.schemas import (
    LOGPROBS,
    CustomCallItem,
    FunctionCallItem,
    FunctionResultItem,
    InputMessage,
    PromptItem,
    ReasoningItem,
    RenderedResponses,
    ResponsesOptions,
    ResponsesRequest,
    WebSearchItem,
)
from text_generation_router.api.responses.tools import INPUT, chat_name
from text_generation_router.api.tgi.schemas import SamplingFields
from text_generation_router.errors import ValidationError
from text_generation_router.http.encoding import to_json

# Names of fields in errors: this route's name for each field that the checks of chats call by another name.
NAMES = {
    "inputs": "input",
    "messages": "input",
    "max_new_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
}
NAMES |= {"top_n_tokens": "top_logprobs", "response_format": "text.format", "reasoning_effort": "reasoning.effort"}
# Fields that have the same name and meaning in chats.
SAME = (*SamplingFields.model_fields, "model", "stream", "top_logprobs", "priority", "timeout", "cache_salt")


def chat_of(asked: ResponsesOptions) -> ChatOptions:
    """The chat that a request asks for. Raises ValidationError."""
    values = {name: value for name in SAME if (value := getattr(asked, name)) is not None}
    values |= {"max_tokens": asked.max_output_tokens, "logprobs": LOGPROBS in (asked.include or ())}
    values |= asked.chat_values()
    if asked.top_logprobs and not values["logprobs"]:
        raise ValidationError.of("top_logprobs", f"is allowed only if `include` has `{LOGPROBS}`")
    if isinstance(asked, RenderedResponses):
        return RenderedChat(prompt=asked.prompt, prompt_without_tools=asked.prompt_without_tools, **values)
    assert isinstance(asked, ResponsesRequest)
    messages = messages_of(asked)
    if not messages:
        raise ValidationError.of(
            "input", "must have a message, a call or its result; all that it has is empty reasoning"
        )
    return check(ChatRequest, {"messages": messages, **values})


def messages_of(asked: ResponsesRequest) -> list[MessageBody]:
    """The conversation as messages of a chat."""
    first = [] if asked.instructions is None else [MessageBody(role="system", content=asked.instructions)]
    return first + _messages_of(item for item in asked.input if not isinstance(item, WebSearchItem))


def _messages_of(items: Iterable[PromptItem]) -> list[MessageBody]:
    """Reasoning, text and calls of one turn of the model become one message with the role `assistant`."""
    messages: list[MessageBody] = []
    turn: dict[str, Any] = {}  # fields of the assistant's message that is being built

    def end_turn() -> None:
        if turn:
            # As in chats, a message that has tool calls only has no text.
            text = turn.pop("content", None if "tool_calls" in turn else "")
            messages.append(MessageBody(role="assistant", content=text, **turn))
            turn.clear()

    for item in items:
        if isinstance(item, FunctionCallItem | CustomCallItem):
            turn.setdefault("tool_calls", []).append(_call(item))
        elif isinstance(item, ReasoningItem):
            if turn:  # a reasoning item begins a new turn
                end_turn()
            if text := "".join(part.text for part in item.content or item.summary):
                turn["reasoning_content"] = text
        elif isinstance(item, InputMessage) and item.role == "assistant":
            if "content" in turn:
                end_turn()
            turn["content"] = item.content
        else:
            end_turn()
            messages.append(_others(item))
    end_turn()
    return messages


def _others(item: InputMessage | FunctionResultItem) -> MessageBody:
    if isinstance(item, FunctionResultItem):
        return MessageBody(role="tool", content=item.output, **{"tool_call_id": item.call_id})
    return MessageBody(role=item.role, content=item.content)


def _call(item: FunctionCallItem | CustomCallItem) -> dict[str, Any]:
    arguments = item.arguments if isinstance(item, FunctionCallItem) else to_json({INPUT: item.input}).decode()
    function = {"name": chat_name(item.name, item.namespace), "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}
