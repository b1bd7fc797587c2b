"""Turns the bytes of an answer into a typed value, or into the error that the answer contains. Does no input or
output.
"""

import json
from typing import Any, TypeVar

import pydantic

from text_generation.errors import TextGenerationError, UnknownError, parse_error

M = TypeVar("M", bound=pydantic.BaseModel)

# An error quotes at most this much of a body that is not JSON, such as a proxy's HTML page.
MAX_QUOTED_CHARACTERS = 1000


def parse_answer(model: type[M], body: bytes) -> M:
    """Parses a whole answer with status 200. `POST /` wraps the answer in a list of one."""
    payload = parse_json(body)
    if isinstance(payload, list) and payload:
        payload = payload[0]
    return _validate(model, payload, quoted=body)


def parse_list(model: type[M], body: bytes) -> list[M]:
    """Parses an answer that is a list."""
    payload = parse_json(body)
    items = payload if isinstance(payload, list) else [payload]
    return [_validate(model, item, quoted=body) for item in items]


def parse_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        raise UnknownError(f"the server's answer is not JSON: {_quote(body)}") from None


def parse_event(model: type[M], data: str) -> M:
    """Parses one event of a stream; an error event raises the error that it carries."""
    try:
        payload = json.loads(data)
    except ValueError:
        raise UnknownError(f"the server sent an event that is not JSON: {_quote(data.encode())}") from None
    return _validate(model, payload, quoted=data.encode())


def answer_error(status_code: int, body: bytes) -> TextGenerationError:
    """The error of an answer with a status other than 200, whatever its body contains."""
    try:
        payload = json.loads(body)
    except ValueError:
        payload = None
    if isinstance(payload, dict) and "error" in payload:
        return parse_error(status_code, payload)
    text = _quote(body)
    return parse_error(status_code, {"error": f"HTTP {status_code}: {text}" if text else f"HTTP {status_code}"})


def _validate(model: type[M], payload: Any, quoted: bytes) -> M:
    if isinstance(payload, dict) and payload.get("error") is not None:
        raise parse_error(200, payload)
    try:
        return model.model_validate(payload)
    except pydantic.ValidationError as error:
        raise UnknownError(
            f"the server's answer is not a valid {model.__name__} ({explain(error)}): {_quote(quoted)}"
        ) from None


def explain(error: pydantic.ValidationError) -> str:
    """The first error that pydantic found, in one line."""
    first = error.errors(include_url=False, include_context=False)[0]
    return f"`{'.'.join(map(str, first['loc']))}`: {first['msg']}"


def _quote(body: bytes) -> str:
    return body[: 4 * MAX_QUOTED_CHARACTERS].decode("utf-8", errors="replace").strip()[:MAX_QUOTED_CHARACTERS]
