"""The rules of a tool's arguments in calls whose arguments are not one JSON object."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from text_generation_router.text.calls.formats import XmlSyntax
from text_generation_router.text.calls.found_calls import MAX_NAME_CHARS
from text_generation_router.text.calls.typed_values import json_of, types_of
from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind, RefusedGrammarError
from text_generation_router.text.grammars.literals import (
    LIMITS,
    PYTHON,
    Literals,
    combined,
    json_notation,
    listed_values,
    of_type,
    sequence,
    string_body,
)
from text_generation_router.text.grammars.rules import ANY, MarkedTexts, Rules, literal, without
from text_generation_router.text.grammars.schemas import prepare
from text_generation_router.text.schema_references import resolved

# Arguments between tags: what a tool's JSON schema allows, with strings as raw text and all other values as JSON.

# Arguments between tags that may be strings among other types: a text's beginning tells which value it is.

_SPACE = r"[\s\x1c-\x1f]*"
# Texts that a reader of calls takes for a value of a JSON type: the whole text (_READ_AS), or any text with this first
# character (_BEGINS).
_READ_AS = {"null": f"/{_SPACE}(?i:null|none){_SPACE}/", "boolean": f"/{_SPACE}(?i:true|false){_SPACE}/"}
_BEGINS = {"array": r"\[", "object": r"\{", "number": "[-0-9]", "integer": "[-0-9]"}
_SPELLED = {"null": ("null",), "boolean": ("true", "false")}


class Alternatives:
    """The values of a schema that may be strings, or whose types it does not say: texts, and other values."""

    def __init__(self, root: dict[str, Any], types: frozenset[str], avoided: str) -> None:
        """`types`: all types that the schema says, by which a reader tells what a text is."""
        self.others: list[dict[str, Any]] = []  # lists, objects and numbers, which are written as JSON
        self._root, self._types, self._avoided = root, types, avoided
        self._listed: list[str] = []
        self._strings: list[str] = []  # the bodies of terminals
        self._free: set[str] = set()  # types of which every value is allowed

    def add(self, schema: Any) -> None:
        schema = resolved(self._root, schema)
        if schema is True or (isinstance(schema, dict) and not LIMITS & schema.keys()):
            self._strings.append(ANY)
            return
        if not isinstance(schema, dict):
            raise RefusedGrammarError("a part of its schema allows no value, or refers to nothing")
        limits = LIMITS & schema.keys()
        kinds = schema.get("type")
        if ("enum" in limits or "const" in limits) and limits <= {"enum", "const", "type"}:
            self._listed += [text for value in listed_values(schema) if (text := self._text_of(value)) is not None]
        elif limits in ({"anyOf"}, {"allOf"}) and (parts := combined(schema)):
            for part in parts:
                self.add(part)
        elif isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
            for kind in kinds:
                self.add(of_type(schema, kind))
        else:
            self._add_of_one_type(schema, limits, kinds)

    def _add_of_one_type(self, schema: dict[str, Any], limits: frozenset[str], kind: Any) -> None:
        if kind == "string":
            self._strings.append(string_body(schema, limits))
        elif limits == {"type"} and kind in ("boolean", "integer", "null", "number"):
            self._free.add(kind)
        elif isinstance(kind, str) and kind in _BEGINS:
            self.others.append(schema)
        else:
            keyword = next(iter(sorted(limits - {"type"})), "type")
            raise RefusedGrammarError(f"the keyword `{keyword}` is not supported for a value that may be a string")

    def texts(self) -> str:
        """The body of a terminal for all that is not in `others`; "": nothing."""
        if ANY in self._strings:
            self._strings = [ANY]
        elif numbers := self._free & {"integer", "number"}:  # a text may be one, and not be allowed as a string
            self.others.append({"type": max(numbers)})
        free = self._free if ANY in self._strings else frozenset[str]()
        like_others = [_READ_AS[kind] for kind in sorted(_READ_AS.keys() & self._types - free)]
        begins = {_BEGINS[kind] for kind in _BEGINS.keys() & self._types - free}
        if begins:
            like_others.append(f"/{_SPACE}({'|'.join(sorted(begins))})/ {ANY}")
        texts = ["".join((f"({body})", *(f" & ~({other})" for other in like_others))) for body in self._strings]
        listed = (*self._listed, *(text for kind in self._free - free for text in _SPELLED.get(kind, ())))
        return " | ".join((*texts, *map(literal, sorted(set(listed)))))

    def _text_of(self, value: Any) -> str | None:
        """How a value is written; None: a reader would read another one."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        read = json.loads(json_of(text, self._types))
        same = type(read) is type(value) and read == value
        return text if same and self._avoided not in text else None


