"""Converts bodies of Anthropic's routes to bodies of chats: pure functions, without input or output."""

from collections.abc import Iterator, Sequence
from typing import Any

from text_generation_router.api.anthropic.schemas import (
    CountOptions,
    CountTokensRequest,
    MessagesOptions,
    MessagesRequest,
    RedactedThinkingBlock,
    RenderedCount,
    RenderedMessages,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    TurnsBody,
)
from text_generation_router.api.common.body_kinds import check
from text_generation_router.api.common.fields import Body
from text_generation_router.api.common.messages import MessageBody
from text_generation_router.api.openai.schemas import ChatOptions, ChatRequest, RenderedChat
from text_generation_router.api.tgi.schemas import SamplingFields
from text_generation_router.errors import ValidationError

# Names of fields in errors: this API's name for each field that the checks of chats call by another name.
NAMES = {
    "inputs": "messages",
    "max_new_tokens": "max_tokens",
    "max_thinking_tokens": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
# Fields that have the same name and meaning in chats.
SAME = (*SamplingFields.model_fields, "model", "stream", "max_tokens", "priority", "timeout", "cache_salt")
# Text between the blocks of a system prompt, which are paragraphs. The blocks of a message are parts of one text, as in
# chats.
BETWEEN_PARAGRAPHS = "\n\n"
FAILED = "Error: "  # put before the result of a tool call that has failed


def chat_of(asked: MessagesOptions) -> ChatOptions:
    """The chat that a request to /v1/messages asks for. Raises ValidationError."""
    values = {name: value for name in SAME if (value := getattr(asked, name)) is not None}
    values |= {"stop": asked.stop_sequences, "include_stop_str_in_output": False} | asked.chat_values()
    if isinstance(asked, RenderedMessages):
        return RenderedChat(prompt=asked.prompt, prompt_without_tools=asked.prompt_without_tools, **values)
    assert isinstance(asked, MessagesRequest)
    return check(ChatRequest, {"messages": messages_of(asked), **values})


def counted_chat_of(asked: CountOptions) -> ChatOptions:
    """The chat whose prompt's tokens the route counts."""
    if isinstance(asked, RenderedCount):
        return RenderedChat(prompt=asked.prompt)
    assert isinstance(asked, CountTokensRequest)
    return check(ChatRequest, {"messages": messages_of(asked), **asked.chat_values()})


def messages_of(asked: TurnsBody) -> list[MessageBody]:
    """The conversation as messages of a chat. Raises ValidationError for a block in a message of the wrong role."""
    system = [] if asked.system is None else [MessageBody(role="system", content=_paragraphs(asked.system))]
    return system + [message for turn in asked.messages for message in _messages_of(turn)]


def _messages_of(turn: Turn) -> Iterator[MessageBody]:
    if turn.role == "assistant":
        yield _assistants(turn)
        return
    _check(turn, (TextBlock, ToolResultBlock) if turn.role == "user" else (TextBlock,))
    texts = [block for block in turn.content if isinstance(block, TextBlock)]
    results = [block for block in turn.content if isinstance(block, ToolResultBlock)]
    # A template expects the results of tools right behind the calls, even if the user's own text comes first in the
    # message.
    for result in results:
        content = (FAILED if result.is_error else "") + _text(result.content)
        yield MessageBody(role="tool", content=content, **{"tool_call_id": result.tool_use_id})
    if turn.role == "system":
        yield MessageBody(role="system", content=_paragraphs(texts))
    elif texts or not results:
        yield MessageBody(role="user", content=_text(texts))


def _assistants(turn: Turn) -> MessageBody:
    _check(turn, (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock))
    others: dict[str, Any] = {}
    if calls := [_call(block) for block in turn.content if isinstance(block, ToolUseBlock)]:
        others["tool_calls"] = calls
    if thoughts := [block.thinking for block in turn.content if isinstance(block, ThinkingBlock)]:
        others["reasoning_content"] = "".join(thoughts)
    texts = [block for block in turn.content if isinstance(block, TextBlock)]
    # As in chats, a message that has tool calls only has no text.
    return MessageBody(role="assistant", content=_text(texts) if texts or not calls else None, **others)


def _check(turn: Turn, kinds: tuple[type[Body], ...]) -> None:
    for block in turn.content:
        if not isinstance(block, kinds):
            raise ValidationError(
                f"`{block.type}` in `messages` must not stand in a message of the role {turn.role}", "messages"
            )


def _call(block: ToolUseBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _text(blocks: Sequence[TextBlock]) -> str:
    return "".join(block.text for block in blocks)


def _paragraphs(blocks: Sequence[TextBlock]) -> str:
    return BETWEEN_PARAGRAPHS.join(block.text for block in blocks)
