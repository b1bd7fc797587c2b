"""Leaves out of a JSON schema what no grammar follows, for requests that do not demand that the schema is followed."""

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import orjson

from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind, RefusedGrammarError
from text_generation_router.text.grammars.keywords import OF_TYPE, unsupported
from text_generation_router.text.grammars.schemas import Schema, all_parts, has_large_multiples, parts_of
from text_generation_router.text.schema_references import target

# Schemas whose values, written as JSON by llguidance, never contain a text such as the tag that ends a value.

_COMBINING = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
_SCALARS = ["boolean", "null", "number", "string"]


def narrow(schema: dict[str, Any], avoided: str) -> None:
    """Changes the schema so that no value contains a text, such as the tag that ends it. Where the schema does not say
    the type, values are neither lists nor objects, unless other keywords are about these; and objects have no other
    properties than they list. Raises RefusedGrammarError."""
    pattern = pattern_without(avoided)
    for part in list(all_parts(schema)):
        _narrow(part, avoided, pattern)


def _narrow(part: dict[str, Any], avoided: str, pattern: str) -> None:
    if "patternProperties" in part:
        raise RefusedGrammarError("the keyword `patternProperties` is not supported within this model's calls")
    if any(avoided in name for name in part.get("properties") or ()):
        raise RefusedGrammarError(f"a property's name contains {avoided!r}")
    if "enum" in part or "const" in part:
        if avoided in orjson.dumps([part.get("enum"), part.get("const")]).decode():
            raise RefusedGrammarError(f"a value that the schema lists contains {avoided!r}")
        return
    kinds = part.get("type")
    if kinds is None and not _COMBINING.isdisjoint(part):
        return
    if kinds is None:
        kinds = [kind for kind, names in OF_TYPE.items() if not names.isdisjoint(part)] or _SCALARS
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    part["type"] = kinds
    if "string" in kinds:
        part["allOf"] = [*(part.get("allOf") or ()), {"pattern": pattern}]
    if "object" in kinds:
        part["additionalProperties"] = False
    if "array" in kinds and "items" not in part:
        part["items"] = {"type": _SCALARS, "allOf": [{"pattern": pattern}]}


def pattern_without(text: str) -> str:
    """A regular expression of the strings that do not contain `text`, whose first character is nowhere else in it."""
    first, rest = text[0], text[1:]
    assert len(text) > 1 and first not in rest
    begin = re.escape(first)
    others = [f"{re.escape(rest[:n])}[^{re.escape(first)}{re.escape(rest[n])}]" for n in range(len(rest))]
    prefixes = "|".join(re.escape(rest[:n]) for n in range(len(rest)))
    again = f"{begin}(?:(?:{prefixes}){begin})*"
    return f"^(?:[^{begin}]|{again}(?:{'|'.join(others)}))*(?:{again}(?:{prefixes}))?$"


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
