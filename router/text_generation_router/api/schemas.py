"""The bodies that the routes accept. Parsed once per request; also the source of the API's documentation."""

from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from text_generation_router.api.fields import (
    F32,
    I32,
    MESSAGE_LIMIT,
    STOP_LIMIT,
    U32,
    U64,
    Body,
    Ids,
    LogitBias,
    Prompts,
    Seed,
    Strings,
    Texts,
    TokenIds,
    listed,
)
from text_generation_router.errors import ValidationError
from text_generation_router.text.chat_template import Conversation, Message
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
    """The logits are divided by it before a token is drawn; > 0. Default: 1."""
    repetition_penalty: F32 | None = None
    """Makes tokens of the prompt and of the output less likely if > 1; > 0. Default: 1."""
    frequency_penalty: F32 | None = None
    """Subtracted from a token's logit for each time that the output has the token. -2 to 2; 0: off."""
    top_k: I32 | None = None
    """A token is drawn from this many most likely tokens. Default: all."""
    top_p: F32 | None = None
    """A token is drawn from the most likely tokens that together have this probability; > 0 and < 1. Default: all."""
    typical_p: F32 | None = None
    """A token is drawn from the most typical tokens that together have this probability; > 0 and < 1. Default: all."""
    seed: U64 | None = None
    """Requests with the same seed draw the same tokens. Default: a random seed."""
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
    """Number of texts that are generated; the most likely one is the answer. More than 1 needs sampling."""
    do_sample: bool = False
    """Whether tokens are drawn. If not, and no other field asks for it, the most likely token is taken."""
    max_new_tokens: U32 | None = None
    """Most new tokens. Default: as many as fit."""
    return_full_text: bool | None = None
    """Whether the text begins with the prompt. Default: false; on `/` true."""
    stop: Annotated[Strings, STOP_LIMIT] = Field(default_factory=list)
    """The text ends behind the first of these strings."""
    truncate: U64 | None = None
    """Keeps this many tokens of the prompt, the last ones."""
    watermark: bool = False
    """Whether the choice of tokens leaves a watermark."""
    details: bool = False
    """Adds `details` to the answer."""
    decoder_input_details: bool = False
    """Adds the prompt's tokens to the details; with their log-probabilities if the server has `--enable-prefill-
    logprobs`."""
    top_n_tokens: U32 | None = None
    """Adds this many most likely tokens at the place of each token."""
    ignore_eos_token: bool = False
    """Whether the text goes on behind an end token."""
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
    """The prompt."""
    parameters: GenerateParameters = Field(default_factory=sampled_by_default)
    """How to generate. Without this field tokens are drawn; with `{}` they are not."""


class CompatGenerateRequest(GenerateRequest):
    stream: bool = False
    """Whether the answer is a stream."""


class DetokenizeRequest(Body):
    tokens: TokenIds
    """Token ids."""
    skip_special_tokens: bool = True
    """Whether the text is without special tokens."""
    model: str | None = None
    """Has no effect."""


class StreamOptions(Body):
    include_usage: Annotated[
        bool | None, Field(description="Ends the stream with an event that has the usage of the whole request.")
    ] = None
    continuous_usage_stats: Annotated[
        bool | None, Field(description="With `include_usage`: every event has the usage until then.")
    ] = None


# OpenAI's values that mean the same as no value. A temperature of 0 is also greedy.
MEAN_NONE: dict[str, tuple[int, ...]] = {"temperature": (0,), "top_k": (0, -1), "top_p": (1,), "typical_p": (1,)}
# Most log-probabilities of a token that an OpenAI client may ask for, whatever --max-top-n-tokens says.
MAX_LOGPROBS = 20


