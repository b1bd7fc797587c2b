"""The fields of completions and chats, and the kinds of their bodies."""

from collections.abc import Iterator
from typing import Any

from text_generation_router.api.common.body_kinds import RequestBody, body_kind, object_of, objects_of, unknown_fields
from text_generation_router.api.common.contract import Contract
from text_generation_router.api.common.known_fields import RULES
from text_generation_router.api.common.messages import FunctionBody, MessageBody, ToolBody
from text_generation_router.api.openai.schemas import (
    ChatOptions,
    ChatRequest,
    CompletionRequest,
    RenderedChat,
    StreamOptions,
)
from text_generation_router.errors import SuffixError

COMPLETION = Contract.of(CompletionRequest, RULES["completions"])
CHAT = Contract.of(ChatRequest, RULES["chat"])
# The fields of a message that are not in the schema go to the chat template, as in transformers.
MESSAGE = Contract.of(MessageBody, RULES["chat.messages"])
TOOL = Contract.of(ToolBody, RULES["chat.tools"])
FUNCTION = Contract.of(FunctionBody, RULES["chat.functions"])
STREAM_OPTIONS = Contract.of(StreamOptions, RULES["stream_options"])


def _unknown_in_completion(value: dict[str, Any], contract: Contract) -> tuple[str, ...]:
    """The unknown fields of a completion. Raises SuffixError for `suffix`, as TGI does."""
    if value.get("suffix") is not None:
        raise SuffixError
    return *unknown_fields(value, contract), *unknown_stream_options(value)


def _unknown_in_chat(value: dict[str, Any], contract: Contract) -> tuple[str, ...]:
    unknown = *unknown_fields(value, contract), *unknown_stream_options(value), *_unknown_in_tools(value.get("tools"))
    for where, message in objects_of(value.get("messages"), "messages"):
        MESSAGE.refuse(message, where)
    return unknown


def _unknown_in_tools(tools: Any) -> Iterator[str]:
    for where, tool in objects_of(tools, "tools"):
        yield from unknown_fields(tool, TOOL, where)
        yield from unknown_fields(object_of(tool.get("function")), FUNCTION, f"{where}function.")


def unknown_stream_options(value: dict[str, Any]) -> tuple[str, ...]:
    return unknown_fields(object_of(value.get("stream_options")), STREAM_OPTIONS, "stream_options.")


COMPLETION_BODY = body_kind(CompletionRequest, "completion", _unknown_in_completion, COMPLETION)
CHAT_BODY: RequestBody[ChatOptions] = body_kind(ChatRequest, "chat", _unknown_in_chat, CHAT, RenderedChat)
