"""The bodies that the routes accept. Parsed once per request; also the source of the API's documentation."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from text_generation_router.api.fields import (
    F32,
    I32,
    MESSAGE_LIMIT,
    PROMPT_LIMIT,
    STOP_LIMIT,
    U32,
    U64,
    Body,
    Ids,
    LogitBias,
    Strings,
    Texts,
    listed,
)
from text_generation_router.errors import ValidationError
from text_generation_router.text.chat_template import Message
from text_generation_router.text.token_choice import MAX_LISTED
from text_generation_router.text.validation import AskedParameters, AskedSampling

Priority = Annotated[
    I32 | None, Field(description="Among one tenant's waiting requests, the lowest priority goes first. Default: 0.")
]
Timeout = Annotated[
    F32 | None,
    Field(
        description="Seconds from the receipt of the request. A text that is not complete by then ends there, with the"
        " finish reason `deadline`. If `X-Request-Timeout` is given as well, the shorter time applies."
    ),
]

CacheSalt = Annotated[
    str | None,
    Field(
        max_length=128,
        description="Requests share cached prefixes only if they have the same API key and the same salt. A client that"
        " does not know the salt cannot tell from an answer's speed which prompts were sent before. Default: no salt."
        " Requests without a salt share prefixes within their API key or, if the server has no keys, with each other.",
    ),
]
MinTokens = Annotated[
    U32 | None,
    Field(
        description="Until the output has this many tokens, no end token is chosen, and no stop string ends the text."
    ),
]


class SamplingFields(Body):
    """The fields that the native routes and OpenAI's have in common for the parameters of `Sampling`."""

    temperature: F32 | None = None
    repetition_penalty: F32 | None = None
    frequency_penalty: F32 | None = None
    top_k: I32 | None = None
    top_p: F32 | None = None
    typical_p: F32 | None = None
    seed: U64 | None = None
    min_p: Annotated[
        F32 | None,
        Field(description="Excludes tokens that are less likely than this share of the most likely token. 0: off."),
    ] = None
    presence_penalty: Annotated[
        F32 | None,
        Field(description="Subtracted from the logit of each token that the output has already. -2 to 2; 0: off."),
    ] = None
    logit_bias: Annotated[
        LogitBias | None,
        Field(
            description="Numbers from -100 to 100 that are added to the logits of tokens, by token id, for at most"
            f" {MAX_LISTED} tokens.",
            examples=[{"262": -100}],
        ),
    ] = None
    allowed_token_ids: Annotated[
        Ids | None,
        listed("allowed_token_ids"),
        Field(description=f"The only tokens that can be chosen: 1 to {MAX_LISTED} token ids. Default: all tokens."),
    ] = None
    bad_words: Annotated[
        Strings | None,
        listed("bad_words"),
        Field(
            description="Words that the output does not contain: no token completes the tokens of a word, with or"
            f" without a space before it. The tokens of all words are at most {MAX_LISTED}."
        ),
    ] = None
    stop_token_ids: Annotated[
        Ids | None,
        listed("stop_token_ids"),
        Field(
            description="Tokens that end the text, besides the model's own end tokens, and also if these are ignored."
            f" At most {MAX_LISTED} token ids."
        ),
    ] = None

    def sampling_values(self) -> dict[str, Any]:
        """All fields; the values of those that `Sampling` has in its types."""
        values = dict(vars(self))
        if self.logit_bias is not None:
            values["logit_bias"] = tuple((int(token_id), value) for token_id, value in self.logit_bias.items())
        if self.allowed_token_ids is not None:
            values["allowed_token_ids"] = tuple(self.allowed_token_ids)
        return values


