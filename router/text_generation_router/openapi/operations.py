"""The routes as data: what each is for, its body with examples, its answers, its errors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from text_generation_router.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from text_generation_router.api.openai.schemas import ChatRequest, CompletionRequest
from text_generation_router.api.responses.schemas import ResponsesRequest
from text_generation_router.api.tgi.schemas import CompatGenerateRequest, DetokenizeRequest, GenerateRequest
from text_generation_router.openapi import failures
from text_generation_router.openapi.anthropic_answers import AnsweredMessageJson, CountedTokensJson, MessageEventJson
from text_generation_router.openapi.examples import (
    CHAT_EXAMPLES,
    COMPLETION_EXAMPLES,
    MESSAGES,
    MESSAGES_EXAMPLES,
    NATIVE_EXAMPLES,
    PROMPT,
    RESPONSES_EXAMPLES,
)
from text_generation_router.openapi.failures import Errors
from text_generation_router.openapi.native_answers import (
    ChatSpansJson,
    DetokenizedJson,
    GenerateJson,
    InfoJson,
    PredictionsJson,
    ReplicasJson,
    SpanJson,
    TokenEventJson,
    VersionJson,
)
from text_generation_router.openapi.responses_answers import ResponseEventJson, ResponseJson
from text_generation_router.openapi.v1_answers import (
    AnthropicModelJson,
    AnthropicModelsJson,
    ChatChunkJson,
    ChatJson,
    CompletionChunkJson,
    CompletionJson,
    ModelJson,
    ModelsJson,
)
from text_generation_router.openapi.view_answers import (
    EngineEventJson,
    EngineHistoryJson,
    ShownRequestJson,
    ShownRequestsJson,
)


class Tag(Enum):
    NATIVE = "Native", "Text generation as in TGI."
    OPENAI = "OpenAI", "Text generation as in OpenAI's API."
    ANTHROPIC = "Anthropic", "Text generation as in Anthropic's API."
    TOKENS = "Tokens", "Between texts and tokens."
    CLOUDS = "Clouds", "The forms of cloud platforms."
    SERVER = "Server", "State, limits and metrics."


class Access(Enum):
    """When a route needs a key, if the server has keys."""

    NEVER = "never"
    CLOSED = "closed"  # with --closed-routes
    ALWAYS = "always"
    ADMIN = "admin"  # the administrators' own key, without which the route does not exist


class ScaleRequest(BaseModel):
    """What an administrator asks for."""

    model_config = ConfigDict(extra="forbid")

    replicas: Annotated[int, Field(ge=1, description="Number of replicas that there are to be.")]


class LoadAdapterRequest(BaseModel):
    """A LoRA adapter that is to be served from now on."""

    model_config = ConfigDict(extra="forbid")

    lora_name: Annotated[str, Field(min_length=1, max_length=256, description="The name that clients will give.")]
    lora_path: Annotated[str, Field(min_length=1, description="Its folder, within one of --lora-dirs.")]
    load_inplace: Annotated[
        bool | None,
        Field(
            description="Whether an adapter that has the name is replaced; requests go on with it. When not given: if"
            " its files are others."
        ),
    ] = None


class UnloadAdapterRequest(BaseModel):
    """A LoRA adapter that is not to be served any more."""

    model_config = ConfigDict(extra="forbid")

    lora_name: Annotated[str, Field(min_length=1, description="The name that clients give.")]
    lora_int_id: Annotated[int | None, Field(description="vLLM's number of the adapter, which is not read.")] = None


class Instances(BaseModel):
    """Vertex AI's form of several requests."""

    instances: Annotated[
        list[GenerateRequest | ChatRequest], Field(min_length=1, description="Bodies of /generate, or of chats.")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`description`, which may use Markdown, follows the summary. `answer`: the type of the answer's JSON; None: no
    JSON. `event`: the type of a stream's events; None: there are no streams."""

    method: str
    path: str
    name: str
    tag: Tag
    summary: str
    description: str = ""
    access: Access = Access.ALWAYS
    body: Any = None
    examples: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    answer: Any = None
    text: str | None = None  # the media type of an answer that is not JSON
    event: Any = None
    errors: Errors = ()
    generates: bool = False


ANTHROPICS_FORM = "A request with the header `anthropic-version` gets the answer in Anthropic's form."
REFUSED = (
    "\n\nFields that would change the answer and are not supported are refused by name: `x-refused` of the body's"
    " schema lists them, with the values that are taken because they change nothing. `x-no-effect` lists fields that"
    " are known and change no answer. docs/fields.md has all of them in one table. Any other field is named in the"
    " answer's header `X-Ignored-Parameters`, or refused if the server has `--strict-parameters`."
)

ADMIN_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="get",
        path="/admin/replicas",
        name="replicas",
        tag=Tag.SERVER,
        summary="The state of each replica.",
        access=Access.ADMIN,
        answer=ReplicasJson,
        errors=failures.SCALING,
    ),
    Operation(
        method="post",
        path="/admin/replicas",
        name="scale",
        tag=Tag.SERVER,
        summary="Asks for another number of replicas.",
        description="The answer comes before they are there. A replica that leaves drains first.",
        access=Access.ADMIN,
        body=ScaleRequest,
        examples={"Three replicas": {"replicas": 3}},
        answer=ReplicasJson,
        errors=(*failures.SCALING, *failures.BODY),
    ),
)
ADAPTER_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="post",
        path="/v1/load_lora_adapter",
        name="load_lora_adapter",
        tag=Tag.SERVER,
        summary="Serves a LoRA adapter from now on.",
        description="It is there on every front and engine when the answer comes. After an error nothing has changed,"
        " unless the error says otherwise.",
        access=Access.ADMIN,
        body=LoadAdapterRequest,
        examples={"An adapter": {"lora_name": "sql", "lora_path": "/adapters/sql"}},
        text="text/plain",
        errors=(*failures.ADAPTERS, *failures.BODY),
    ),
    Operation(
        method="post",
        path="/v1/unload_lora_adapter",
        name="unload_lora_adapter",
        tag=Tag.SERVER,
        summary="Serves a LoRA adapter no longer.",
        description="Requests that have begun go on; the answer comes when the last one has ended.",
        access=Access.ADMIN,
        body=UnloadAdapterRequest,
        examples={"An adapter": {"lora_name": "sql"}},
        text="text/plain",
        errors=(*failures.ADAPTERS, *failures.BODY),
    ),
)
VIEW_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="get",
        path="/engine/state",
        name="engine_state",
        tag=Tag.SERVER,
        summary="The engine's rows, queue and memory, as it works.",
        description="A stream of states for the page; the query `engine` names one of several. It ends after a while.",
        access=Access.ADMIN,
        event=EngineEventJson,
        errors=failures.VIEW_FULL,
    ),
    Operation(
        method="get",
        path="/engine/history",
        name="engine_history",
        tag=Tag.SERVER,
        summary="Fifteen minutes of the engine, a number for each second.",
        access=Access.ADMIN,
        answer=EngineHistoryJson,
        errors=failures.KEY,
    ),
    Operation(
        method="get",
        path="/engine/requests",
        name="engine_requests",
        tag=Tag.SERVER,
        summary="The newest requests.",
        access=Access.ADMIN,
        answer=ShownRequestsJson,
        errors=failures.KEY,
    ),
    Operation(
        method="get",
        path="/engine/requests/{id}",
        name="engine_request",
        tag=Tag.SERVER,
        summary="The stages of one request.",
        access=Access.ADMIN,
        answer=ShownRequestJson,
        errors=failures.UNKNOWN_REQUEST,
    ),
)
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="post",
        path="/generate",
        name="generate",
        tag=Tag.NATIVE,
        summary="Generates a text.",
        description="The answer comes when the text is complete." + REFUSED,
        body=GenerateRequest,
        examples=NATIVE_EXAMPLES,
        answer=GenerateJson,
        errors=failures.GENERATION,
        generates=True,
    ),
    Operation(
        method="post",
        path="/generate_stream",
        name="generate_stream",
        tag=Tag.NATIVE,
        summary="Generates a text as a stream.",
        description="Each event is one token. Errors of a body that can be read are events, too." + REFUSED,
        body=GenerateRequest,
        examples=NATIVE_EXAMPLES,
        event=TokenEventJson,
        errors=failures.BODY,
        generates=True,
    ),
    Operation(
        method="post",
        path="/",
        name="compat_generate",
        tag=Tag.NATIVE,
        summary="Generates a text, at once or as a stream.",
        description="/generate in a list of one or, if `stream` is true, /generate_stream. The text has the prompt"
        " before it, unless `return_full_text` is false." + REFUSED,
        body=CompatGenerateRequest,
        examples=NATIVE_EXAMPLES | {"A stream": {"inputs": PROMPT, "stream": True}},
        answer=Annotated[list[GenerateJson], Field(min_length=1, max_length=1)],
        event=TokenEventJson,
        errors=failures.GENERATION,
        generates=True,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        name="completions",
        tag=Tag.OPENAI,
        summary="Continues one or several prompts, at once or as a stream.",
        description="A stream ends with `data: [DONE]`." + REFUSED,
        body=CompletionRequest,
        examples=COMPLETION_EXAMPLES,
        answer=CompletionJson,
        event=CompletionChunkJson,
        errors=(*failures.GENERATION, *failures.PROMPTS, *failures.MODEL),
        generates=True,
    ),
    Operation(
        method="post",
        path="/v1/chat/completions",
        name="chat_completions",
        tag=Tag.OPENAI,
        summary="Answers a conversation, at once or as a stream.",
        description="The model's chat template makes the prompt. A stream ends with `data: [DONE]`." + REFUSED,
        body=ChatRequest,
        examples=CHAT_EXAMPLES,
        answer=ChatJson,
        event=ChatChunkJson,
        errors=(*failures.GENERATION, *failures.TEMPLATE, *failures.MODEL),
        generates=True,
    ),
    Operation(
        method="post",
        path="/v1/responses",
        name="responses",
        tag=Tag.OPENAI,
        summary="Answers a conversation, at once or as a stream, in OpenAI's newer form.",
        description="The model's chat template makes the prompt. Nothing is stored. The events of a stream have names."
        + REFUSED,
        body=ResponsesRequest,
        examples=RESPONSES_EXAMPLES,
        answer=ResponseJson,
        event=ResponseEventJson,
        errors=(*failures.GENERATION, *failures.TEMPLATE, *failures.MODEL),
        generates=True,
    ),
    Operation(
        method="post",
        path="/v1/messages",
        name="messages",
        tag=Tag.ANTHROPIC,
        summary="Answers a conversation, at once or as a stream.",
        description="The model's chat template makes the prompt. The events of a stream have names." + REFUSED,
        body=MessagesRequest,
        examples=MESSAGES_EXAMPLES,
        answer=AnsweredMessageJson,
        event=MessageEventJson,
        errors=(*failures.GENERATION, *failures.TEMPLATE, *failures.MODEL),
        generates=True,
    ),
    Operation(
        method="post",
        path="/v1/messages/count_tokens",
        name="count_tokens",
        tag=Tag.ANTHROPIC,
        summary="The number of tokens of a conversation's prompt.",
        body=CountTokensRequest,
        examples={"A question": {"messages": MESSAGES}},
        answer=CountedTokensJson,
        errors=(*failures.REFUSALS, *failures.TEMPLATE, *failures.MODEL),
    ),
    Operation(
        method="get",
        path="/v1/models",
        name="models",
        tag=Tag.OPENAI,
        summary="Lists the model that is served.",
        description=ANTHROPICS_FORM,
        access=Access.CLOSED,
        answer=ModelsJson | AnthropicModelsJson,
    ),
    Operation(
        method="get",
        path="/v1/models/{name}",
        name="model",
        tag=Tag.OPENAI,
        summary="The entry of the model that is served, by its name or hub id.",
        description=ANTHROPICS_FORM,
        access=Access.CLOSED,
        answer=ModelJson | AnthropicModelJson,
        errors=failures.MODEL,
    ),
    Operation(
        method="post",
        path="/tokenize",
        name="tokenize",
        tag=Tag.TOKENS,
        summary="The tokens of a text.",
        description="Each token has the bytes of the text that it covers. `parameters` change nothing.",
        body=GenerateRequest,
        examples={"A text": {"inputs": PROMPT}},
        answer=list[SpanJson],
        errors=failures.REFUSALS,
    ),
    Operation(
        method="post",
        path="/chat_tokenize",
        name="chat_tokenize",
        tag=Tag.TOKENS,
        summary="The prompt that the chat template makes, and its tokens.",
        body=ChatRequest,
        examples={"A question": {"messages": MESSAGES}},
        answer=ChatSpansJson,
        errors=(*failures.REFUSALS, *failures.TEMPLATE),
    ),
    Operation(
        method="post",
        path="/detokenize",
        name="detokenize",
        tag=Tag.TOKENS,
        summary="The text of token ids.",
        body=DetokenizeRequest,
        examples={"Two tokens": {"tokens": [5, 6]}},
        answer=DetokenizedJson,
        errors=failures.REFUSALS,
    ),
    Operation(
        method="post",
        path="/invocations",
        name="invocations",
        tag=Tag.CLOUDS,
        summary="SageMaker's route: a body of /, of chats or of completions.",
        description="The body's field `inputs`, `messages` or `prompt` decides. Errors are those of native routes.",
        body=CompatGenerateRequest | ChatRequest | CompletionRequest,
        examples={"A prompt": {"inputs": PROMPT}, "A chat": CHAT_EXAMPLES["A question"]},
        answer=Annotated[list[GenerateJson], Field(min_length=1, max_length=1)] | ChatJson | CompletionJson,
        event=TokenEventJson | ChatChunkJson | CompletionChunkJson,
        errors=(*failures.GENERATION, *failures.TEMPLATE, *failures.PROMPTS, *failures.MODEL),
        generates=True,
    ),
    Operation(
        method="post",
        path="/vertex",
        name="vertex",
        tag=Tag.CLOUDS,
        summary="Vertex AI's route: several bodies of /generate or of chats.",
        description="Tokens are always drawn for bodies of /generate, as in TGI.",
        body=Instances,
        examples={"Two prompts": {"instances": [{"inputs": PROMPT}, {"messages": MESSAGES}]}},
        answer=PredictionsJson,
        errors=(*failures.GENERATION, *failures.TEMPLATE, *failures.PROMPTS),
        generates=True,
    ),
    *(
        Operation(
            method="get",
            path=path,
            name=name,
            tag=Tag.SERVER,
            summary="Whether the server takes requests: 200 with an empty body, or 503.",
            description=description,
            access=Access.NEVER,
            errors=failures.UNHEALTHY,
        )
        for path, name, description in (
            ("/health", "health", ""),
            ("/ready", "ready", ""),
            ("/ping", "ping", ""),
            ("/", "compat_health", "A browser, which prefers `text/html`, gets a page."),
        )
    ),
    Operation(
        method="get",
        path="/live",
        name="live",
        tag=Tag.SERVER,
        summary="200 with an empty body while this process answers at all.",
        access=Access.NEVER,
    ),
    Operation(
        method="get",
        path="/info",
        name="info",
        tag=Tag.SERVER,
        summary="What is served, and its limits.",
        access=Access.CLOSED,
        answer=InfoJson,
    ),
    Operation(
        method="get",
        path="/version",
        name="version",
        tag=Tag.SERVER,
        summary="The server's version.",
        access=Access.CLOSED,
        answer=VersionJson,
    ),
    Operation(
        method="get",
        path="/metrics",
        name="metrics",
        tag=Tag.SERVER,
        summary="Metrics in the text format of Prometheus.",
        access=Access.CLOSED,
        text="text/plain",
    ),
)