class OpenAIRequest(SamplingFields):
    """Fields that completions and chat have in common."""

    model: Annotated[
        str | None,
        Field(
            max_length=512,
            description="Does not choose a model. A name that the server does not have is served all the same and named"
            " in `X-Ignored-Parameters`; with `--strict-parameters` it is refused.",
        ),
    ] = None
    max_tokens: Annotated[U32 | None, Field(description="Most new tokens. Default: as many as fit.")] = None
    n: Annotated[U32 | None, Field(description="Number of texts for each prompt. Default: 1.")] = None
    top_k: Annotated[I32 | None, Field(description="0 and -1 mean all tokens, as does a missing value.")] = None
    seed: Annotated[
        Seed | None, Field(description="With `n` > 1 the texts have this seed and the numbers that follow it.")
    ] = None
    do_sample: Annotated[bool | None, Field(description="false means the same as a temperature of 0.")] = None
    stop: Annotated[Texts | None, STOP_LIMIT] = None
    """The text ends before the first of these strings; one string or a list."""
    include_stop_str_in_output: Annotated[
        bool | None, Field(description="Whether the text keeps the stop string that ended it. Default: false.")
    ] = None
    stream: bool | None = None
    """Whether the answer is a stream."""
    stream_options: StreamOptions | None = None
    """What a stream has besides its text; only with `stream`."""
    ignore_eos: bool | None = None
    """Whether the text goes on behind an end token."""
    min_tokens: MinTokens = None
    skip_special_tokens: Annotated[
        bool | None, Field(description="Whether the text is without special tokens. Default: true.")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Field(
            description="Whether the tokenizer adds special tokens to the prompt. Default: true for completions; false"
            " for chats, whose template writes them."
        ),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        Field(ge=-1, description="Keeps this many tokens of the prompt; -1: as many as the server takes."),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None, Field(description="Where the prompt is cut. Default: left, its beginning.")
    ] = None
    prompt_logprobs: Annotated[
        U32 | None,
        Field(
            description="Adds the log-probability of each token of the prompt, and of this many most likely tokens in"
            " its place; at most 20; not in streams."
        ),
    ] = None
    return_token_ids: Annotated[
        bool | None, Field(description="Adds `token_ids` to each choice, and `prompt_token_ids`.")
    ] = None
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None

    @property
    def choices(self) -> int:
        """Number of texts for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling_parameters(
        self, max_new_tokens: int | None, top_n_tokens: int | None, keeps_stop: bool = False
    ) -> AskedParameters:
        """OpenAI's meanings: temperature 0 is greedy whatever the other fields say, a missing temperature is 1.0,
        top_p 1 has no effect. `keeps_stop`: what a missing `include_stop_str_in_output` means."""
        greedy = self.temperature == 0 or self.do_sample is False
        given = self.sampling_values()
        values = {name: value for name, value in given.items() if value not in MEAN_NONE.get(name, ())}
        values |= {"do_sample": not greedy, "top_n_tokens": top_n_tokens, "min_new_tokens": self.min_tokens}
        keep = self.include_stop_str_in_output
        return AskedParameters(
            AskedSampling.of(values, greedy),
            max_new_tokens=max_new_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            truncate=self.truncate_prompt_tokens,
            ignore_eos_token=bool(self.ignore_eos),
            priority=self.priority,
            timeout=self.timeout,
            cache_salt=self.cache_salt,
            keeps_last=self.truncation_side != "right",
            keeps_stop=keeps_stop if keep is None else keep,
            skips_special=self.skip_special_tokens is not False,
            returns_ids=bool(self.return_token_ids),
            max_top_n_tokens=MAX_LOGPROBS,
        )


class CompletionRequest(OpenAIRequest):
    prompt: Annotated[
        Prompts, Field(description="A text, a list of token ids, or a list of texts or of lists of token ids.")
    ]
    echo: Annotated[
        bool | None,
        Field(
            description="Begins each text with the prompt, and `logprobs` with the prompt's tokens. `max_tokens` may be"
            " 0 then: nothing is generated."
        ),
    ] = None
    logprobs: Annotated[
        U32 | None,
        Field(description="Adds the log-probability of each token, and of this many most likely tokens; at most 20."),
    ] = None


def flatten_chunks(content: Any) -> Any:
    """Joins a list of text chunks into one string, and makes an absent content "". Any other value is left to the type
    check."""
    if not isinstance(content, list):
        return "" if content is None else content
    return "".join(_chunk_text(chunk) for chunk in content)


def _chunk_text(chunk: Any) -> str:
    kind = str(chunk.get("type")) if isinstance(chunk, dict) else ""
    if kind in ("image_url", "input_image", "input_audio", "file", "audio_url", "video_url"):
        raise ValidationError(f"`{kind}` in `messages` is not supported yet")
    text = chunk.get(TEXTS_OF_CHUNKS.get(kind)) if isinstance(chunk, dict) else None
    if not isinstance(text, str):
        raise ValueError('Input should be a string or a list of {"type": "text", "text": string}')
    return text


# Where chunks of text have their text. A refusal is a text that OpenAI's models write.
TEXTS_OF_CHUNKS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class MessageBody(Body):
    """One message. Its other fields, such as `name`, `tool_calls` or `reasoning_content`, go to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    """The sender, such as `user` or `assistant`; the chat template says which there are."""
    content: Annotated[
        str, BeforeValidator(flatten_chunks, json_schema_input_type=str | list[dict[str, Any]] | None)
    ] = ""
    """The text, or a list of parts `{"type": "text", "text": …}`."""

    def message(self) -> Message:
        others = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        if "tool_calls" in others:
            others["tool_calls"] = with_objects(others["tool_calls"])
        return Message(self.role, self.content, others)


def with_objects(tool_calls: Any) -> Any:
    """The calls with their arguments as objects, which templates expect; OpenAI's clients send them as JSON texts."""
    if not isinstance(tool_calls, list):
        return tool_calls
    return [_with_object(call) for call in tool_calls]


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        return call | {"function": function | {"arguments": orjson.loads(arguments)}}
    except orjson.JSONDecodeError:
        return call  # a text that is not JSON is the template's to show


class ChatOptions(OpenAIRequest):
    """All fields of a chat except its messages."""

    max_completion_tokens: Annotated[U32 | None, Field(description="The newer name of `max_tokens`.")] = None
    logprobs: Annotated[bool | None, Field(description="Adds the log-probability of each token.")] = None
    top_logprobs: Annotated[
        U32 | None, Field(description="With `logprobs`: those of this many most likely tokens as well; at most 20.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None,
        Field(
            description="Whether the prompt ends with the beginning of the assistant's answer. Default: true, unless"
            " the last message is the assistant's, which is then continued."
        ),
    ] = None
    continue_final_message: Annotated[
        bool | None, Field(description="Whether the last message is continued. Default: if it is the assistant's.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(description="Variables for the chat template, such as `enable_thinking`.")
    ] = None


class ChatRequest(ChatOptions):
    messages: Annotated[list[MessageBody], MESSAGE_LIMIT] = Field(min_length=1, fail_fast=True)
    """The conversation, oldest message first."""

    def conversation(self) -> Conversation:
        return Conversation(
            tuple(message.message() for message in self.messages),
            self.add_generation_prompt,
            self.continue_final_message,
            self.chat_template_kwargs or {},
        )

    @model_validator(mode="after")
    def _check_turn(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValidationError("`continue_final_message` and `add_generation_prompt` must not both be true")
        return self


class RenderedChat(ChatOptions):
    """A chat whose messages the template has already turned into a prompt."""

    prompt: str


class VertexRequest(Body):
    """Vertex AI's form of several requests."""

    instances: tuple[GenerateRequest | ChatOptions, ...] = Field(description="Bodies of /generate, or of chats.")
