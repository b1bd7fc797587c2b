"""The fields of Anthropic's routes, and the kinds of their bodies."""

from typing import Any

from text_generation_router.api.anthropic.schemas import (
    CountOptions,
    CountTokensRequest,
    CustomTool,
    MessagesOptions,
    MessagesRequest,
    OutputConfig,
    RedactedThinkingBlock,
    RenderedCount,
    RenderedMessages,
    TextBlock,
    ThinkingBlock,
    ThinkingConfig,
    ToolChoiceBody,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from text_generation_router.api.common.body_kinds import (
    RequestBody,
    body_kind,
    object_of,
    objects_of,
    unknown_fields,
    unknown_fields_of_kind,
)
from text_generation_router.api.common.contract import MAX_NAMES, Contract, Tolerated
from text_generation_router.api.common.known_fields import RULES

MESSAGES = Contract.of(MessagesRequest, RULES["messages"])
GENERATING = dict.fromkeys(MessagesOptions.model_fields, Tolerated("nothing is generated"))
COUNT_TOKENS = Contract.of(CountTokensRequest, RULES["messages"], GENERATING)
TOOL = Contract.of(CustomTool, RULES["messages.tools"])
TOOL_CHOICE = Contract.of(ToolChoiceBody)
THINKING = Contract.of(ThinkingConfig, RULES["thinking"])
OUTPUT_CONFIG = Contract.of(OutputConfig, RULES["output_config"])
TURN = Contract.of(Turn)
BLOCKS = {
    "text": Contract.of(TextBlock, RULES["blocks.text"]),
    "thinking": Contract.of(ThinkingBlock),
    "redacted_thinking": Contract.of(RedactedThinkingBlock),
    "tool_use": Contract.of(ToolUseBlock, RULES["blocks.tool_use"]),
    "tool_result": Contract.of(ToolResultBlock, RULES["blocks.tool_result"]),
}


def _unknown_in_prompt(value: dict[str, Any], contract: Contract) -> tuple[str, ...]:
    """The unknown fields of the tools, the messages and the settings of a prompt in Anthropic's form."""
    unknown = [*unknown_fields(value, contract)]
    for where, tool in objects_of(value.get("tools"), "tools"):
        if tool.get("type") in (None, "custom", "function"):  # a tool of another kind is refused by the schema
            unknown += unknown_fields(tool, TOOL, where)
    for name, of_part in (
        ("tool_choice", TOOL_CHOICE),
        ("thinking", THINKING),
        ("output_config", OUTPUT_CONFIG),
    ):
        unknown += unknown_fields(object_of(value.get(name)), of_part, f"{name}.")
    return tuple([*unknown, *_turns(value)][:MAX_NAMES])


def _turns(value: dict[str, Any]) -> tuple[str, ...]:
    """The unknown fields of messages and of their blocks."""
    unknown = [*_blocks(value.get("system"), "system")]
    for where, turn in objects_of(value.get("messages"), "messages"):
        unknown += unknown_fields(turn, TURN, where)
        for place, block in objects_of(turn.get("content"), f"{where}content"):
            unknown += _block(block, place)
            unknown += _blocks(block.get("content"), f"{place}content")  # content blocks of a tool_result
    return tuple(unknown[:MAX_NAMES])


def _blocks(blocks: Any, where: str) -> list[str]:
    return [path for place, block in objects_of(blocks, where) for path in _block(block, place)]


def _block(block: dict[str, Any], where: str) -> tuple[str, ...]:
    return unknown_fields_of_kind(block, block.get("type"), BLOCKS, where)


MESSAGES_BODY: RequestBody[MessagesOptions] = body_kind(
    MessagesRequest, "messages", _unknown_in_prompt, MESSAGES, RenderedMessages
)
COUNT_TOKENS_BODY: RequestBody[CountOptions] = body_kind(
    CountTokensRequest, "count_tokens", _unknown_in_prompt, COUNT_TOKENS, RenderedCount
)
