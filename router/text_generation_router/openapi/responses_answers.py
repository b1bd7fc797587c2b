"""The answer and the events of /v1/responses, as the OpenAPI document describes them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from text_generation_router.api.common.fields import kind_of
from text_generation_router.openapi.native_answers import AnswerJson, Count
from text_generation_router.openapi.v1_answers import ChatTokenJson

ItemStatus = Literal["in_progress", "completed", "incomplete"]

AS_ASKED = Field(description="As in the request.")
PartNumber = Annotated[Literal[0], Field(description="Number of the part.")]


class OutputTextJson(AnswerJson):
    """The text of a message."""

    type: Annotated[Literal["output_text"], kind_of("part")]
    text: str
    """The text."""
    annotations: list[Any]
    """Always empty."""
    logprobs: list[ChatTokenJson]
    """One item for each token, if `include` asks for them."""


class ReasoningTextJson(AnswerJson):
    """Reasoning of the model, which comes before its answer."""

    type: Annotated[Literal["reasoning_text"], kind_of("part")]
    text: str
    """The text."""


class OutputMessageJson(AnswerJson):
    """A message."""

    id: str
    """The item's name."""
    type: Annotated[Literal["message"], kind_of("item")]
    status: ItemStatus
    """Whether the item is complete."""
    role: Literal["assistant"]
    """The sender."""
    content: list[OutputTextJson]
    """One part; none when the item begins."""


class OutputReasoningJson(AnswerJson):
    """Reasoning of the model, which comes before its answer."""

    id: str
    """The item's name."""
    type: Annotated[Literal["reasoning"], kind_of("item")]
    status: ItemStatus
    """Whether the item is complete."""
    summary: list[Any]
    """Always empty: `content` has the reasoning itself."""
    content: list[ReasoningTextJson]
    """One part; none when the item begins."""


class OutputToolCall(AnswerJson):
    """A call of a tool."""

    id: str
    """The item's name."""
    status: ItemStatus
    """Whether the item is complete."""
    call_id: str
    """The name by which the result refers to this call."""
    name: str
    """The tool's name."""
    namespace: str | None = None
    """The namespace of the tool; absent for a tool that is in none."""


class OutputCallJson(OutputToolCall):
    """A call of a function."""

    type: Annotated[Literal["function_call"], kind_of("item")]
    arguments: str
    """The arguments, as JSON."""


class OutputCustomCallJson(OutputToolCall):
    """A call of a custom tool."""

    type: Annotated[Literal["custom_tool_call"], kind_of("item")]
    input: str
    """The text for the tool."""


OutputItemJson = OutputMessageJson | OutputReasoningJson | OutputCallJson | OutputCustomCallJson


class InputDetailsJson(AnswerJson):
    """Numbers of tokens that the prefix cache read and took."""

    cached_tokens: Count
    """Tokens that the prefix cache had."""
    cache_write_tokens: Count
    """Always 0: what the prefix cache takes is not counted."""


class OutputDetailsJson(AnswerJson):
    """Numbers of tokens by their kind."""

    reasoning_tokens: Count
    """Tokens of reasoning."""


class ResponseUsageJson(AnswerJson):
    """Numbers of tokens."""

    input_tokens: Count
    """Tokens of the prompt."""
    input_tokens_details: InputDetailsJson
    """Parts of the prompt."""
    output_tokens: Count
    """Generated tokens."""
    output_tokens_details: OutputDetailsJson
    """Parts of the output."""
    total_tokens: Count
    """The sum of both."""


class ResponseErrorJson(AnswerJson):
    """Why an answer failed."""

    code: Annotated[Literal["server_error", "rate_limit_exceeded", "invalid_prompt"], kind_of("error")]
    message: str
    """What is wrong, why, and what to do."""


class IncompleteJson(AnswerJson):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"]
    """The length, or a deadline."""


