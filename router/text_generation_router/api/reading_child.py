"""Reads a large body in a child process, renders a chat's prompt there, and sends back values that are quick to parse.

The router's side of the exchange is in `common/body_kinds.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import orjson

from text_generation_router.api.anthropic.chat import NAMES as MESSAGES_NAMES
from text_generation_router.api.anthropic.chat import chat_of as chat_of_messages
from text_generation_router.api.anthropic.chat import counted_chat_of
from text_generation_router.api.anthropic.fields import COUNT_TOKENS_BODY, MESSAGES_BODY
from text_generation_router.api.cloud_bodies import INVOCATION, INVOKED, VERTEX, answered, instances_of
from text_generation_router.api.common.body_kinds import Read, RequestBody, compile_schemas, parse
from text_generation_router.api.common.fields import Body, ListLimits
from text_generation_router.api.openai.fields import CHAT_BODY, COMPLETION_BODY
from text_generation_router.api.openai.schemas import ChatOptions, ChatRequest
from text_generation_router.api.responses.chat import NAMES as RESPONSES_NAMES
from text_generation_router.api.responses.chat import chat_of as chat_of_response
from text_generation_router.api.responses.fields import RESPONSES_BODY
from text_generation_router.api.tgi.fields import COMPAT_GENERATE_BODY, DETOKENIZE_BODY, GENERATE_BODY, TOKENIZE_BODY
from text_generation_router.errors import InferenceError, TemplateError
from text_generation_router.offload.child import Handler
from text_generation_router.text.grammars.tool_grammar import CallWays
from text_generation_router.text.templates.chat_template import ChatTemplate
from text_generation_router.text.validation import renaming

ENTRY = f"{__name__}:make_handlers"
B = TypeVar("B", bound=Body)
# What a child process sends back: the values that the body contains, and the names of unknown fields and of parts that
# were left out.
Dumped = dict[str, Any]
Dump = Callable[[dict[str, Any], ListLimits], Dumped]


# Functions that run in the router.


def setup_of(template: ChatTemplate | None, ways: CallWays, chat_ways: CallWays) -> bytes:
    """The setup that each child process gets, as JSON. `chat_ways`: how tools are called in chats of the routes that
    follow --tgi-dialect. `ways`: the same for the chats of all other routes."""
    return orjson.dumps([None if template is None else template.setup, ways, chat_ways])


# Functions that run in the child process.


def make_handlers(setup: bytes) -> Mapping[str, Handler]:
    compile_schemas()
    sources, *all_ways = orjson.loads(setup)
    template = None if sources is None else ChatTemplate(*sources)
    own_ways, chat_ways = (CallWays(**values) for values in all_ways)

    def rendering(
        kind: RequestBody[B],
        chat_of: Callable[[B], ChatOptions],
        turns: set[str],
        route_names: Mapping[str, str],
        ways: CallWays = own_ways,
    ) -> Dump:
        """A handler that reads a body and renders its prompt. `turns`: the fields that contain the conversation, which
        are not sent back. `route_names`: the `names` of a `Prompt`."""

        def dump(value: dict[str, Any], limits: ListLimits) -> Dumped:
            read = kind.read_value(value, limits)
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

    kinds = (GENERATE_BODY, COMPAT_GENERATE_BODY, TOKENIZE_BODY, DETOKENIZE_BODY, COMPLETION_BODY)
    dumps: dict[str, Dump] = {kind.name: _dump_of(kind) for kind in kinds}
    dumps[CHAT_BODY.name] = rendering(CHAT_BODY, lambda asked: asked, {"messages", "documents"}, {}, chat_ways)
    dumps[MESSAGES_BODY.name] = rendering(MESSAGES_BODY, chat_of_messages, {"system", "messages"}, MESSAGES_NAMES)
    dumps[RESPONSES_BODY.name] = rendering(RESPONSES_BODY, chat_of_response, {"input"}, RESPONSES_NAMES)
    dumps[COUNT_TOKENS_BODY.name] = rendering(
        COUNT_TOKENS_BODY, counted_chat_of, {"system", "messages"}, MESSAGES_NAMES
    )

    def invocation(value: dict[str, Any], limits: ListLimits) -> Dumped:
        kind = answered(value, INVOKED).name
        dumped = dumps[kind](value, limits)
        return dumped | {"asked": {"kind": kind, "asked": dumped["asked"]}}

    def vertex(value: dict[str, Any], limits: ListLimits) -> Dumped:
        dumped = [(kind.name, dumps[kind.name](one, limits)) for kind, one in instances_of(value, limits)]
        instances = [{"kind": kind, "asked": values["asked"]} for kind, values in dumped]
        names = {field: [name for _, one in dumped for name in one[field]] for field in ("unknown", "left_out")}
        return {"asked": {"instances": instances}, **names}

    dumps |= {INVOCATION.name: invocation, VERTEX.name: vertex}
    return {name: _handler(dump) for name, dump in dumps.items()}


def _dump_of(kind: RequestBody[Body]) -> Dump:
    def dump(value: dict[str, Any], limits: ListLimits) -> Dumped:
        read = kind.read_value(value, limits)
        # Only fields that the body contains: a missing `parameters` field must stay missing, because `{}` has another
        # meaning.
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
