"""Raw text of a model as a JSON value of the type that a tool's schema asks for."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from text_generation_router.text.schema_references import resolved, target

STRING_ONLY = frozenset({"string"})
_LITERALS = {
    "true": ("boolean", "true"),
    "false": ("boolean", "false"),
    "none": ("null", "null"),
    "null": ("null", "null"),
}
_MAX_DEPTH = 16  # how deep alternatives may stand within alternatives


def types_of(schema: Any, root: dict[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it does not say. `root`: the schema to which its references
    refer."""
    schema = resolved(root, schema)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(part for part in kind if isinstance(part, str))
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_type_of, schema["enum"]))
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            return _union([types_of(part, root, depth + 1) for part in schema[word]])
    if isinstance(schema.get("allOf"), list):
        said = (types_of(part, root, depth + 1) for part in schema["allOf"])
        return next((types for types in said if types), frozenset())
    return types_of(target(root, schema.get("$ref")), root, depth + 1)


def _union(kinds: Iterable[frozenset[str]]) -> frozenset[str]:
    """Every type of the alternatives; empty if one of them does not say."""
    every = list(kinds)
    return frozenset().union(*every) if all(every) else frozenset()


def json_of(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value: of one of `types` if it can be read as one, otherwise the string. Without types, what
    can be read as a number, a truth value, null, an array or an object is that."""
    stripped = text.strip()
    if (literal := _LITERALS.get(stripped.lower())) and (literal[0] in types or not types):
        return literal[1]
    try:
        value = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _type_of(value)
    is_wanted = kind in types or (kind == "integer" and "number" in types)
    is_string = kind == "string"
    if (is_wanted and not is_string) or (not types and not is_string) or (not is_string and "string" not in types):
        return stripped
    return json.dumps(text, ensure_ascii=False)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