class ResponseJson(AnswerJson):
    """An answer."""

    id: str
    """The request's id, behind `resp_`."""
    object: Annotated[Literal["response"], kind_of("answer")]
    created_at: Count
    """When the answer was begun, in seconds since 1970."""
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    """How far the answer is."""
    background: Literal[False]
    """Always false."""
    error: ResponseErrorJson | None
    """Why the answer failed."""
    incomplete_details: IncompleteJson | None
    """Why the answer is incomplete."""
    instructions: str | None
    """As in the request, without lines that agents write anew for every request."""
    max_output_tokens: Annotated[Count | None, AS_ASKED]
    metadata: Annotated[dict[str, str], AS_ASKED]
    model: str
    """The served model."""
    output: list[OutputItemJson]
    """The items, in order; none when a stream begins."""
    parallel_tool_calls: Annotated[bool, AS_ASKED]
    previous_response_id: None
    """Always null: answers are not stored."""
    reasoning: Annotated[dict[str, Any], AS_ASKED]
    store: Literal[False]
    """Always false."""
    temperature: Annotated[float, AS_ASKED]
    text: Annotated[dict[str, Any], AS_ASKED]
    tool_choice: Annotated[Any, AS_ASKED]
    tools: Annotated[list[dict[str, Any]], AS_ASKED]
    top_logprobs: Annotated[Count, AS_ASKED]
    top_p: Annotated[float, AS_ASKED]
    truncation: Literal["disabled"]
    """Always `disabled`."""
    usage: ResponseUsageJson | None
    """Numbers of tokens of the prompt and the answer; null until the answer is complete."""


class ResponseEvent(AnswerJson):
    """A part of a stream."""

    sequence_number: Count
    """Number of the event."""


class LifecycleEventJson(ResponseEvent):
    """The answer as it is."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    """The kind of event."""
    response: ResponseJson
    """The answer."""


class ItemEventJson(ResponseEvent):
    """An item begins or is complete."""

    type: Annotated[Literal["response.output_item.added", "response.output_item.done"], kind_of("event")]
    output_index: Count
    """Number of the item."""
    item: OutputItemJson
    """The item."""


class OfItemEvent(ResponseEvent):
    """Something in an item."""

    item_id: str
    """The item's name."""
    output_index: Count
    """Number of the item."""


class PartEventJson(OfItemEvent):
    """A part of an item begins or is complete."""

    type: Annotated[Literal["response.content_part.added", "response.content_part.done"], kind_of("event")]
    content_index: PartNumber
    part: OutputTextJson | ReasoningTextJson
    """The part."""


class OutputDeltaJson(OfItemEvent):
    """The next part of a text."""

    type: Annotated[Literal["response.output_text.delta"], kind_of("event")]
    content_index: PartNumber
    delta: str
    """The next part of the text."""
    logprobs: list[ChatTokenJson]
    """One item for each token, if `include` asks for them."""


class OutputDoneJson(OfItemEvent):
    """A text is complete."""

    type: Annotated[Literal["response.output_text.done"], kind_of("event")]
    content_index: PartNumber
    text: str
    """The text."""
    logprobs: list[ChatTokenJson]
    """One item for each token, if `include` asks for them."""


class ReasoningDeltaJson(OfItemEvent):
    """The next part of the reasoning."""

    type: Annotated[Literal["response.reasoning_text.delta"], kind_of("event")]
    content_index: PartNumber
    delta: str
    """The next part of the text."""


class ReasoningDoneJson(OfItemEvent):
    """The reasoning is complete."""

    type: Annotated[Literal["response.reasoning_text.done"], kind_of("event")]
    content_index: PartNumber
    text: str
    """The text."""


class ArgumentsDeltaJson(OfItemEvent):
    """The next part of a call's arguments."""

    type: Annotated[Literal["response.function_call_arguments.delta"], kind_of("event")]
    delta: str
    """The next part of the arguments."""


class ArgumentsDoneJson(OfItemEvent):
    """The arguments of a call are complete."""

    type: Annotated[Literal["response.function_call_arguments.done"], kind_of("event")]
    name: str
    """The function's name."""
    arguments: str
    """The arguments, as JSON."""


class CustomInputDeltaJson(OfItemEvent):
    """The text for a custom tool, which is sent as a whole."""

    type: Annotated[Literal["response.custom_tool_call_input.delta"], kind_of("event")]
    delta: str
    """The text."""


class CustomInputDoneJson(OfItemEvent):
    """The text for a custom tool is complete."""

    type: Annotated[Literal["response.custom_tool_call_input.done"], kind_of("event")]
    input: str
    """The text."""


ResponseEventJson = (
    LifecycleEventJson
    | ItemEventJson
    | PartEventJson
    | OutputDeltaJson
    | OutputDoneJson
    | ReasoningDeltaJson
    | ReasoningDoneJson
    | ArgumentsDeltaJson
    | ArgumentsDoneJson
    | CustomInputDeltaJson
    | CustomInputDoneJson
)
