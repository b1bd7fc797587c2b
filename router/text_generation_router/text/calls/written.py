"""How each format's calls are written, from the first marker to the last, for grammars that demand them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from text_generation_router.text.calls.formats import CallFormat


class Slot(Enum):
    """What stands in a call besides the same texts in every call."""

    NAME = 1
    QUOTED_NAME = 2  # the name as a JSON string
    ARGUMENTS = 3  # a JSON object of the tool's schema, or arguments between tags, with the line breaks around them
    LOOSE_ARGUMENTS = 4  # between tags, with or without line breaks around them
    NUMBER = 5  # a number of the call within the conversation


class Arguments(NamedTuple):
    """The place of the arguments in a call, and whose they are."""

    tool: str
    is_loose: bool = False  # whether the line breaks around tags may be missing


class CallNumber(Enum):
    """The place of a call's number in the conversation: the model writes it."""

    PLACE = 1


@dataclass(frozen=True, slots=True)
class WrittenForm:
    """Calls as a model writes them: `opening call (separator call)* closing`. Each marker is a part of its own."""

    call: tuple[str | Slot, ...]
    opening: tuple[str, ...] = ()
    separator: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    several: bool = True  # False: a call ends the answer


def _json_call(name: str, arguments: str, before: str = "{", after: str = "}") -> tuple[str | Slot, ...]:
    return (f'{before}"{name}": ', Slot.QUOTED_NAME, f', "{arguments}": ', Slot.ARGUMENTS, after)


_JSON_CALL = _json_call("name", "arguments")
_PYTHON_CALL = (Slot.NAME, "(", Slot.ARGUMENTS, ")")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",)

WRITTEN_FORMS = {
    "hermes": WrittenForm(
        ("<tool_call>", *_json_call("name", "arguments", "\n{", "}\n"), "</tool_call>"), separator=("\n",)
    ),
    "llama3": WrittenForm(_json_call("name", "parameters"), separator=("; ",)),
    "mistral-list": WrittenForm(_JSON_CALL, ("[TOOL_CALLS]", "["), (", ",), ("]",)),
    "mistral-args": WrittenForm(("[TOOL_CALLS]", Slot.NAME, "[ARGS]", Slot.ARGUMENTS)),
    "deepseek-v3": WrittenForm(
        (
            "<｜tool▁call▁begin｜>",
            "function",
            "<｜tool▁sep｜>",
            Slot.NAME,
            "\n```json\n",
            Slot.ARGUMENTS,
            "\n```",
            "<｜tool▁call▁end｜>",
        ),
        _DEEPSEEK[0],
        ("\n",),
        _DEEPSEEK[1],
    ),
    "deepseek-v31": WrittenForm(
        ("<｜tool▁call▁begin｜>", Slot.NAME, "<｜tool▁sep｜>", Slot.ARGUMENTS, "<｜tool▁call▁end｜>"),
        opening=_DEEPSEEK[0],
        closing=_DEEPSEEK[1],
    ),
    "kimi-k2": WrittenForm(
        (
            "<|tool_call_begin|>",
            "functions.",
            Slot.NAME,
            ":",
            Slot.NUMBER,
            "<|tool_call_argument_begin|>",
            Slot.ARGUMENTS,
            "<|tool_call_end|>",
        ),
        opening=("<|tool_calls_section_begin|>",),
        closing=("<|tool_calls_section_end|>",),
    ),
    "command": WrittenForm(
        ('{"tool_call_id": "', Slot.NUMBER, *_json_call("tool_name", "parameters", '", ')),
        ("<|START_ACTION|>", "[\n    "),
        (",\n    ",),
        ("\n]", "<|END_ACTION|>"),
    ),
    "qwen3-coder": WrittenForm(
        ("<tool_call>", "\n<function=", Slot.NAME, ">", Slot.ARGUMENTS, "</function>", "\n", "</tool_call>"),
        separator=("\n",),
    ),
    "seed-oss": WrittenForm(
        (
            "<seed:tool_call>",
            "\n<function=",
            Slot.NAME,
            ">",
            Slot.ARGUMENTS,
            "</function>",
            "\n",
            "</seed:tool_call>",
        ),
        separator=("\n",),
    ),
    "minimax-m2": WrittenForm(
        ('<invoke name="', Slot.NAME, '">', Slot.ARGUMENTS, "</invoke>", "\n"),
        opening=("<minimax:tool_call>", "\n"),
        closing=("</minimax:tool_call>",),
    ),
    "glm45": WrittenForm(("<tool_call>", Slot.NAME, Slot.LOOSE_ARGUMENTS, "</tool_call>"), separator=("\n",)),
    "llama4": WrittenForm(_PYTHON_CALL, ("[",), (", ",), ("]",)),
    "lfm2": WrittenForm(_PYTHON_CALL, ("<|tool_call_start|>", "["), (", ",), ("]", "<|tool_call_end|>")),
    "olmo3": WrittenForm(_PYTHON_CALL, ("<function_calls>",), ("\n",), ("</function_calls>",)),
    "phi4-mini": WrittenForm(_JSON_CALL, ("<|tool_call|>", "["), (", ",), ("]", "<|/tool_call|>")),
    "nemotron-v2": WrittenForm(_JSON_CALL, ("<TOOLCALL>", "["), (", ",), ("]", "</TOOLCALL>")),
    "granite": WrittenForm(_JSON_CALL, ("<|tool_call|>", "["), (", ",), ("]",)),
    # The token <|call|>, which would follow, ends the answer.
    "harmony": WrittenForm(
        (
            "<|channel|>",
            "commentary to=functions.",
            Slot.NAME,
            " ",
            "<|constrain|>",
            "json",
            "<|message|>",
            Slot.ARGUMENTS,
        ),
        several=False,
    ),
}


@dataclass(frozen=True, slots=True)
class WrittenCalls:
    """The calls of a request's tools. A text that is a special token of the tokenizer is a part of its own."""

    calls: tuple[tuple[str | Arguments | CallNumber, ...], ...]  # one for each tool
    opening: tuple[str, ...]
    separator: tuple[str, ...]
    closing: tuple[str, ...]
    several: bool
    syntax: CallFormat


def written_calls(syntax: CallFormat, names: Sequence[str]) -> WrittenCalls:
    """How calls of the tools `names` are written."""
    form = WRITTEN_FORMS[syntax.name]
    calls = tuple(tuple(_filled(part, name) for part in form.call) for name in names)
    return WrittenCalls(
        calls=calls,
        opening=form.opening,
        separator=form.separator,
        closing=form.closing,
        several=form.several,
        syntax=syntax,
    )


def _filled(part: str | Slot, name: str) -> str | Arguments | CallNumber:
    match part:
        case Slot.NAME:
            return name
        case Slot.QUOTED_NAME:
            return json.dumps(name, ensure_ascii=False)
        case Slot.ARGUMENTS:
            return Arguments(name)
        case Slot.LOOSE_ARGUMENTS:
            return Arguments(name, is_loose=True)
        case Slot.NUMBER:
            return CallNumber.PLACE
    return part
