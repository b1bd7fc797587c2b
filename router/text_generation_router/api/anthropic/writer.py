"""Writes an answer of /v1/messages, and its stream, from the pieces of a text. Does no input or output."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from text_generation_router.http.encoding import to_named_event
from text_generation_router.text.json_depth import read_json
from text_generation_router.text.tokens.pieces import CallArguments, CallStart, NewestCall, Piece, Reasoning, Text

ID_BYTES = 12
NewId = Callable[[], str]
PING = to_named_event({"type": "ping"})


def new_id() -> str:
    """A random id for a tool call; the `tool_use_id` of its result repeats it."""
    return f"toolu_{secrets.token_hex(ID_BYTES)}"


@dataclass(frozen=True, slots=True)
class MessageEnd:
    stop_reason: str
    stop_sequence: str | None = None  # the stop string that ended the text


def usage_json(prompt_tokens: int, cached_tokens: int, made: int, thinking: int = 0) -> dict[str, Any]:
    """The `usage` of an answer. Unlike OpenAI's, `input_tokens` does not count the cached tokens."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": made,
        "output_tokens_details": {"thinking_tokens": thinking},
    }


def message_json(
    identity: str, model: str, content: Sequence[dict[str, Any]], end: MessageEnd | None, usage: dict[str, Any]
) -> dict[str, Any]:
    """The message of an answer. `end`: None in the first event of a stream."""
    return {
        "id": identity,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None if end is None else end.stop_reason,
        "stop_sequence": None if end is None else end.stop_sequence,
        "usage": usage,
    }


def content_of(pieces: Iterable[Piece], make_id: NewId = new_id) -> list[dict[str, Any]]:
    """The blocks of a whole answer. An answer without any piece is one empty text, because clients read the first
    block."""
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}  # the arguments of each call, by its place in `blocks`
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[len(blocks) - 1] += piece.text
            continue
        started = _block(piece, make_id)
        if not blocks or started["type"] == "tool_use" or blocks[-1]["type"] != started["type"]:
            blocks.append(started)
        if isinstance(piece, CallStart):
            arguments[len(blocks) - 1] = ""
        else:
            blocks[-1][FIELDS[blocks[-1]["type"]]] += piece.text
    for place, text in arguments.items():
        blocks[place]["input"] = _object(text)
    return blocks or [_block(Text(""), make_id)]


FIELDS = {"text": "text", "thinking": "thinking"}  # for each type of block, the field with its text


def _block(piece: Text | Reasoning | CallStart, make_id: NewId) -> dict[str, Any]:
    """The block as its first event contains it: without text or arguments."""
    if isinstance(piece, CallStart):
        return {"type": "tool_use", "id": piece.id or make_id(), "name": piece.name, "input": {}}
    if isinstance(piece, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object; an empty object if the text has ended within the arguments."""
    try:
        value = read_json(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class MessageStream:
    """Writes the events of one stream. Each method returns whole events, or nothing."""

    def __init__(self, identity: str, model: str, make_id: NewId = new_id) -> None:
        self._identity = identity
        self._model = model
        self._make_id = make_id
        self._index = -1  # number of the newest block
        self._open: str | None = None  # type of the block that has begun and not ended
        self.call = NewestCall()

    def start(self, usage: dict[str, Any]) -> bytes:
        message = message_json(self._identity, self._model, [], None, usage)
        return to_named_event({"type": "message_start", "message": message}) + PING

    def add(self, pieces: Sequence[Piece]) -> bytes:
        self.call.add(pieces)
        return b"".join([self._add(piece) for piece in pieces])

    def end(self, end: MessageEnd, usage: dict[str, Any]) -> bytes:
        opened = self._begin(_block(Text(""), self._make_id)) if self._index < 0 else b""
        delta = {"stop_reason": end.stop_reason, "stop_sequence": end.stop_sequence}
        last = to_named_event({"type": "message_delta", "delta": delta, "usage": usage})
        return opened + self._close() + last + to_named_event({"type": "message_stop"})

    def _add(self, piece: Piece) -> bytes:
        if isinstance(piece, CallArguments):
            return self._delta({"type": "input_json_delta", "partial_json": piece.text})
        if isinstance(piece, CallStart):
            return self._begin(_block(piece, self._make_id))
        kind = "thinking" if isinstance(piece, Reasoning) else "text"
        begun = b"" if self._open == kind else self._begin(_block(piece, self._make_id))
        return begun + self._delta({"type": f"{kind}_delta", kind: piece.text})

    def _begin(self, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._index, self._open = self._index + 1, block["type"]
        return closed + to_named_event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        # Anthropic's streams end a thinking block with a signature; this server does not sign, so its signature is
        # empty.
        signed = self._delta({"type": "signature_delta", "signature": ""}) if self._open == "thinking" else b""
        self._open = None
        return signed + to_named_event({"type": "content_block_stop", "index": self._index})

    def _delta(self, delta: dict[str, str]) -> bytes:
        return to_named_event({"type": "content_block_delta", "index": self._index, "delta": delta})