class GenerateParameters(SamplingFields):
    best_of: U64 | None = None
    do_sample: bool = False
    max_new_tokens: U32 | None = None
    return_full_text: bool | None = None
    stop: Annotated[Strings, STOP_LIMIT] = Field(default_factory=list)
    truncate: U64 | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    top_n_tokens: U32 | None = None
    ignore_eos_token: bool = False
    min_new_tokens: MinTokens = None
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None

    def sampling_parameters(self) -> AskedParameters:
        return AskedParameters(
            AskedSampling.of(self.sampling_values()),
            best_of=self.best_of,
            max_new_tokens=self.max_new_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            truncate=self.truncate,
            ignore_eos_token=self.ignore_eos_token,
            priority=self.priority,
            timeout=self.timeout,
            cache_salt=self.cache_salt,
        )


def sampled_by_default() -> GenerateParameters:
    """As in TGI: without a `parameters` field tokens are sampled, with `"parameters": {}` decoding is greedy."""
    return GenerateParameters(do_sample=True)


class GenerateRequest(Body):
    inputs: str
    parameters: GenerateParameters = Field(default_factory=sampled_by_default)


class CompatGenerateRequest(GenerateRequest):
    stream: bool = False


class StreamOptions(Body):
    include_usage: bool = False


# OpenAI's values that mean the same as no value. A temperature of 0 is also greedy.
MEAN_NONE: dict[str, tuple[int, ...]] = {"temperature": (0,), "top_k": (0, -1), "top_p": (1,), "typical_p": (1,)}


class OpenAIRequest(SamplingFields):
    """Fields that completions and chat have in common."""

    model: Annotated[
        str | None, Field(max_length=512, description="Does not choose a model. A chat's answer repeats it.")
    ] = None
    max_tokens: U32 | None = None
    top_k: Annotated[I32 | None, Field(description="0 and -1 mean all tokens, as does a missing value.")] = None
    stop: Annotated[Texts | None, STOP_LIMIT] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    min_tokens: MinTokens = None
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_parameters(self, max_new_tokens: int | None, top_n_tokens: int | None) -> AskedParameters:
        """OpenAI's meanings: temperature 0 is greedy whatever the other fields say, a missing temperature is 1.0,
        top_p 1 has no effect."""
        greedy = self.temperature == 0
        given = self.sampling_values()
        values = {name: value for name, value in given.items() if value not in MEAN_NONE.get(name, ())}
        values |= {"do_sample": not greedy, "top_n_tokens": top_n_tokens, "min_new_tokens": self.min_tokens}
        return AskedParameters(
            AskedSampling.of(values, greedy),
            max_new_tokens=max_new_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            ignore_eos_token=bool(self.ignore_eos),
            priority=self.priority,
            timeout=self.timeout,
            cache_salt=self.cache_salt,
        )


class CompletionRequest(OpenAIRequest):
    prompt: Annotated[Texts, PROMPT_LIMIT] = Field(min_length=1)
    logprobs: U32 | None = None


def flatten_chunks(content: Any) -> Any:
    """Joins a list of text chunks into one string. Any other value is left to the type check."""
    if not isinstance(content, list):
        return content
    return "".join(_chunk_text(chunk) for chunk in content)


def _chunk_text(chunk: Any) -> str:
    kind = chunk.get("type") if isinstance(chunk, dict) else None
    if kind in ("image_url", "input_audio", "file", "audio_url", "video_url"):
        raise ValidationError(f"`{kind}` in `messages` is not supported yet")
    if kind != "text" or not isinstance(chunk.get("text"), str):
        raise ValueError('Input should be a string or a list of {"type": "text", "text": string}')
    return str(chunk["text"])


class MessageBody(Body):
    role: str
    content: Annotated[str, BeforeValidator(flatten_chunks, json_schema_input_type=str | list[dict[str, Any]])]


class ChatOptions(OpenAIRequest):
    """All fields of a chat except its messages."""

    max_completion_tokens: U32 | None = None
    logprobs: bool | None = None
    top_logprobs: U32 | None = None


class ChatRequest(ChatOptions):
    messages: Annotated[list[MessageBody], MESSAGE_LIMIT] = Field(min_length=1, fail_fast=True)

    def conversation(self) -> tuple[Message, ...]:
        return tuple(Message(message.role, message.content) for message in self.messages)


class RenderedChat(ChatOptions):
    """A chat whose messages the template has already turned into a prompt."""

    prompt: str
