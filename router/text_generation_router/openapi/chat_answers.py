"""The answers of chats, as the OpenAPI document describes them."""

from typing import Annotated, Literal

from text_generation_router.api.common.fields import kind_of
from text_generation_router.openapi.native_answers import AnswerJson, Count, Logprob
from text_generation_router.openapi.v1_answers import HeadJson, PromptLogprobs, Reason, UsageJson


class CalledJson(AnswerJson):
    """The function that is called."""

    name: str
    """The function's name."""
    arguments: str
    """The arguments of the call: a JSON object as text."""
    description: None = None
    """With `--tgi-dialect` only."""


class CallJson(AnswerJson):
    """One call of a tool."""

    id: str
    """Names the call in the message of the role `tool` that has its result."""
    type: Annotated[Literal["function"], kind_of("tool")]
    function: CalledJson
    """The function and its arguments."""


class CalledDeltaJson(AnswerJson):
    """What a chunk adds to a call."""

    name: str | None = None
    """The function's name, in the call's first chunk."""
    arguments: str
    """The next part of the arguments."""


class CallDeltaJson(AnswerJson):
    """What a chunk adds to one of the calls."""

    index: Count
    """Number of the call."""
    id: str | None = None
    """In the call's first chunk; with `--tgi-dialect` in all."""
    type: Literal["function"] | None = None
    """In the same chunks."""
    function: CalledDeltaJson
    """What is added."""


class MessageJson(AnswerJson):
    """The model's message."""

    role: Literal["assistant"]
    """The sender."""
    content: str | None = None
    """The text; null beside calls without text, and absent beside TGI's."""
    reasoning_content: str | None = None
    """What the model has written for itself before its answer."""
    reasoning: str | None = None
    """The same; clients read one of the two names."""
    tool_calls: list[CallJson] | None = None
    """Calls of tools."""


class DeltaJson(AnswerJson):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    """The sender, in the first chunk."""
    content: str | None = None
    """The next part of the text."""
    reasoning_content: str | None = None
    """The next part of the reasoning."""
    reasoning: str | None = None
    """The same."""
    tool_calls: list[CallDeltaJson] | None = None
    """The beginning of a call, or the next part of its arguments."""


class NamedTokenJson(AnswerJson):
    """A token with its log-probability."""

    token: str
    """The token's text."""
    logprob: Logprob
    bytes: list[int] | None = None
    """The bytes that the token adds; absent with `--tgi-dialect`."""


class ChatTokenJson(NamedTokenJson):
    """A token, and the most likely tokens at its place."""

    top_logprobs: list[NamedTokenJson]
    """The most likely tokens; the request's field `top_logprobs` is their number."""


class ChatLogprobsJson(AnswerJson):
    """Log-probabilities of a message's tokens."""

    content: list[ChatTokenJson]
    """One item for each token."""


class ChatPartJson(AnswerJson):
    """Fields of whole messages and of their parts."""

    index: Count
    """Number of the message, of `n`."""
    logprobs: ChatLogprobsJson | None
    """If `logprobs` is true."""
    token_ids: list[Count] | None = None
    """The token ids, if `return_token_ids` is true."""


class ChatChoiceJson(ChatPartJson):
    """One message."""

    message: MessageJson
    """The message."""
    finish_reason: Reason
    """Why the text ended: `stop`, `length` or `tool_calls`; others with `--tgi-dialect` only."""


class ChatChunkChoiceJson(ChatPartJson):
    """A part of one message."""

    delta: DeltaJson
    """What is added."""
    finish_reason: Reason | None
    """Why the text ended, in its last chunk."""


class ChatHeadJson(HeadJson):
    """Fields of whole answers and of chunks."""

    prompt_token_ids: list[Count] | None = None
    """The prompt's token ids, if `return_token_ids` is true; in a stream, in its first event."""


class ChatJson(ChatHeadJson):
    """The model's messages."""

    object: Annotated[Literal["chat.completion"], kind_of("answer")]
    choices: list[ChatChoiceJson]
    """`n` messages."""
    usage: UsageJson
    """The tokens of the request."""
    prompt_logprobs: PromptLogprobs | None = None
    """For each token of the prompt its alternatives by token id, if `prompt_logprobs` is given."""


class ChatChunkJson(ChatHeadJson):
    """One event of a stream."""

    object: Annotated[Literal["chat.completion.chunk"], kind_of("answer")]
    choices: list[ChatChunkChoiceJson]
    """One part of one message; empty in events that have the usage or the prompt's token ids."""
    usage: UsageJson | None = None
    """With `stream_options`: null, and numbers in the last event, or in all with `continuous_usage_stats`."""