_KEY = re.compile(r"[^\s<>\"](?:[^\n<>\"]*[^\s<>\"])?")
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"


class TaggedArguments:
    def __init__(
        self, rules: Rules, syntax: XmlSyntax, marks: MarkedTexts, schema: dict[str, Any], is_loose: bool
    ) -> None:
        """`schema`: prepared. `is_loose`: the line breaks around arguments may be missing."""
        self._rules, self._syntax, self._marks, self._root = rules, syntax, marks, schema
        self._literals = Literals(rules, schema, json_notation(syntax.after_value))
        self._gap = literal("\n") + "?" * is_loose

    def all(self) -> str:
        """What stands for the arguments in a rule, with the line breaks around them. Raises RefusedGrammarError."""
        arguments = arguments_of(self._root)
        if not arguments.listed and arguments.others is not False:
            return self.anything(arguments.others)
        parts = []
        for name, schema in arguments.listed.items():
            if not _KEY.fullmatch(name) or len(name) > MAX_NAME_CHARS:
                raise RefusedGrammarError(f"the name of the argument {name[:64]!r} cannot be written between tags")
            try:
                value = self._value(schema)
            except RefusedGrammarError as refusal:
                raise RefusedGrammarError(f"the argument `{name}`: {refusal}") from None
            argument = self._rules.rule(f"{self._gap} {self._opening(literal(name))} {value}")
            parts.append(argument if name in arguments.required else f"{argument}?")
        return " ".join((*parts, self._gap))

    def anything(self, schema: Any = True) -> str:
        """Arguments of any names, whose values are any texts that the schema of a string allows."""
        schema = resolved(self._root, schema)
        limits = LIMITS & schema.keys() if isinstance(schema, dict) else frozenset[str]()
        if limits and schema.get("type") != "string":
            raise RefusedGrammarError("arguments that the schema does not list are supported as strings only")
        text = self._text(string_body(schema, limits) if limits else ANY)
        key = self._rules.terminal(_ANY_KEY)
        return f"({self._gap} {self._opening(key)} {self._lead} {text})* {self._gap}"

    def _opening(self, key: str) -> str:
        xml, sequence = self._syntax, self._marks.sequence
        value = f"{self._gap} {sequence(xml.before_value)}" if xml.before_value else ""
        return f"{sequence(xml.before_key)} {key} {sequence(xml.after_key)} {value}"

    @property
    def _lead(self) -> str:
        """What stands between an opening tag and a value."""
        return literal("\n") if self._syntax.is_framed else ""

    def _value(self, schema: Any) -> str:
        """A value, from the end of its opening tag to the end of its closing tag."""
        types = types_of(schema, self._root)
        if types and "string" not in types:
            return f"{self._lead} {self._json(schema)}"
        values = Alternatives(self._root, types, self._syntax.after_value)
        values.add(schema)
        texts = values.texts()
        parts = [self._text(texts)] if texts else []
        parts += [self._json(part) for part in values.others]
        if not parts:
            raise RefusedGrammarError("none of its values can be written between tags")
        return f"{self._lead} ({' | '.join(parts)})"

    def _json(self, schema: Any) -> str:
        end = "\n" if self._syntax.is_framed else ""
        return f"{self._literals.of(schema)} {self._marks.sequence(end, self._syntax.after_value)}"

    def _text(self, body: str) -> str:
        """A text and its closing tag. They are one terminal, unless the tag is a special token: a text of its own would
        be as long as it can be."""
        closing, end = self._syntax.after_value, "\n" if self._syntax.is_framed else ""
        text = f"({without(body, closing)})"
        if self._marks.is_token(closing):
            return f"{self._rules.terminal(f'{text} {literal(end)}' if end else text)} {self._marks.sequence(closing)}"
        return self._rules.terminal(f"{text} {literal(end + closing)}")


# What the JSON schema of all arguments of a tool says of each of them.

_KNOWN = frozenset(("additionalProperties", "properties", "required", "type"))


@dataclass(frozen=True, slots=True)
class ArgumentSchemas:
    listed: Mapping[str, Any]  # the schemas of arguments by their names
    required: frozenset[str]
    others: Any  # the schema of arguments that are not listed; False: no other argument is allowed


