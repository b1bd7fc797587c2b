"""Encodes values as JSON bytes and as events. A numpy.float32 is printed as the shortest number that rounds to it, NaN
as null.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import orjson
from starlette.responses import Response

T = TypeVar("T")

# Number of tokens encoded without a pause: with five top tokens each, they block the event loop for less than a
# millisecond.
ROWS_PER_PIECE = 128


def to_json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


text_json: Callable[[str], bytes] = orjson.dumps  # a text needs no options


def to_event(value: Any) -> bytes:
    """One server-sent event. The space behind the colon is part of the contract: clients compare whole lines."""
    return b"data: %b\n\n" % orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def to_named_event(value: dict[str, Any]) -> bytes:
    """One server-sent event that has the object's `type` as its name too."""
    content = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), content)


def to_event_with(start: bytes, value: Any, end: bytes) -> bytes:
    """The event of an object whose first and last fields are encoded already: `start` and `end`, around `value`."""
    return b"data: %b%b%b\n\n" % (start, orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), end)


async def rows_json(rows: Sequence[T], json_of: Callable[[T], Any]) -> orjson.Fragment:
    """A JSON array with one value per row. The event loop does other work after every ROWS_PER_PIECE rows."""
    pieces = []
    for at in range(0, len(rows), ROWS_PER_PIECE):
        if at:
            await asyncio.sleep(0)
        pieces.append(to_json([json_of(row) for row in rows[at : at + ROWS_PER_PIECE]])[1:-1])
    return orjson.Fragment(b"[%b]" % b",".join(pieces))


DONE = b"data: [DONE]\n\n"


def json_response(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    return Response(to_json(value), status, headers, "application/json")
