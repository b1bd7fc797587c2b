"""All errors that a call can raise, in one tree, and the rule that picks the class for a server's error.

TextGenerationError
├── ValidationError
├── GenerationError
├── OverloadedError
├── IncompleteGenerationError
├── BadRequestError
├── ShardNotReadyError
├── ShardTimeoutError
├── NotFoundError
├── RateLimitExceededError
├── UnknownError
├── NotSupportedError           of the clients of the hosted Inference API
├── ServerConnectionError       also a ConnectionError
└── TimeoutExceededError        also a TimeoutError
"""

from collections.abc import Mapping
from typing import Any, Literal

Wait = Literal["connect", "first_token", "between_tokens", "total"]


class TextGenerationError(Exception):
    """Base of all errors of this package. Its text is the server's own text if the server sent one."""

    status: int | None = None  # the server's HTTP status; in a stream, the status that its error event names
    request_id: str | None = None  # the `X-Request-Id` of the server's answer
    retry_after_s: float | None = None  # seconds after which the server wants to be asked again
    # OpenAI routes only: a word for the reason, such as "context_length_exceeded", and the parameter that is wrong.
    code: str | None = None
    param: str | None = None


class ValidationError(TextGenerationError):
    """A parameter is out of range; found here before sending, or by the server."""


class GenerationError(TextGenerationError):
    """The server failed while it generated."""


class OverloadedError(TextGenerationError):
    """The server has as many requests as it takes; try again later."""


class IncompleteGenerationError(TextGenerationError):
    """The answer ended before its last token."""


class BadRequestError(TextGenerationError):
    pass


class ShardNotReadyError(TextGenerationError):
    pass


class ShardTimeoutError(TextGenerationError):
    pass


class NotFoundError(TextGenerationError):
    pass


class RateLimitExceededError(TextGenerationError):
    pass


class UnknownError(TextGenerationError):
    """The server's error has no class of its own, or its answer could not be understood."""


class NotSupportedError(TextGenerationError):
    """The hosted Inference API does not serve this model with text-generation-inference."""

    def __init__(self, model_id: str) -> None:
        super().__init__(f"the Inference API does not serve the model `{model_id}` with text-generation-inference")


class ServerConnectionError(TextGenerationError, ConnectionError):
    """The server could not be reached, or the connection broke."""

    connected = True  # False: no connection could be made, so nothing was sent


class TimeoutExceededError(TextGenerationError, TimeoutError):
    """A limit of `Timeout` ran out; `wait` is the name of its field."""

    def __init__(self, wait: Wait, limit_s: float) -> None:
        super().__init__(f"{_WAITED_FOR[wait]} within {limit_s:g} s; raise `timeout.{wait}` if the server is only slow")
        self.wait = wait
        self.limit_s = limit_s


_WAITED_FOR: Mapping[Wait, str] = {
    "connect": "no connection",
    "first_token": "no first token",
    "between_tokens": "no next token",
    "total": "no complete answer",
}

_BY_ERROR_TYPE: Mapping[str, type[TextGenerationError]] = {
    "deadline": ShardTimeoutError,
    "generation": GenerationError,
    "incomplete_generation": IncompleteGenerationError,
    "overloaded": OverloadedError,
    "validation": ValidationError,
}

_BY_STATUS: Mapping[int, type[TextGenerationError]] = {
    400: BadRequestError,
    403: ShardNotReadyError,
    424: ShardNotReadyError,
    504: ShardTimeoutError,
    404: NotFoundError,
    429: RateLimitExceededError,
}


def parse_error(status_code: int, payload: Mapping[str, Any]) -> TextGenerationError:
    """The error for a payload `{"error", "error_type"}`, or OpenAI's `{"error": {"message", ...}}`, with or without an
    `error_type` beside it.

    `error_type` decides first, then the status: the status of the HTTP answer, or the status that an event names inside
    a stream, whose answer began with a 200.
    """
    detail = payload.get("error")
    inner: Mapping[str, Any] = detail if isinstance(detail, Mapping) else {}
    status = status_code if status_code >= 400 else _named_status(inner)
    kind = _kind(payload.get("error_type") or inner.get("error_type") or inner.get("type"), status)
    error = kind(str(inner.get("message", detail)))
    error.status = status
    error.code, error.param = _text(inner.get("code")), _text(inner.get("param"))
    return error


def _kind(error_type: object, status: int | None) -> type[TextGenerationError]:
    by_type = _BY_ERROR_TYPE.get(error_type) if isinstance(error_type, str) else None
    return by_type or (_BY_STATUS.get(status) if status is not None else None) or UnknownError


def _named_status(inner: Mapping[str, Any]) -> int | None:
    """The status that an error event names: `http_status_code` is TGI's, a number as `code` other servers'."""
    numbers = (inner.get("http_status_code"), inner.get("code"))
    return next((number for number in numbers if isinstance(number, int) and number >= 400), None)


def _text(value: object) -> str | None:
    return None if value is None else str(value)
