"""What the JSON schema of all arguments of a tool says of each of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from text_generation_router.text.grammars.asked import RefusedGrammarError
from text_generation_router.text.grammars.literals import LIMITS
from text_generation_router.text.schema_references import resolved

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
