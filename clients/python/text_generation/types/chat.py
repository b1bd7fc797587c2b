"""Bodies and answers of `chat`. Parts that OpenAI and TGI fill differently stay plain dicts, and fields that only one
of them sends may be None.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

from text_generation.types.request import ExtraBody, RequestModel


class Chunk(BaseModel):
    """A piece of a message's content: a text, or an image."""

    type: str
    text: str | None = None
    image_url: dict[str, Any] | None = None


class ToolCall(BaseModel):
    """A call of a tool, to build an assistant message by hand: `Message(..., tool_calls=[call.model_dump()])`."""

    id: str
    type: str
    function: dict[str, Any]


class Message(BaseModel):
    # Other fields that a template may use, such as `tool_call_id`, are sent as given.
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Chunk] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Tool(BaseModel):
    type: str
    function: dict[str, Any]


class ChatRequest(RequestModel):
    model: str
    messages: list[Message]
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: list[float] | dict[int, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_tokens: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    stop: list[str] | None = None
    stream: bool = False
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[Tool] | None = None
    tool_prompt: str | None = None
    tool_choice: str | None = None
    extra_body: ExtraBody = None


class ChatCompletionComplete(BaseModel):
    index: int
    message: Message
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


class ChatComplete(BaseModel):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatCompletionComplete]
    # Empty for the whole answer of a stream in which the server sent none.
    usage: dict[str, Any]


class Function(BaseModel):
    name: str | None = None
    arguments: str | None = None


class ChoiceDeltaToolCall(BaseModel):
    """A part of a call of a tool. OpenAI sends `id`, `type` and the name in the first part only, TGI in each."""

    index: int
    id: str | None = None
    type: str | None = None
    function: Function | None = None


class ChoiceDelta(BaseModel):
    # OpenAI sends the role in the first delta only, TGI in each.
    role: str | None = None
    content: str | None = None
    tool_calls: list[ChoiceDeltaToolCall] | None = None


class Choice(BaseModel):
    index: int
    delta: ChoiceDelta
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[Choice]
    usage: dict[str, Any] | None = None
