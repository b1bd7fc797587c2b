"""The bodies that Anthropic's routes, /v1/messages and /v1/messages/count_tokens, accept: as `api/tgi/schemas.py`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from text_generation_router.api.anthropic.options import PromptOptions
from text_generation_router.api.common.fields import (
    I32,
    MESSAGE_LIMIT,
    U32,
    AnsweredRequest,
    Body,
    ModelName,
    Strings,
    kind_of,
    stop_limit,
)
from text_generation_router.api.openai.schemas import Rendered
from text_generation_router.api.tgi.schemas import CacheSalt, Priority, SamplingFields, Timeout
from text_generation_router.errors import ValidationError


class TextBlock(Body):
    type: Annotated[Literal["text"], kind_of("block")]
    text: str
    """The text."""


class ThinkingBlock(Body):
    type: Annotated[Literal["thinking"], kind_of("block")]
    thinking: str
    """What the model has written for itself."""
    signature: str = ""
    """Not looked at: this server signs nothing."""


class RedactedThinkingBlock(Body):
    type: Annotated[Literal["redacted_thinking"], kind_of("block")]
    data: str
    """Not looked at: only the server that has made it can read it."""


class ToolUseBlock(Body):
    type: Annotated[Literal["tool_use"], kind_of("block")]
    id: str
    """The name by which the result refers to this call."""
    name: str
    """The tool's name."""
    input: dict[str, Any]
    """The arguments."""


BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
# Blocks that Anthropic's API has besides; any of them would change the prompt.
OTHER_BLOCKS = frozenset(
    (
        "image", "document", "search_result", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result",
        "code_execution_tool_result", "bash_code_execution_tool_result", "text_editor_code_execution_tool_result",
        "tool_search_tool_result", "tool_reference", "container_upload", "browser_state", "compaction", "fallback",
        "mcp_tool_use", "mcp_tool_result", "advisor_tool_result", "tool_addition", "tool_removal",
        "mcp_tool_listing",
    )
)  # fmt: skip


def _of_kinds(*kinds: str) -> BeforeValidator:
    """A check that a block is of one of `kinds`; blocks that are known and not supported are refused by their kind."""

    def check_kind(block: Any) -> Any:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind in OTHER_BLOCKS:
            raise ValidationError(f"`{kind}` in `messages` is not supported yet", "messages")
        if kind not in kinds:
            raise ValueError(f"Input should be an object whose `type` is one of {', '.join(kinds)}")
        return block

    return BeforeValidator(check_kind)


def _as_blocks(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("Input should be a string or a list of blocks")
    return value


TextOnly = Annotated[TextBlock, _of_kinds("text")]
# A text is a list of one block.
TextBlocks = Annotated[
    list[TextOnly],
    Field(fail_fast=True),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ToolResultBlock(Body):
    type: Annotated[Literal["tool_result"], kind_of("block")]
    tool_use_id: str
    """The id of the call that it is the result of."""
    content: TextBlocks = Field(default_factory=list)
    """The result: a text, or a list of blocks of text."""
    is_error: Annotated[
        bool | None, Field(description="Whether the call has failed. The model then reads `Error: ` before the result.")
    ] = None


Block = Annotated[
    Annotated[
        TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
    ],
    _of_kinds(*BLOCKS),
]


class Turn(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    """The sender."""
    content: Annotated[
        list[Block],
        Field(fail_fast=True),
        BeforeValidator(
            _as_blocks,
            json_schema_input_type=str
            | list[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock],
        ),
    ]
    """A text, or a list of blocks."""


class TurnsBody(Body):
    """The fields that make a prompt."""

    system: TextBlocks | None = None
    """What the model is told before the conversation: a text, or a list of blocks of text."""
    messages: Annotated[list[Turn], MESSAGE_LIMIT] = Field(min_length=1, fail_fast=True)
    """The conversation, oldest message first."""


class MessagesOptions(PromptOptions, SamplingFields, AnsweredRequest):
    """All fields of /v1/messages that do not make the prompt."""

    max_tokens: U32
    """Most new tokens."""
    stop_sequences: Annotated[Strings, stop_limit("stop_sequences")] | None = None
    """The text ends before the first of these strings."""
    top_k: Annotated[I32 | None, Field(description="0 and -1 mean all tokens, as does a missing value.")] = None
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None


class MessagesRequest(TurnsBody, MessagesOptions):
    pass


class RenderedMessages(MessagesOptions, Rendered):
    """A request whose conversation the template has already turned into a prompt."""


class CountOptions(PromptOptions):
    model: ModelName = None


class CountTokensRequest(TurnsBody, CountOptions):
    pass


class RenderedCount(CountOptions, Rendered):
    """The same, as a prompt."""
