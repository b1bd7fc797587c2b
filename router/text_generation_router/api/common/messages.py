"""The messages of a chat: content of every form as one text, and a message's other fields for the template."""

from typing import Annotated, Any

import orjson
from pydantic import ConfigDict, Field, PlainValidator, ValidationInfo

from text_generation_router.api.common.fields import Body
from text_generation_router.errors import ValidationError
from text_generation_router.text.json_depth import TOO_DEEP, TooDeepError, read_json
from text_generation_router.text.templates.chat_template import Message


def flattened(content: Any) -> Any:
    """One string of the list of text chunks of an item of `input`. Any other value is left to the type check."""
    return "".join(_chunk_text(chunk, "input") for chunk in content) if isinstance(content, list) else content


def read_content(content: Any, info: ValidationInfo) -> str | list[dict[str, str]] | None:
    """The text, or the list of its parts, each {"type": "text", "text": …}."""
    if content is None and info.data.get("role") == "user":  # other messages may have calls instead, or be empty
        raise ValueError("Field required")
    if isinstance(content, list):
        return [{"type": "text", "text": _chunk_text(chunk, "messages")} for chunk in content]
    if content is not None and not isinstance(content, str):
        raise ValueError("Input should be a valid string")
    return content


def _chunk_text(chunk: Any, field: str) -> str:
    kind = str(chunk.get("type")) if isinstance(chunk, dict) else ""
    if kind in ("image_url", "input_image", "input_audio", "file", "input_file", "audio_url", "video_url"):
        raise ValidationError(f"`{kind}` in `{field}` is not supported yet", field)
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
        str | list[dict[str, str]] | None,
        PlainValidator(read_content, json_schema_input_type=str | list[dict[str, Any]] | None),
        Field(validate_default=True),
    ] = None
    """The text, or a list of parts `{"type": "text", "text": …}`."""

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls of an earlier answer."""
        calls = (self.model_extra or {}).get("tool_calls")
        return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []

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
        return call | {"function": function | {"arguments": read_json(arguments)}}
    except TooDeepError:
        raise ValidationError(f"the `arguments` of a call have {TOO_DEEP}", "arguments") from None
    except orjson.JSONDecodeError:
        return call  # a text that is not JSON goes to the template as it is
