"""Calls of tools in the form of TGI's chats: one call, with a description and a number as its id."""

import re
from collections.abc import Sequence
from typing import Any

import orjson

from text_generation_router.api.openai.schemas import ChatOptions, ChatRequest
from text_generation_router.errors import ToolError
from text_generation_router.text.json_depth import read_json
from text_generation_router.text.tokens.pieces import CallArguments, CallStart, Piece

NUMBER = re.compile("[0-9]{1,18}")  # ids of this server have no more digits


def message_json(pieces: Sequence[Piece], text: str) -> dict[str, Any]:
    """The message of a whole answer, whose text is `text`. Raises ToolError if the call is not complete."""
    start = next((piece for piece in pieces if isinstance(piece, CallStart)), None)
    written = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
    try:
        arguments = read_json(written)
    except ValueError as error:
        raise ToolError(f"Failed to parse generated text: {error} {orjson.dumps(text).decode()}") from None
    assert start is not None
    function = {"description": None, "name": start.name, "arguments": orjson.dumps(arguments).decode()}
    return {"role": "assistant", "tool_calls": [{"id": "0", "type": "function", "function": function}]}


def delta_json(pieces: Sequence[Piece], call_id: str) -> dict[str, Any] | None:
    """The fields that a chunk adds to the message; only the first chunk has the function's name. None: the event adds
    nothing."""
    name = next((piece.name for piece in pieces if isinstance(piece, CallStart)), None)
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
    if name is None and not arguments:
        return None
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"index": 0, "id": call_id, "type": "function", "function": function}],
    }


def stream_id(asked: ChatOptions) -> str:
    """The id of the call in a stream: one more than the largest id of a call in the conversation, or 0."""
    messages = asked.messages if isinstance(asked, ChatRequest) else ()
    ids = [call.get("id") for message in messages for call in message.tool_calls]
    numbers = [int(value) for value in ids if isinstance(value, str) and NUMBER.fullmatch(value)]
    return str(max(numbers) + 1) if numbers else "0"
