"""Calls of tools by a model whose own way to call them is not known, as in TGI: the tools are described in the last
message, and a grammar makes the answer the JSON object {"function": {"_name": NAME, …arguments}}.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from text_generation_router.errors import GrammarError
from text_generation_router.text.templates.chat_template import Conversation
from text_generation_router.text.tokens.pieces import CallArguments, CallStart, Piece, Text

# The name of the choice to call none of the tools.
NO_TOOL = "no_tool"
NO_TOOL_DESCRIBED = {
    "type": "function",
    "function": {
        "name": NO_TOOL,
        "description": "Open ended response with no specific tool selected",
        "parameters": {},
    },
}
TOOL_PROMPT = (
    "\nYou may call one of the functions above. Answer with one JSON object that names the function and gives its"
    " parameters as a dictionary. Use no variables.\n"
)
# How an answer begins, up to the end of the function's name.
BEGINNING = re.compile(r'\s*\{\s*"function"\s*:\s*\{\s*"_name"\s*:\s*"([^"\\]*)"\s*(,\s*)?')

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallWays:
    """How a model is told of tools, and how it calls them."""

    knows_calls: bool = False  # whether the model's own way to call tools is known
    in_template: bool = False  # whether the chat template describes the tools
    guides: bool = False  # whether a grammar can guide the calls of such an answer without demanding them

    def are_own(self, is_required: bool, is_strict: bool) -> bool:
        """Whether the model calls in its own way; otherwise a grammar makes a call."""
        if not (self.knows_calls and self.in_template):
            return False
        return is_required or self.guides or not is_strict


def calls_schema(functions: Sequence[tuple[str, Schema]]) -> Schema:
    """The schema of an answer that calls one of the functions, each with its name and the schema of its arguments.
    Raises GrammarError."""
    return {
        "$functions": {name: _function_schema(name, schema) for name, schema in functions},
        "type": "object",
        "properties": {"function": {"anyOf": [{"$ref": f"#/$functions/{name}"} for name, _ in functions]}},
        "required": ["function"],
        "additionalProperties": False,
    }


def _function_schema(name: str, schema: Schema) -> Schema:
    moved = _with_moved_refs(schema, f"#/$functions/{name}")
    assert isinstance(moved, dict)
    given, needed = moved.get("properties") or {}, moved.get("required") or []
    if not isinstance(given, dict) or not isinstance(needed, list):
        raise GrammarError("tools", f"the schema of `{name}` must have `properties` as an object, `required` as a list")
    properties = {"_name": {"type": "string", "const": name}} | given
    required = ["_name", *needed]
    return {"additionalProperties": False} | moved | {"type": "object", "properties": properties, "required": required}


def _with_moved_refs(value: Any, place: str) -> Any:
    """The schema with its references to itself as they are when it stands at `place` of another schema."""
    if isinstance(value, list):
        return [_with_moved_refs(item, place) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {name: _with_moved_refs(item, place) for name, item in value.items()}
    ref = moved.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        moved["$ref"] = place + ref[1:]
    return moved


def name_pattern(names: Sequence[str]) -> str:
    """A regular expression of how an answer begins that calls one of `names`, up to the end of the name."""
    return r'\{"function": \{"_name": "(' + "|".join(map(re.escape, names)) + ')"'


def chosen_name(text: str) -> str | None:
    """The name in a text that `name_pattern` describes; None if the text was cut off before the name's end."""
    found = BEGINNING.match(text)
    return found[1] if found else None


def described(
    conversation: Conversation, tools: Sequence[Mapping[str, Any]], prompt: str, in_template: bool
) -> Conversation:
    """The conversation with the tools in its last message. `in_template`: whether the chat template describes the
    conversation's tools itself, so that only the prompt is added."""
    *others, last = conversation.messages
    listed = "" if in_template else orjson.dumps(list(tools)).decode() + "\n"
    added = f"\n---\n{listed}{prompt}"
    content = last.content or ""
    grown = content + added if isinstance(content, str) else [*content, {"type": "text", "text": added}]
    return replace(conversation, messages=(*others, replace(last, content=grown)))


class GrammarCallReader:
    """Reads an answer of the schema of `calls_schema` as one call. Its arguments are the object without `_name`."""

    def __init__(self) -> None:
        self._text = ""
        self._begun = False
        self._held = ""  # closing brackets, of which the last one is the answer's own and not the arguments'

    def push(self, text: str, special: bool = False) -> Sequence[Piece]:
        if self._begun:
            return self._arguments(text)
        self._text += text
        found = BEGINNING.match(self._text)
        if found is None or found.end() == len(self._text):  # a comma may follow
            return ()
        self._begun = True
        return CallStart(0, found[1]), *self._arguments("{" + self._text[found.end() :])

    def finish(self, is_cut: bool = False) -> Sequence[Piece]:
        """A text that the model has ended before the function's name is given out as it is."""
        if self._begun:
            closing, self._held = self._held.rstrip().removesuffix("}").rstrip(), ""
            return (CallArguments(0, closing),) if closing else ()
        return (Text(self._text),) if self._text and not is_cut else ()

    def _arguments(self, text: str) -> Sequence[Piece]:
        text = self._held + text
        certain = text.rstrip("} \n\t\r")
        self._held = text[len(certain) :]
        return (CallArguments(0, certain),) if certain else ()
