"""The fields of Anthropic's routes, and the kinds of their bodies."""

from typing import Any

from text_generation_router.api.anthropic.options import CustomTool, OutputConfig, ThinkingConfig, ToolChoiceBody
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
)
from text_generation_router.api.common.body_kinds import (
    RequestBody,
    body_kind,
    object_of,
    objects_of,
    unknown_fields,
    unknown_fields_of_kind,
)
from text_generation_router.api.common.contract import MAX_NAMES, Contract, Refused, Renamed, Rule, Tolerated
from text_generation_router.api.common.known_fields import COMMON, OTHER_FORMS, Rules

NOT_STORED = "is not supported: answers are not stored, send the whole conversation in `messages`"
CACHED = Tolerated("every prompt is looked up in the prefix cache")
# What agents send with every request: all thinking is kept, as it is here.
ALL_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

ANTHROPIC: Rules = {
    "cache_control": CACHED,
    "output_format": Refused("is not a field of this route, send `output_config`"),
    "reasoning_effort": Refused("is not a field of this route, send `output_config`", ("none",)),
    "max_thinking_tokens": Refused("is not a field of this route, send `thinking`"),
    "mcp_servers": Refused("is not supported: the server calls no other servers", ([],)),
    "container": Refused("is not supported: the server runs no code"),
    "context_management": Refused(
        "is not supported: every message is part of the prompt", ({}, {"edits": []}, ALL_THINKING)
    ),
    "compaction": Refused("is not supported: every message is part of the prompt"),
    "thread": Refused(NOT_STORED),
    "diagnostics": Refused(NOT_STORED, ({},)),
    "fallbacks": Refused("is not supported: the server has one model", ([],)),
    "fallback_credit_token": Refused("is not supported: the server has one model"),
    "inference_geo": Refused("is not supported: choose a server in that region"),
    "billing_policy": Tolerated("nothing is billed here"),
    "user_profile_id": Tolerated("names the end user, which nothing here depends on"),
    "workspace_id": Tolerated("there is one workspace"),
    "service_tier": Tolerated("there is one tier"),
    "speed": Tolerated("there is one speed"),
    "betas": Tolerated("a feature is asked for by its own field"),
    "anthropic_beta": Tolerated("a feature is asked for by its own field"),
    "anthropic_version": Tolerated("there is one version"),
}
MESSAGES_RULES: Rules = (
    COMMON
    | OTHER_FORMS
    | {
        "stop": Renamed("stop_sequences", ([],)),
        "max_new_tokens": Renamed("max_tokens"),
        "max_completion_tokens": Renamed("max_tokens"),
        "do_sample": Refused("is not a field of this route, send `temperature` 0 for the most likely tokens", (True,)),
        "logprobs": Refused("is not supported on this route, send the request to /v1/chat/completions", (False,)),
        "top_logprobs": Refused("is not supported on this route, send the request to /v1/chat/completions", (0,)),
        "prompt": Refused("is a field of /v1/completions"),
    }
    | ANTHROPIC
)
MESSAGES = Contract.of(MessagesRequest, MESSAGES_RULES)
GENERATING: Rules = dict.fromkeys(MessagesOptions.model_fields, Tolerated("nothing is generated"))
COUNT_TOKENS = Contract.of(CountTokensRequest, MESSAGES_RULES | GENERATING)

TOOL = Contract.of(
    CustomTool,
    {
        "cache_control": CACHED,
        "allowed_callers": Refused("is not supported: the model alone calls tools", (["direct"],)),
        "defer_loading": Refused("is not supported: the model is told of every tool", (False,)),
        "eager_input_streaming": Tolerated("arguments are sent as they are made"),
        "input_examples": Refused("is not supported: write them into `description`", ([],)),
    },
)
TOOL_CHOICE = Contract.of(ToolChoiceBody, {})
THINKING = Contract.of(ThinkingConfig, {"block_binding": Refused("is not supported: thinking is not signed")})
OUTPUT_CONFIG = Contract.of(OutputConfig, {"task_budget": Refused("is not supported: `max_tokens` is the only limit")})
TURN = Contract.of(Turn, {})
_TOOLSET = {"toolset_name": Refused("is not supported: there are no toolsets")}
_ON_TEXT: dict[str, Rule] = {"citations": Tolerated("citations are not part of the prompt"), "cache_control": CACHED}
BLOCKS = {
    "text": Contract.of(TextBlock, _ON_TEXT),
    "thinking": Contract.of(ThinkingBlock, {}),
    "redacted_thinking": Contract.of(RedactedThinkingBlock, {}),
    "tool_use": Contract.of(
        ToolUseBlock, {"cache_control": CACHED, "caller": Tolerated("every tool is called directly")}, _TOOLSET
    ),
    "tool_result": Contract.of(ToolResultBlock, {"cache_control": CACHED}, _TOOLSET),
}


def _unknown_in_prompt(value: dict[str, Any], contract: Contract) -> tuple[str, ...]:
    """Looks through a prompt of Anthropic's API."""
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
            unknown += _blocks(block.get("content"), f"{place}content")  # the blocks of a result
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
