"""Demanded calls of one format on a server: those that a model's own text has, and those that a grammar alone makes."""

import json
from typing import Any

import jsonschema
import written
from calls import at_once
from written import Answer, WritingServer

from text_generation_router.text.calls.formats import CALL_FORMATS
from text_generation_router.text.calls.tests.call_texts import TOOLS
from text_generation_router.text.calls.tests.walks import spelled
from text_generation_router.text.calls.written import WRITTEN_FORMS

WEATHER = {"city": "Rome", "days": 3, "exact": True, "units": ["a"]}
CODE = {"code": 'if a < b:\n    print("</b>", {1: [2]})\n'}
# Tools whose calls are short, whatever a model without sense writes.
BOUNDED: dict[str, Any] = {
    "pick": {
        "type": "object",
        "properties": {
            "note": {"type": "string", "maxLength": 6},
            "size": {"enum": ["big", "small", 7, None]},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
            "place": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
            "maybe": {"type": ["string", "null"], "maxLength": 4},
        },
        "required": ["note", "size", "place"],
    },
    "stop": {"type": "object", "properties": {}},
}


def check_demanded(server: WritingServer, calls: str) -> None:
    syntax, form = CALL_FORMATS[calls], WRITTEN_FORMS[calls]
    asked = [("weather", WEATHER), ("run.code", CODE)][: 2 if form.several else 1]
    server.write(spelled(syntax, *asked))
    choices = [{"tool_choice": "required"}, {"tools": strict(TOOLS), "tool_choice": "required"}]
    choices += [] if syntax.is_bare else [{"tools": strict(TOOLS)}]  # a bare call is not looked for in a text
    for answer in answers(server, TOOLS, *choices):
        assert read(answer) == asked and answer.ending == "tool_calls", calls
    server.write(spelled(syntax, ("run.code", CODE)))
    for answer in answers(server, TOOLS, {"tool_choice": {"type": "function", "function": {"name": "run.code"}}}):
        assert read(answer) == [("run.code", CODE)] and answer.ending == "tool_calls", calls


def check_made_by_a_grammar(server: WritingServer, calls: str) -> None:
    """After the first marker the model, which has no sense, samples its own text: without it, it might reason."""
    form = WRITTEN_FORMS[calls]
    server.begin(str((form.opening or form.call)[0]))
    sampled = {"temperature": 1, "tool_choice": "required"}
    several = [sampled | {"seed": seed} for seed in range(4)]
    single = [{"parallel_tool_calls": False}, {"tool_choice": {"type": "function", "function": {"name": "pick"}}}]
    for answer in answers(server, BOUNDED, *several):
        check_valid(answer)
    for answer in answers(server, BOUNDED, *(sampled | {"seed": 9} | fields for fields in single)):
        check_valid(answer)
        assert len(answer.calls) == 1 and answer.ending == "tool_calls"
    choice = {"type": "any", "disable_parallel_tool_use": True}
    for answer in at_once(server.url, written.anthropic("Hi.", BOUNDED, tool_choice=choice, temperature=1)):
        check_valid(answer)
        assert len(answer.calls) == 1 and answer.ending == "tool_use"


def check_valid(answer: Answer) -> None:
    """After many calls the answer is cut off, and what has come of the last one may be text."""
    is_cut = answer.ending == "length"
    assert answer.calls and not answer.reasoning and (is_cut or not answer.content)
    assert len(set(answer.ids)) == len(answer.ids)
    for name, arguments in answer.calls[: -1 if is_cut else None]:
        jsonschema.Draft202012Validator(BOUNDED[name]).validate(json.loads(arguments))


def answers(server: WritingServer, tools: dict[str, Any], *fields: dict[str, Any]) -> list[Answer]:
    """To whole answers and streams, each with some fields."""
    apis = (written.chat, written.chat_stream)
    return [answer for [answer] in at_once(server.url, *(api("Hi.", tools, **some) for some in fields for api in apis))]


def read(answer: Answer) -> list[tuple[str, Any]]:
    assert answer.content == answer.reasoning == ""
    return [(name, json.loads(arguments)) for name, arguments in answer.calls]


def strict(schemas: dict[str, Any]) -> list[dict[str, Any]]:
    return [tool | {"function": tool["function"] | {"strict": True}} for tool in written.tools_of(schemas)]
