"""Reads a large body in a child process, renders a chat's prompt there, and sends back values that are quick to parse.

Both sides of the exchange are in this file. A job is one line of JSON with the limits, then the body. An answer is a
JSON object that has either the values under `asked`, or an error's class and text.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import orjson

from text_generation_router.api.asking import CHAT, COMPAT_GENERATE, COMPLETION, GENERATE, TOKENIZE, Question, check
from text_generation_router.api.fields import Body, ListLimits
from text_generation_router.api.schemas import ChatRequest
from text_generation_router.errors import (
    InferenceError,
    InvalidJsonError,
    SuffixError,
    TemplateError,
    TooManyPromptsError,
    UnprocessableError,
    ValidationError,
)
from text_generation_router.offload.child import Handler
from text_generation_router.text.chat_template import ChatTemplate

ENTRY = f"{__name__}:make_handlers"
ERRORS: Mapping[str, type[InferenceError]] = {
    error.__name__: error
    for error in (
        InvalidJsonError,
        SuffixError,
        TemplateError,
        TooManyPromptsError,
        UnprocessableError,
        ValidationError,
    )
}

B = TypeVar("B", bound=Body)


# Functions that run in the router.


def setup_of(template: ChatTemplate | None) -> bytes:
    return orjson.dumps(None if template is None else [template.source, template.tokens])


def job_of(content: bytes | bytearray, limits: ListLimits) -> bytes:
    return b"\n".join((orjson.dumps(asdict(limits)), content))


def read_answer(question: Question[B], answer: bytes) -> B:
    """The values of the body. Raises the error that the child found."""
    value = orjson.loads(answer)
    if "asked" in value:
        return check(question.condensed, value["asked"])
    raise ERRORS[value["error"]].restored(value["text"])


# Functions that run in the child process.


def make_handlers(setup: bytes) -> Mapping[str, Handler]:
    source = orjson.loads(setup)
    template = None if source is None else ChatTemplate(*source)

    def chat(content: bytes, limits: ListLimits) -> dict[str, Any]:
        asked = CHAT.read(content, limits)
        assert isinstance(asked, ChatRequest)
        if template is None:
            raise TemplateError("template not found")
        messages = asked.conversation()
        values = asked.model_dump(exclude_unset=True, exclude={"messages"})
        del asked
        return values | {"prompt": template.render(messages)}

    questions = (GENERATE, COMPAT_GENERATE, TOKENIZE, COMPLETION)
    handlers = {question.name: _handler(_dumped(question)) for question in questions}
    return handlers | {CHAT.name: _handler(chat)}


def _dumped(question: Question[Body]) -> Callable[[bytes, ListLimits], dict[str, Any]]:
    def dump(content: bytes, limits: ListLimits) -> dict[str, Any]:
        # Only fields that were given: a missing `parameters` field must stay missing, because `{}` has another meaning.
        return question.read(content, limits).model_dump(exclude_unset=True)

    return dump


def _handler(read: Callable[[bytes, ListLimits], dict[str, Any]]) -> Handler:
    def handle(job: bytes) -> bytes:
        limits, _, content = job.partition(b"\n")
        try:
            return orjson.dumps({"asked": read(content, ListLimits(**orjson.loads(limits)))})
        except InferenceError as error:
            return orjson.dumps({"error": type(error).__name__, "text": error.text})

    return handle
