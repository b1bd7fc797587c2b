"""Arguments between tags: what a tool's JSON schema allows, with strings as raw text and all other values as JSON."""

import re
from typing import Any

from text_generation_router.text.calls.formats import XmlSyntax
from text_generation_router.text.calls.found_calls import MAX_NAME_CHARS
from text_generation_router.text.calls.typed_values import types_of
from text_generation_router.text.grammars.alternatives import Alternatives
from text_generation_router.text.grammars.arguments_schema import arguments_of
from text_generation_router.text.grammars.asked import RefusedGrammarError
from text_generation_router.text.grammars.literals import LIMITS, Literals, json_notation
from text_generation_router.text.grammars.raw_strings import string_body
from text_generation_router.text.grammars.rules import ANY, MarkedTexts, Rules, literal, without
from text_generation_router.text.schema_references import resolved

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