def arguments_of(root: dict[str, Any]) -> ArgumentSchemas:
    """`root`: prepared. Raises RefusedGrammarError."""
    schema = resolved(root, root)
    if not isinstance(schema, dict) or not _is_object(schema.get("type", "object")):
        raise RefusedGrammarError("the schema of a tool's arguments must be that of an object")
    listed, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list):
        raise RefusedGrammarError("it must have `properties` as an object, `required` as a list")
    if missing := [name for name in required if not (isinstance(name, str) and name in listed)]:
        raise RefusedGrammarError(f"`required` names {str(missing[0])[:64]!r}, which `properties` does not have")
    limits = LIMITS & schema.keys()
    if _is_at_most(schema.get("minProperties"), len(required)):
        limits -= {"minProperties"}
    if _is_at_most(len(listed), schema.get("maxProperties")):
        limits -= {"maxProperties"}
    if unsupported := sorted(limits - _KNOWN):
        raise RefusedGrammarError(f"the keyword `{unsupported[0]}` is not supported for a tool's arguments as a whole")
    given = {name: part for name, part in listed.items() if part is not False or name in required}
    return ArgumentSchemas(given, frozenset(required), schema.get("additionalProperties", True))


def _is_object(kinds: Any) -> bool:
    return kinds == "object" or (isinstance(kinds, list) and "object" in kinds)


def _is_at_most(value: Any, most: Any) -> bool:
    return isinstance(value, int) and isinstance(most, int) and value <= most


# Arguments as in a call of Python: KEY=LITERAL, …

_PYTHON_KEY = re.compile(r"\w+")
_ANY_PYTHON_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


class PythonicArguments:
    def __init__(self, rules: Rules, schema: dict[str, Any]) -> None:
        """`schema`: prepared."""
        self._rules, self._root = rules, schema
        self._literals = Literals(rules, schema, PYTHON)

    def all(self) -> str:
        """What stands for the arguments in a rule. Raises RefusedGrammarError."""
        arguments = arguments_of(self._root)
        if not arguments.listed and arguments.others is not False:
            return self.anything(self._literals.of(arguments.others))
        members = []
        for name, schema in arguments.listed.items():
            if not _PYTHON_KEY.fullmatch(name) or len(name) > MAX_NAME_CHARS:
                raise RefusedGrammarError(f"the argument {name[:64]!r} has a name that Python does not allow")
            try:
                value = self._literals.of(schema)
            except RefusedGrammarError as refusal:
                raise RefusedGrammarError(f"the argument `{name}`: {refusal}") from None
            members.append((f"{literal(name + '=')} {value}", name in arguments.required))
        return sequence(self._rules, members)

    def anything(self, value: str = "") -> str:
        """Arguments of any names. `value`: what stands for their values in a rule, by default any literals."""
        argument = f'{self._rules.terminal(_ANY_PYTHON_KEY)} "=" {value or self._literals.any()}'
        return f'({argument} (", " {argument})*)?'


@dataclass(frozen=True, slots=True)
class ArgumentStyle:
    """How arguments are written: between tags or, without them, as in a call of Python."""

    tags: XmlSyntax | None = None
    is_loose: bool = False  # whether the line breaks around tags may be missing


@dataclass(frozen=True, slots=True)
class DefinedRule:
    """A part of a rule, and the definitions that it refers to."""

    body: str
    definitions: str = ""


def arguments_rule(
    style: ArgumentStyle, schema: Mapping[str, Any] | None, prefix: str, token_ids: Mapping[str, int]
) -> DefinedRule:
    """The arguments that a tool's schema allows; without one, any arguments. `prefix`: of all names that are defined.
    `token_ids`: of the texts of the syntax that are special tokens. Raises RefusedGrammarError."""
    rules, root = Rules(prefix), orjson.loads(orjson.dumps(schema or {}))
    prepare(root)
    if style.tags is None:
        made: TaggedArguments | PythonicArguments = PythonicArguments(rules, root)
    else:
        made = TaggedArguments(rules, style.tags, MarkedTexts(token_ids), root, style.is_loose)
    body = made.anything() if schema is None else made.all()
    return DefinedRule(body, rules.text)


def asked_arguments(style: ArgumentStyle, schema: Mapping[str, Any], is_loose: bool = False) -> AskedGrammar:
    """What is to be checked before such a rule is used."""
    text = orjson.dumps([asdict(style), schema]).decode()
    return AskedGrammar("tools", GrammarKind.ARGUMENTS, text, is_loose=is_loose)


def rules_of(asked: AskedGrammar) -> str:
    """The rules of `asked_arguments`, with special tokens as texts. Raises RefusedGrammarError."""
    style, schema = orjson.loads(asked.text)
    tags = XmlSyntax(**style["tags"]) if style["tags"] else None
    try:
        rule = arguments_rule(ArgumentStyle(tags, style["is_loose"]), schema, "a", {})
    except RecursionError:
        raise RefusedGrammarError("the schema is nested too deeply") from None
    return f'start: "(" {rule.body} ")"\n{rule.definitions}'
