"""The JSON shape of an error: TGI's or OpenAI's. The path of the route alone decides which."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from text_generation_router.errors import InferenceError
from text_generation_router.http.encoding import to_event


@dataclass(frozen=True, slots=True)
class ErrorDialect:
    answer: Callable[[InferenceError], dict[str, Any]]  # makes the body of a refusal
    event: Callable[[InferenceError], bytes]  # makes the event of an error in a stream, after status 200


def dialect_of(path: str) -> ErrorDialect:
    return OPENAI if path.startswith("/v1/") else NATIVE


def _native(error: InferenceError) -> dict[str, Any]:
    return {"error": error.text, "error_type": error.error_type}


def _openai_event(error: InferenceError) -> bytes:
    return to_event({"error": {"message": error.text, "http_status_code": error.status}})


NATIVE = ErrorDialect(_native, lambda error: to_event(_native(error)))
OPENAI = ErrorDialect(_native, _openai_event)  # as in TGI, refusals have TGI's shape on OpenAI's routes too
