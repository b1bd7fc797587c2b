"""Leaves out of a JSON schema what no grammar follows, for requests that do not demand that the schema is followed."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import orjson

from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind, RefusedGrammarError
from text_generation_router.text.grammars.schemas import Schema, has_large_multiples, parts_of
from text_generation_router.text.grammars.unsupported import unsupported
from text_generation_router.text.schema_references import target

# Keywords that some grammars follow and others do not, which only a check tells. The first are put back first.
TRIED = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems",
    "maxItems", "minProperties", "maxProperties", "additionalProperties", "patternProperties", "format", "$ref",
    "oneOf", "pattern",
)  # fmt: skip


def loosened(asked: AskedGrammar, is_followed: Callable[[AskedGrammar], bool]) -> tuple[AskedGrammar, tuple[str, ...]]:
    """What was asked without the keywords that cannot be followed, and their names. Raises RefusedGrammarError."""
    loosening = Loosening(asked)
    if not is_followed(loosening.result()):
        loosening.leave_out_patterns(is_followed)
    tried = set(loosening.present)
    if not is_followed(loosening.result()) and is_followed(loosening.result(tried)):
        for name in TRIED:
            if name in tried and is_followed(loosening.result(tried - {name})):
                tried.remove(name)
        return loosening.result(tried), tuple(sorted(loosening.left_out | tried))
    return loosening.result(), tuple(sorted(loosening.left_out))


class Loosening:
    """One schema, and the keywords that are left out of it in any case."""

    def __init__(self, asked: AskedGrammar) -> None:
        self._asked = asked
        self._patterns = set[str]()  # which no grammar follows
        parts = parts_of(self._schema(orjson.loads(asked.text)))
        self.present = {name for part in parts for name in TRIED if name in part}
        self._given_patterns = {part["pattern"] for part in parts if "pattern" in part}
        self.left_out = set[str]()

    def leave_out_patterns(self, is_followed: Callable[[AskedGrammar], bool]) -> None:
        for pattern in self._given_patterns:
            alone = orjson.dumps({"type": "string", "pattern": pattern}).decode()
            if not is_followed(AskedGrammar(self._asked.field, GrammarKind.JSON_SCHEMA, alone)):
                self._patterns.add(pattern)

    def result(self, tried: Collection[str] = ()) -> AskedGrammar:
        """What was asked without the keywords that no grammar follows, and without those of `tried`."""
        value = orjson.loads(self._asked.text)
        schema = self._schema(value)
        parts = parts_of(schema)
        multiples = {"multipleOf"} if has_large_multiples(parts) else set[str]()
        for part in parts:
            names = {*unsupported(schema, part), *(multiples & part.keys())}
            if part.get("pattern") in self._patterns:
                names.add("pattern")
            self.left_out |= names
            for name in {*names, *tried} & part.keys():
                _remove(schema, part, name)
        return replace(self._asked, text=orjson.dumps(value).decode())

    def _schema(self, value: Any) -> Schema:
        schema = value[1] if self._asked.kind is GrammarKind.ARGUMENTS else value
        if not isinstance(schema, dict):
            raise RefusedGrammarError("the schema must be a JSON object")
        return schema


def _remove(root: Schema, part: Schema, name: str) -> None:
    if name == "$ref" and target(root, part[name]) is not None:
        return
    value = part.pop(name)
    if name == "oneOf":  # a value of exactly one of several schemas is a value of any of them
        part["allOf"] = [*part.get("allOf", ()), {"anyOf": value}]
