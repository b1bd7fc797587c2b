"""Reads a large body in a child process, renders a chat's prompt there, and sends back values that are quick to parse.

Both sides of the exchange are in this file. A job is one line of JSON with the limits, then the body. An answer is a
JSON object that has either the values under `asked` and the unknown fields, or an error's class and text.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import orjson

from text_generation_router import errors
from text_generation_router.api.anthropic.chat import NAMES as MESSAGES_NAMES
from text_generation_router.api.anthropic.chat import chat_of as chat_of_messages
from text_generation_router.api.anthropic.chat import counted_chat_of
from text_generation_router.api.asking import (
    CHAT,
    COMPAT_GENERATE,
    COMPLETION,
    COUNT_TOKENS,
    DETOKENIZE,
    GENERATE,
    INVOCATION,
    INVOKED,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    VERTEX,
    Question,
    Read,
    answered,
    compile_schemas,
    instances_of,
    parse,
)
from text_generation_router.api.common.fields import Body, ListLimits
from text_generation_router.api.openai.schemas import ChatOptions, ChatRequest
from text_generation_router.api.responses.chat import NAMES as RESPONSES_NAMES
from text_generation_router.api.responses.chat import chat_of as chat_of_response
from text_generation_router.errors import InferenceError, TemplateError
from text_generation_router.offload.child import Handler
from text_generation_router.text.grammars.tool_grammar import CallWays
from text_generation_router.text.templates.chat_template import ChatTemplate
from text_generation_router.text.validation import renaming

ENTRY = f"{__name__}:make_handlers"
ERRORS: Mapping[str, type[InferenceError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, InferenceError)
}

B = TypeVar("B", bound=Body)
# What a child sends back: the values that were given, and the names of unknown fields and of what is left out.
Dumped = dict[str, Any]
Dump = Callable[[dict[str, Any], ListLimits], Dumped]


# Functions that run in the router.


def setup_of(template: ChatTemplate | None, ways: CallWays, chat_ways: CallWays) -> bytes:
    """`chat_ways`: those of the chats that follow --tgi-dialect; the other routes' are `ways`."""
    return orjson.dumps([None if template is None else template.setup, ways, chat_ways])


def job_of(content: bytes | bytearray, limits: ListLimits) -> bytes:
    return b"\n".join((orjson.dumps(asdict(limits)), content))


def read_answer(question: Question[B], answer: bytes) -> Read[B]:
    """The values of the body. Raises the error that the child found."""
    value = orjson.loads(answer)
    if "asked" in value:
        return Read(question.restore(value["asked"]), tuple(value["unknown"]), tuple(value["left_out"]))
    raise ERRORS[value["error"]].restored(value["text"], value["param"])


# Functions that run in the child process.


def make_handlers(setup: bytes) -> Mapping[str, Handler]:
    compile_schemas()
    sources, *all_ways = orjson.loads(setup)
    template = None if sources is None else ChatTemplate(*sources)
    own_ways, chat_ways = (CallWays(**values) for values in all_ways)

    def rendering(
        question: Question[B],
        chat_of: Callable[[B], ChatOptions],
        turns: set[str],
        route_names: Mapping[str, str],
        ways: CallWays = own_ways,
    ) -> Dump:
        """`turns`: the fields that make the conversation, which are not sent back. `route_names`: the
        `names` of a `Prompt`."""

        def dump(value: dict[str, Any], limits: ListLimits) -> Dumped:
            read = question.read_value(value, limits)
            asked, names = read.asked, _names(read)
            if template is None:
                raise TemplateError("template not found", None)
            with renaming(route_names):
                chat = chat_of(asked)
                assert isinstance(chat, ChatRequest)
                conversations = {"prompt": chat.conversation(ways)}
                if chat.may_answer_without_tools(ways):
                    conversations["prompt_without_tools"] = chat.without_tools().conversation(ways)
                values = asked.model_dump(exclude_unset=True, exclude=turns)
                del asked, chat, read
                prompts = {name: template.render(conversation) for name, conversation in conversations.items()}
            return {"asked": values | prompts, **names}

        return dump

    questions = (GENERATE, COMPAT_GENERATE, TOKENIZE, DETOKENIZE, COMPLETION)
    dumps: dict[str, Dump] = {question.name: _dump_of(question) for question in questions}
    dumps[CHAT.name] = rendering(CHAT, lambda asked: asked, {"messages", "documents"}, {}, chat_ways)
    dumps[MESSAGES.name] = rendering(MESSAGES, chat_of_messages, {"system", "messages"}, MESSAGES_NAMES)
    dumps[RESPONSES.name] = rendering(RESPONSES, chat_of_response, {"input"}, RESPONSES_NAMES)
    dumps[COUNT_TOKENS.name] = rendering(COUNT_TOKENS, counted_chat_of, {"system", "messages"}, MESSAGES_NAMES)

    def invocation(value: dict[str, Any], limits: ListLimits) -> Dumped:
        kind = answered(value, INVOKED).name
        dumped = dumps[kind](value, limits)
        return dumped | {"asked": {"kind": kind, "asked": dumped["asked"]}}

    def vertex(value: dict[str, Any], limits: ListLimits) -> Dumped:
        kinds = [(question.name, dumps[question.name](one, limits)) for question, one in instances_of(value, limits)]
        instances = [{"kind": kind, "asked": dumped["asked"]} for kind, dumped in kinds]
        names = {kind: [name for _, one in kinds for name in one[kind]] for kind in ("unknown", "left_out")}
        return {"asked": {"instances": instances}, **names}

    dumps |= {INVOCATION.name: invocation, VERTEX.name: vertex}
    return {name: _handler(dump) for name, dump in dumps.items()}


def _dump_of(question: Question[Body]) -> Dump:
    def dump(value: dict[str, Any], limits: ListLimits) -> Dumped:
        read = question.read_value(value, limits)
        # Only fields that were given: a missing `parameters` field must stay missing, because `{}` has another meaning.
        return {"asked": read.asked.model_dump(exclude_unset=True), **_names(read)}

    return dump


def _names(read: Read[Any]) -> Dumped:
    return {"unknown": read.unknown, "left_out": read.left_out}


def _handler(dump: Dump) -> Handler:
    def handle(job: bytes) -> bytes:
        limits, _, content = job.partition(b"\n")
        try:
            return orjson.dumps(dump(parse(content), ListLimits(**orjson.loads(limits))))
        except InferenceError as error:
            return orjson.dumps({"error": type(error).__name__, "text": error.text, "param": error.param})

    return handle
