"""The bodies that the routes of /v1 accept. The docstrings of fields are their descriptions in the OpenAPI document."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from text_generation_router.api.common.fields import (
    I32,
    MESSAGE_LIMIT,
    STOP_LIMIT,
    U32,
    AnsweredRequest,
    Body,
    Prompts,
    Seed,
    Strings,
    Texts,
)
from text_generation_router.api.common.form_fields import LIMITED, Object, asked_grammar
from text_generation_router.api.common.messages import (
    Calling,
    Choice,
    MessageBody,
    Mode,
    ToolChoice,
    Tools,
    read_choice,
)
from text_generation_router.api.tgi.schemas import CacheSalt, MinTokens, Priority, SamplingFields, Timeout
from text_generation_router.errors import ValidationError
from text_generation_router.text.grammars.asked import MAX_CHOICES
from text_generation_router.text.grammars.tool_grammar import NO_TOOL_DESCRIBED, TOOL_PROMPT, CallWays, described
from text_generation_router.text.templates.chat_template import Conversation
from text_generation_router.text.validation import AskedParameters, AskedSampling

# The fields of /v1 that set the form of the text.


class FormFields(SamplingFields):
    """The fields of /v1 that set the form of the text. At most one of these fields may ask for a form."""

    response_format: Annotated[
        Object | None,
        LIMITED,
        Field(
            description='`{"type": "json_schema", "json_schema": {"schema": …}}`; `{"type": "json_object"}` for any'
            ' object, or with a `"schema"`, as in llama.cpp; TGI\'s `{"type", "value"}`; or `{"type": "text"}`.'
            " Unless `json_schema` has `strict` true, keywords that no grammar can follow are left out of it and"
            " named in `X-Ignored-Parameters`. Default of `strict`: false.",
            examples=[
                {
                    "type": "json_schema",
                    "json_schema": {"name": "age", "schema": {"properties": {"age": {"type": "integer"}}}},
                }
            ],
        ),
    ] = None
    structured_outputs: Annotated[
        Object | None,
        LIMITED,
        Field(description="vLLM's: one of `json`, `json_object`, `regex`, `choice`, `grammar`."),
    ] = None
    guided_json: Annotated[
        Object | str | None, LIMITED, Field(description="A JSON schema, as an object or as text.")
    ] = None
    guided_regex: Annotated[
        str | None, LIMITED, Field(description="A regular expression that the whole text matches.")
    ] = None
    guided_choice: Annotated[
        Strings | None, LIMITED, Field(description=f"The text is one of these strings, at most {MAX_CHOICES}.")
    ] = None
    guided_grammar: Annotated[
        str | None, LIMITED, Field(description="A grammar in llguidance's Lark syntax or in llama.cpp's GBNF.")
    ] = None
    json_schema: Annotated[
        Object | str | None, LIMITED, Field(description="SGLang's and llama.cpp's name of `guided_json`.")
    ] = None
    regex: Annotated[str | None, LIMITED, Field(description="SGLang's name of `guided_regex`.")] = None
    ebnf: Annotated[str | None, LIMITED, Field(description="SGLang's name of `guided_grammar`.")] = None
    grammar: Annotated[
        Object | str | None,
        LIMITED,
        Field(description='llama.cpp\'s name of `guided_grammar`, or TGI\'s `{"type", "value"}`.'),
    ] = None


class StreamOptions(Body):
    include_usage: Annotated[
        bool | None, Field(description="Ends the stream with an event that has the usage of the whole request.")
    ] = None
    continuous_usage_stats: Annotated[
        bool | None, Field(description="With `include_usage`: every event has the usage until then.")
    ] = None


# Values that mean the same as a missing value in OpenAI's API. A temperature or `top_p` of 0 is also greedy.
MEAN_NONE: dict[str, tuple[int, ...]] = {"temperature": (0,), "top_k": (0, -1), "top_p": (0, 1), "typical_p": (1,)}
# The allowed values of these parameters on /v1: more than on native routes, whose texts of refusals would be wrong
# here.
TAKEN: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: value >= 0, ">= 0.0"),
    "top_k": (lambda value: value >= -1, ">= -1"),
    "top_p": (lambda value: 0 <= value <= 1, ">= 0.0 and <= 1.0"),
    "typical_p": (lambda value: 0 < value <= 1, "> 0.0 and <= 1.0"),
}
# Maximum number of log-probabilities of a token in OpenAI's API, whatever --max-top-n-tokens is.
MAX_LOGPROBS = 20
MAX_DOCUMENTS = 1024  # maximum number of documents of a chat


class OpenAIRequest(FormFields, AnsweredRequest):
    """Fields that completions and chat have in common."""

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
    stream_options: StreamOptions | None = None
    """What a stream contains besides its text; only with `stream`."""
    ignore_eos: bool | None = None
    """Whether the text goes on after an end token."""
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
        Field(
            ge=-1,
            description="Keeps this many tokens of the prompt; -1: as many as the server takes beside `max_tokens`.",
        ),
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
        """OpenAI's meanings: temperature 0 and top_p 0 are greedy whatever the other fields say, a missing temperature
        is 1.0, top_p 1 has no effect. `keeps_stop`: what a missing `include_stop_str_in_output` means. Raises
        ValidationError."""
        greedy = 0 in (self.temperature, self.top_p) or self.do_sample is False
        given = self.sampling_values()
        for name, (is_taken, range_) in TAKEN.items():
            if (value := given.get(name)) is not None and not is_taken(value):
                raise ValidationError.of(name, f"must be {range_}")
        values = {name: value for name, value in given.items() if value not in MEAN_NONE.get(name, ())}
        values |= {"do_sample": not greedy, "top_n_tokens": top_n_tokens, "min_new_tokens": self.min_tokens}
        keep = self.include_stop_str_in_output
        return AskedParameters(
            AskedSampling.of(values, greedy, given),
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
            grammar=asked_grammar(self),
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
    tools: Annotated[Tools | None, Field(description="Functions that the model may call; at most 128.")] = None
    tool_choice: Annotated[
        Choice | None,
        Field(
            description="`none`, `auto` (the model decides), `required` (at least one call), or one function, as"
            ' `{"type": "function", "function": {"name": string}}`. Default: `auto`.'
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Field(description="Whether the answer may have several calls. Default: true.")
    ] = None
    tool_prompt: Annotated[
        str | None,
        Field(
            max_length=16_384,
            description="Only where a grammar makes the calls: what the model is told of calling functions.",
        ),
    ] = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        Field(description="A variable of the chat template; `none` also sets `enable_thinking` to false."),
    ] = None
    separate_reasoning: Annotated[
        bool | None,
        Field(
            description="Whether the reasoning, which comes before the answer, is `reasoning_content` and not part"
            " of `content`. Default: true, where the chat template shows how the model reasons."
        ),
    ] = None
    include_reasoning: Annotated[
        bool | None, Field(description="Whether the answer has the reasoning at all. Default: true.")
    ] = None
    max_thinking_tokens: Annotated[
        U32 | None, Field(description="Most tokens of the reasoning, which is then ended. Default: no limit.")
    ] = None

    def calling(self) -> Calling | None:
        """The tools that the answer may call. Raises ValidationError."""
        choice = read_choice(self.tool_choice) if self.tool_choice is not None else ToolChoice(Mode.AUTO)
        return Calling.of(self.tools or (), choice, self.parallel_tool_calls is not False)

    def may_answer_without_tools(self, ways: CallWays) -> bool:
        """Whether a prompt without tools may be needed too: for an answer in words, if a grammar makes the calls."""
        calling = self.calling()
        return calling is not None and not calling.is_own(ways) and not calling.is_required

    def without_tools(self) -> Self:
        return self.model_copy(update={"tools": None, "tool_choice": None})

    def variables(self) -> dict[str, Any]:
        """The values that the request itself sets for variables of the chat template."""
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        if self.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
        return variables


# Variables of every chat template that a request must not set by `chat_template_kwargs`.
OTHER_FIELDS = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


class ChatRequest(ChatOptions):
    messages: Annotated[list[MessageBody], MESSAGE_LIMIT] = Field(min_length=1, fail_fast=True)
    """The conversation, oldest message first."""
    documents: Annotated[
        list[dict[str, Any]] | None,
        Field(
            max_length=MAX_DOCUMENTS,
            description='Texts that the chat template shows to the model, each usually `{"title": …, "text": …}`;'
            " refused if it shows none.",
        ),
    ] = None

    def conversation(self, ways: CallWays) -> Conversation:
        """The values that the chat template gets. Raises ValidationError."""
        calling = self.calling()
        tools = [] if calling is None else [tool.for_template() for tool in calling.listed]
        chat = Conversation(
            messages=tuple(message.message() for message in self.messages),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            variables=self.variables(),
            tools=tools if ways.in_template and tools else None,
            documents=self.documents,
        )
        if calling is None or calling.is_own(ways):
            return chat
        listed = tools if calling.is_required else [*tools, NO_TOOL_DESCRIBED]
        return described(chat, listed, self.tool_prompt or TOOL_PROMPT, ways.in_template)

    @model_validator(mode="after")
    def _check_variables(self) -> Self:
        for name in OTHER_FIELDS:
            if name in (self.chat_template_kwargs or ()):
                why = f"must not have `{name}`, which is a field of the request"
                raise ValidationError.of("chat_template_kwargs", why)
        return self

    @model_validator(mode="after")
    def _check_turn(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValidationError.of("continue_final_message", "and `add_generation_prompt` must not both be true")
        return self


class Rendered(Body):
    """The prompt that a child process has made of a conversation."""

    prompt: str
    prompt_without_tools: str = ""  # the prompt without the request's tools, if it may be needed


class RenderedChat(ChatOptions, Rendered):
    """A chat whose messages the template has already turned into a prompt."""
