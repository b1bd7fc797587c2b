"""Schemas whose values, written as JSON by llguidance, never contain a text such as the tag that ends a value."""

import re
from typing import Any

import orjson

from text_generation_router.text.grammars.asked import RefusedGrammarError
from text_generation_router.text.grammars.keywords import OF_TYPE
from text_generation_router.text.grammars.schemas import all_parts

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
