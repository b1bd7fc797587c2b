"""How an error is told: with TGI's status and JSON, with OpenAI's or with Anthropic's. The path of the route decides
which, and `--tgi-dialect`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from text_generation_common.logs import request_id
from text_generation_router.errors import InferenceError, TooLongError
from text_generation_router.http.encoding import to_event, to_named_event
from text_generation_router.http.request_log import request_end

# OpenAI's `type` and `code` by status, where they are not those of all statuses below 500 or all others.
TYPES = {429: "rate_limit_error"}
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
# OpenAI's clients send a request again after a status >= 500, but one that has failed while it was computed was already
# tried again by the server.
NO_RETRY = {"x-should-retry": "false"}
# litellm knows a prompt that is too long by these words: no `code` reaches it.
TOO_LONG = "The request exceeds the available context size"
# Anthropic's `type` by status, as above.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Agents make a conversation shorter when they read these words.
PROMPT_TOO_LONG = "the prompt is too long"
ANTHROPIC_PATH = "/v1/messages"
# OpenAI's routes that TGI does not have.
NEW_PATHS = ("/v1/responses",)


@dataclass(frozen=True, slots=True)
class ErrorDialect:
    status: Callable[[InferenceError], int]
    body: Callable[[InferenceError], dict[str, Any]]  # makes the body of a refusal
    encode: Callable[[InferenceError], bytes]  # makes the event of an error in a stream, after status 200
    headers: Callable[[InferenceError], dict[str, str]] = lambda _: {}  # makes additional headers

    def answer(self, error: InferenceError) -> dict[str, Any]:
        self.note(error)
        return self.body(error)

    def event(self, error: InferenceError) -> bytes:
        self.note(error)
        return self.encode(error)

    def note(self, error: InferenceError) -> int:
        """Notes the error for the log line of the present request. Returns the error's status."""
        status, end = self.status(error), request_end.get()
        if end is not None:
            end.error_type, end.error_status = error.error_type, status
        return status


class ErrorDialects:
    def __init__(self, is_tgis: bool) -> None:
        """`is_tgis`: whether those of OpenAI's routes that TGI has tell errors as TGI does."""
        self._openai = TGI_OPENAI if is_tgis else OPENAI

    def of(self, path: str) -> ErrorDialect:
        """`path` may have a query."""
        if not path.startswith("/v1/"):
            return NATIVE
        if is_anthropics(path):
            return ANTHROPIC
        return OPENAI if any(_is_below(path, new) for new in NEW_PATHS) else self._openai


def is_anthropics(path: str) -> bool:
    """Whether the path is one of Anthropic's API, whether or not there is such a route."""
    return _is_below(path, ANTHROPIC_PATH)


def _is_below(path: str, root: str) -> bool:
    return path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/", "?")


def _native(error: InferenceError) -> dict[str, Any]:
    return {"error": error.text, "error_type": error.error_type}


def _status(error: InferenceError) -> int:
    return error.status


def _tgi_openai_event(error: InferenceError) -> bytes:
    return to_event({"error": {"message": error.text, "http_status_code": error.status}})


def _openai_status(error: InferenceError) -> int:
    """TGI's 422 is 400 in OpenAI's API, and 424 is 500."""
    return {422: 400, 424: 500}.get(error.status, error.status)


def _openai(error: InferenceError) -> dict[str, Any]:
    """OpenAI's envelope, with TGI's `error_type` beside it for clients that know it."""
    status = _openai_status(error)
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = error.code or CODES.get(status)
    text = f"{error.text}. {TOO_LONG}" if code == TooLongError.code else error.text
    body = {"message": text, "type": kind, "param": error.param if status == 400 else None, "code": code}
    return {"error": body, "error_type": error.error_type}


def _anthropic(error: InferenceError) -> dict[str, Any]:
    """Anthropic's envelope, with TGI's `error_type` beside it as in OpenAI's."""
    status = _openai_status(error)
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    text = f"{error.text}: {PROMPT_TOO_LONG}" if error.code == TooLongError.code else error.text
    body = {"type": kind, "message": text}
    # A request that the parser refuses has no id.
    return {"type": "error", "error": body, "request_id": request_id.get() or None, "error_type": error.error_type}


def _openai_headers(error: InferenceError) -> dict[str, str]:
    return NO_RETRY if error.status == 424 else {}


NATIVE = ErrorDialect(_status, _native, lambda error: to_event(_native(error)))
OPENAI = ErrorDialect(_openai_status, _openai, lambda error: to_event(_openai(error)), _openai_headers)
ANTHROPIC = ErrorDialect(_openai_status, _anthropic, lambda error: to_named_event(_anthropic(error)), _openai_headers)
TGI_OPENAI = ErrorDialect(_status, _native, _tgi_openai_event)
