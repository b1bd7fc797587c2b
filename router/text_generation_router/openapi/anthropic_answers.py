"""The answers of Anthropic's routes, as the OpenAPI document describes them."""

from typing import Annotated, Any, Literal

from text_generation_router.api.common.fields import kind_of
from text_generation_router.openapi.native_answers import AnswerJson, Count

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ThinkingTokensJson(AnswerJson):
    """A part of the output."""

    thinking_tokens: Count
    """Tokens of thinking."""


class MessageUsageJson(AnswerJson):
    """Numbers of tokens."""

    input_tokens: Count
    """Tokens of the prompt, without those of `cache_read_input_tokens`."""
    cache_creation_input_tokens: Count
    """Always 0: what the prefix cache takes is not counted."""
    cache_read_input_tokens: Count
    """Tokens of the prompt that the prefix cache had."""
    output_tokens: Count
    """Generated tokens."""
    output_tokens_details: ThinkingTokensJson
    """How many of them are thinking."""


class AnsweredTextJson(AnswerJson):
    """A text."""

    type: Annotated[Literal["text"], kind_of("block")]
    text: str
    """The text."""


class AnsweredThinkingJson(AnswerJson):
    """Reasoning of the model, which comes before its answer."""

    type: Annotated[Literal["thinking"], kind_of("block")]
    thinking: str
    """The text."""
    signature: Literal[""]
    """Always empty: this server signs nothing."""


class AnsweredToolUseJson(AnswerJson):
    """A call of a tool."""

    type: Annotated[Literal["tool_use"], kind_of("block")]
    id: str
    """The name by which the result refers to this call."""
    name: str
    """The tool's name."""
    input: dict[str, Any]
    """The arguments."""


AnsweredBlockJson = AnsweredTextJson | AnsweredThinkingJson | AnsweredToolUseJson


class AnsweredMessageJson(AnswerJson):
    """The model's message."""

    id: str
    """The request's id, behind `msg_`."""
    type: Annotated[Literal["message"], kind_of("answer")]
    role: Literal["assistant"]
    """The sender."""
    model: str
    """The served model."""
    content: list[AnsweredBlockJson]
    """The blocks, in order; empty in the first event of a stream."""
    stop_reason: StopReason | None
    """Why the text ended; null in the first event of a stream."""
    stop_sequence: str | None
    """The stop sequence that ended the text."""
    usage: MessageUsageJson
    """Numbers of tokens that the request read and generated."""


class MessageStartJson(AnswerJson):
    """The first event of a stream."""

    type: Annotated[Literal["message_start"], kind_of("event")]
    message: AnsweredMessageJson
    """The message without its content."""


class BlockStartJson(AnswerJson):
    """A block begins."""

    type: Annotated[Literal["content_block_start"], kind_of("event")]
    index: Count
    """Number of the block."""
    content_block: AnsweredBlockJson
    """The block, as yet without text."""


class TextDeltaJson(AnswerJson):
    """The next part of a text."""

    type: Annotated[Literal["text_delta"], kind_of("part")]
    text: str
    """The part."""


class ThinkingDeltaJson(AnswerJson):
    """The next part of the model's thinking."""

    type: Annotated[Literal["thinking_delta"], kind_of("part")]
    thinking: str
    """The part."""


class SignatureDeltaJson(AnswerJson):
    """Ends the model's thinking."""

    type: Annotated[Literal["signature_delta"], kind_of("part")]
    signature: Literal[""]
    """Always empty."""


class InputDeltaJson(AnswerJson):
    """The next part of a call's arguments."""

    type: Annotated[Literal["input_json_delta"], kind_of("part")]
    partial_json: str
    """The part; all parts together are a JSON object."""


class BlockDeltaJson(AnswerJson):
    """A block goes on."""

    type: Annotated[Literal["content_block_delta"], kind_of("event")]
    index: Count
    """Number of the block."""
    delta: TextDeltaJson | ThinkingDeltaJson | SignatureDeltaJson | InputDeltaJson
    """What is added."""


class BlockStopJson(AnswerJson):
    """A block is complete."""

    type: Annotated[Literal["content_block_stop"], kind_of("event")]
    index: Count
    """Number of the block."""


class MessageEndJson(AnswerJson):
    """Why a message ended."""

    stop_reason: StopReason
    """Why the text ended."""
    stop_sequence: str | None
    """The stop sequence that ended the text."""


class MessageDeltaJson(AnswerJson):
    """The message is complete."""

    type: Annotated[Literal["message_delta"], kind_of("event")]
    delta: MessageEndJson
    """Why the message ended."""
    usage: MessageUsageJson
    """Numbers of tokens that the request read and generated."""


class MessageStopJson(AnswerJson):
    """The last event of a stream."""

    type: Annotated[Literal["message_stop"], kind_of("event")]


class PingJson(AnswerJson):
    """Shows that the connection is open: behind the first event, and after a long silence."""

    type: Annotated[Literal["ping"], kind_of("event")]


MessageEventJson = (
    MessageStartJson | PingJson | BlockStartJson | BlockDeltaJson | BlockStopJson | MessageDeltaJson | MessageStopJson
)


class CountedTokensJson(AnswerJson):
    """The length of a prompt."""

    input_tokens: Count
    """Number of tokens."""


class AnthropicToldJson(AnswerJson):
    """What is wrong."""

    type: str
    """Anthropic's kind of error, such as `invalid_request_error`."""
    message: str
    """What is wrong, why, and what to do."""


class AnthropicErrorJson(AnswerJson):
    """An error of Anthropic's routes; in a stream, an event."""

    type: Annotated[Literal["error"], kind_of("answer")]
    error: AnthropicToldJson
    """The error as Anthropic's clients read it."""
    request_id: str | None
    """The id of the request; null for one that is not HTTP as it should be."""
    error_type: str
    """The kind of error, as TGI names it."""
