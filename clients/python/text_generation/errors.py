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
├── ServerConnectionError       also a ConnectionError
└── TimeoutExceededError        also a TimeoutError
"""

from collections.abc import Mapping
from typing import Any, Literal

Wait = Literal["connect", "first_token", "between_tokens", "total"]


class TextGenerationError(Exception):
    """Base of all errors of this package. Its text is the server's own text if the server sent one."""


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


class ServerConnectionError(TextGenerationError, ConnectionError):
    """The server could not be reached, or the connection broke."""


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
    """The error for a payload `{"error", "error_type"}`, or OpenAI's `{"error": {"message", ...}}`.

    `error_type` decides first, then the status: the status of the HTTP answer, or the status that an event names inside
    a stream, whose answer began with a 200.
    """
    detail = payload.get("error")
    error_type = payload.get("error_type")
    if isinstance(detail, Mapping):
        error_type = error_type or detail.get("error_type") or detail.get("type")
        if status_code < 400:
            status_code = detail.get("http_status_code") or status_code
        detail = detail.get("message", detail)
    kind = _BY_ERROR_TYPE.get(error_type) if isinstance(error_type, str) else None
    return (kind or _BY_STATUS.get(status_code, UnknownError))(str(detail))
