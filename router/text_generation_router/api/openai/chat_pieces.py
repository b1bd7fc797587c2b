"""Writes an answer's pieces as OpenAI's chats have them: `content`, `reasoning_content` and `tool_calls`, of a whole
message or of the deltas of a stream.
"""

import secrets
import string
from collections.abc import Callable, Iterable
from typing import Any

from text_generation_router.api.common.styles import Style
from text_generation_router.text.calls.formats import CallFormat, IdStyle
from text_generation_router.text.tokens.events import FinishReason
from text_generation_router.text.tokens.pieces import CallStart, NewestCall, Piece, Reasoning, Text

NewId = Callable[[], str]


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """An id of nine letters and digits, the only form that Mistral's chat templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def new_id_for(calls: CallFormat | None) -> NewId:
    return new_short_call_id if calls is not None and calls.ids is IdStyle.NINE else new_call_id


def message_json(pieces: Iterable[Piece], new_id: NewId) -> dict[str, Any]:
    """The message of a whole answer."""
    text, reasoning, calls = "", "", list[dict[str, Any]]()
    for piece in pieces:
        if isinstance(piece, Text):
            text += piece.text
        elif isinstance(piece, Reasoning):
            reasoning += piece.text
        elif isinstance(piece, CallStart):
            calls.append(_call(piece, new_id))
        else:
            calls[piece.index]["function"]["arguments"] += piece.text
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if reasoning:
        message |= _reasoning(reasoning)
    return message | {"tool_calls": calls} if calls else message


def delta_json(piece: Piece, new_id: NewId) -> dict[str, Any]:
    """The fields that a chunk adds to the message. A call's first chunk has its id and its name, the other chunks its
    arguments."""
    if isinstance(piece, Text):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return _reasoning(piece.text)
    if isinstance(piece, CallStart):
        return {"tool_calls": [{"index": piece.index} | _call(piece, new_id)]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def ending_of(reason: FinishReason, call: NewestCall, style: Style) -> str:
    """The finish reason: `tool_calls` if the answer calls tools and the last call is complete, otherwise by
    `reason`."""
    word = style.reasons[reason]
    return "tool_calls" if word == "stop" and not style.is_tgis and call.is_whole else word


def _reasoning(text: str) -> dict[str, Any]:
    """The reasoning under two field names, because clients read either: DeepSeek's name, and vLLM's newer name."""
    return {"reasoning_content": text, "reasoning": text}


def _call(start: CallStart, new_id: NewId) -> dict[str, Any]:
    return {
        "id": start.id if start.id is not None else new_id(),
        "type": "function",
        "function": {"name": start.name, "arguments": ""},
    }
