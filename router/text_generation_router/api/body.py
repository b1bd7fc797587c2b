"""A request's body: read up to a limit, parsed, checked against its schema."""

from typing import Any, TypeVar

import orjson
import pydantic
from starlette.requests import ClientDisconnect, Request

from text_generation_router.api.fields import Body
from text_generation_router.errors import (
    InvalidJsonError,
    PayloadTooLargeError,
    UnprocessableError,
    UnsupportedMediaTypeError,
)

B = TypeVar("B", bound=Body)


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The body as a JSON object. Raises BodyError; more than `limit` bytes are neither kept nor parsed."""
    if not _is_json(request.headers.get("content-type", "")):
        raise UnsupportedMediaTypeError
    try:
        value = orjson.loads(await _read(request, limit))
    except orjson.JSONDecodeError as error:
        raise InvalidJsonError(str(error)) from error
    if not isinstance(value, dict):
        raise UnprocessableError("", "Input should be an object")
    return value


def check(schema: type[B], value: dict[str, Any]) -> B:
    """Raises UnprocessableError naming the first wrong field. Its text holds nothing of the value."""
    try:
        return schema.model_validate(value)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"]))
        raise UnprocessableError(path, first["msg"].removeprefix("Value error, ")) from error


async def _read(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    # int() refuses numbers of more than 4,300 digits.
    if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > limit):
        raise PayloadTooLargeError(limit)
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > limit:
            raise PayloadTooLargeError(limit)
        if not message.get("more_body"):
            return bytes(body)


def _is_json(content_type: str) -> bool:
    kind = content_type.split(";", 1)[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
