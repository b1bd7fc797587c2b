"""The program of a child process that renders a chat to a prompt.

A job is a Conversation as JSON. An answer is one byte (see Kind), then the prompt or the error: the field that is
wrong, a line feed and the text.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import orjson

from text_generation_router.errors import StartError, TemplateError
from text_generation_router.offload.child import Handler
from text_generation_router.text.templates.chat_template import ChatTemplate, Conversation, Message

ENTRY = f"{__name__}:make_handlers"
RENDER, CHECK = "render", "check"


class Kind(StrEnum):
    PROMPT = "+"
    ERROR = "-"


def make_handlers(setup: bytes) -> Mapping[str, Handler]:
    template = ChatTemplate(*orjson.loads(setup))

    def render(content: bytes) -> bytes:
        try:
            text = template.render(_conversation(orjson.loads(content)))
        except TemplateError as error:
            return (f"{Kind.ERROR}{error.param or ''}\n{error.text}").encode(errors="replace")
        return (Kind.PROMPT + text).encode()

    def check(_: bytes) -> bytes:
        """Compiles the templates."""
        try:
            template.compile()
        except StartError as error:
            return (Kind.ERROR + str(error)).encode(errors="replace")
        return Kind.PROMPT.encode()

    return {RENDER: render, CHECK: check}


def _conversation(value: dict[str, Any]) -> Conversation:
    messages = value.pop("messages")
    return Conversation(tuple(Message(**message) for message in messages), **value)
