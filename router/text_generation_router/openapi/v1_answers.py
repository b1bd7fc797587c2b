"""The answers of OpenAI's routes, as the OpenAPI document describes them."""

from typing import Annotated, Literal

from text_generation_router.api.common.fields import kind_of
from text_generation_router.openapi.native_answers import AnswerJson, Count, Logprob

Reason = Literal["stop", "length", "tool_calls", "stop_sequence", "eos_token", "deadline", ""]


class CachedJson(AnswerJson):
    """The part of the prompt that was not computed again."""

    cached_tokens: Count
    """Number of the prompt's tokens that the prefix cache had."""


class GeneratedJson(AnswerJson):
    """Parts of the generated tokens."""

    reasoning_tokens: Count
    """Number of tokens of the model's reasoning."""


class UsageJson(AnswerJson):
    """Numbers of tokens."""

    prompt_tokens: Count
    """Tokens of the prompts; each is counted once, whatever `n` is."""
    completion_tokens: Count
    """Generated tokens."""
    total_tokens: Count
    """The sum of both."""
    prompt_tokens_details: CachedJson | None = None
    """Absent in `continuous_usage_stats`."""
    completion_tokens_details: GeneratedJson | None = None
    """Present in chats whose answers may have reasoning or calls of tools."""


class HeadJson(AnswerJson):
    """The first fields of every answer."""

    id: str
    """The request's id, behind `chatcmpl-` or `cmpl-`."""
    created: Count
    """When the answer was made, in seconds since 1970."""
    model: str
    """The served model."""
    system_fingerprint: str
    """The server's version."""


class AlternativeJson(AnswerJson):
    """A token that could stand at a place of the prompt."""

    logprob: Logprob
    rank: int | None
    """1 for the most likely token; null: not among those asked for."""
    decoded_token: str
    """The token's text."""


PromptLogprobs = list[dict[str, AlternativeJson] | None]


class CompletionLogprobsJson(AnswerJson):
    """Log-probabilities; the lists have an item for each token."""

    tokens: list[str]
    """The tokens' texts."""
    token_logprobs: list[float | None]
    """The tokens' log-probabilities; null for the first token of a prompt."""
    top_logprobs: list[dict[str, float | None] | None]
    """The most likely tokens, and the token itself, with their log-probabilities."""
    text_offset: list[Count]
    """Where each token begins in the choice's text, in characters. A token that a stop string has cut off begins behind
    the end of the text."""


class CompletionTextJson(AnswerJson):
    """One text, or a part of it in a stream."""

    index: Count
    """Number of the text: prompts times `n`, in order."""
    text: str
    """The text."""
    logprobs: CompletionLogprobsJson | None
    """If `logprobs` is given."""
    prompt_logprobs: PromptLogprobs | None = None
    """For each token of the prompt its alternatives by token id, if `prompt_logprobs` is given."""
    prompt_token_ids: list[Count] | None = None
    """The prompt's token ids, if `return_token_ids` is true."""
    token_ids: list[Count] | None = None
    """The text's token ids, if `return_token_ids` is true."""


class CompletionChoiceJson(CompletionTextJson):
    """One text."""

    finish_reason: Reason
    """Why the text ended: `stop` or `length`; others with `--tgi-dialect` only."""


class CompletionChunkChoiceJson(CompletionTextJson):
    """A part of one text."""

    finish_reason: Reason | None
    """Why the text ended, in its last chunk."""


class CompletionJson(HeadJson):
    """The texts of all prompts."""

    object: Annotated[Literal["text_completion"], kind_of("answer")]
    choices: list[CompletionChoiceJson]
    """Prompts times `n` texts, in this order."""
    usage: UsageJson
    """Numbers of tokens that the request read and generated."""


class CompletionChunkJson(HeadJson):
    """One event of a stream."""

    object: Annotated[Literal["text_completion"], kind_of("answer")]
    choices: list[CompletionChunkChoiceJson]
    """One part of one text; empty in the event that has the usage."""
    usage: UsageJson | None = None
    """With `stream_options`: null, and numbers in the last event, or in all with `continuous_usage_stats`."""


class ModelJson(AnswerJson):
    """A served model."""

    id: str
    """The model's name."""
    object: Annotated[Literal["model"], kind_of("entry")]
    created: Count
    """Always 0: the server does not know."""
    owned_by: str
    """The model's name again."""
    root: str
    """The model's name again."""
    max_model_len: Count
    """Largest number of tokens of a prompt and its text together."""
    parent: str | None = None
    """The name of the served model, if this is a LoRA adapter of it."""


class ModelsJson(AnswerJson):
    """The served model, then its LoRA adapters."""

    object: Annotated[Literal["list"], kind_of("answer")]
    data: list[ModelJson]
    """The model."""


class AnthropicModelJson(AnswerJson):
    """A served model, in Anthropic's form."""

    type: Annotated[Literal["model"], kind_of("entry")]
    id: str
    """The model's name."""
    display_name: str
    """The model's name again."""
    created_at: str
    """Always the beginning of 1970: the server does not know."""


class AnthropicModelsJson(AnswerJson):
    """The served models, one, in Anthropic's form."""

    data: list[AnthropicModelJson]
    """The model."""
    has_more: Literal[False]
    """Whether there are more models."""
    first_id: str
    """The name of the first model."""
    last_id: str
    """The name of the last model."""


class ToldErrorJson(AnswerJson):
    """An error in OpenAI's form."""

    message: str
    """What is wrong, why, and what to do."""
    type: str
    """OpenAI's kind of error, such as `invalid_request_error`."""
    param: str | None
    """The field that is wrong."""
    code: str | None
    """OpenAI's code, such as `context_length_exceeded`."""


class V1ErrorJson(AnswerJson):
    """An error of OpenAI's routes; in a stream, an event."""

    error: ToldErrorJson
    """The error as OpenAI's clients read it."""
    error_type: str
    """The kind of error, as TGI names it."""


# The answers of chats, as the OpenAPI document describes them.
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
    """What a chunk adds to one of the message's calls."""

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
    """The model's reasoning, which comes before its answer."""
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
    """Numbers of tokens that the request read and generated."""
    prompt_logprobs: PromptLogprobs | None = None
    """For each token of the prompt its alternatives by token id, if `prompt_logprobs` is given."""


class ChatChunkJson(ChatHeadJson):
    """One event of a stream."""

    object: Annotated[Literal["chat.completion.chunk"], kind_of("answer")]
    choices: list[ChatChunkChoiceJson]
    """One part of one message; empty in events that have the usage or the prompt's token ids."""
    usage: UsageJson | None = None
    """With `stream_options`: null, and numbers in the last event, or in all with `continuous_usage_stats`."""
