"""What type each keyword of a JSON schema has, so that code behind `prepare` may trust it."""

from collections.abc import Callable
from typing import Any, Final

from text_generation_router.text.grammars.asked import RefusedGrammarError

TYPES: Final = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
Check = Callable[[Any], bool]


def _is_type(value: Any) -> bool:
    return isinstance(value, str) and value in TYPES


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value % 1 == 0


def _is(*kinds: type) -> Check:
    return lambda value: isinstance(value, kinds)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _map_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


TEXT, SCHEMA = _is(str), _is(dict, bool)
SCHEMAS: Final = _list_of(SCHEMA)
# By the value's type in words, as far as the standard knows the keyword: what it must be, and the keywords.
KEYWORDS: Final[tuple[tuple[str, Check, tuple[str, ...]], ...]] = (
    ("a type's name or a list of them", lambda value: _is_type(value) or _list_of(_is_type)(value), ("type",)),
    ("a string", TEXT, ("$ref", "format", "pattern")),
    ("a number", _is_number, ("maximum", "minimum")),
    # Truth values are those of the standard's draft 4.
    ("a number", _is(int, float), ("exclusiveMaximum", "exclusiveMinimum")),
    ("a number > 0", lambda value: _is_number(value) and value > 0, ("multipleOf",)),
    ("a whole number >= 0", _is_count, ("maxItems", "maxLength", "maxProperties", "minItems", "minLength",
     "minProperties")),
    ("true or false", _is(bool), ("nullable",)),
    ("a list", _is(list), ("enum",)),
    ("a list of strings", _list_of(TEXT), ("required",)),
    ("a schema", SCHEMA, ("additionalItems", "additionalProperties")),
    ("a schema or a list of schemas", lambda value: SCHEMA(value) or SCHEMAS(value), ("items",)),
    ("a list of schemas", SCHEMAS, ("allOf", "anyOf", "oneOf", "prefixItems")),
    ("an object of schemas", _map_of(SCHEMA), ("$defs", "definitions", "patternProperties", "properties")),
)  # fmt: skip
CHECKS: Final = {name: (words, check) for words, check, names in KEYWORDS for name in names}


def check_types(schema: dict[str, Any]) -> None:
    """Checks the keywords of a schema, not those of the schemas in it. Raises RefusedGrammarError."""
    for name in schema.keys() & CHECKS.keys():
        words, check = CHECKS[name]
        if not check(schema[name]):
            raise RefusedGrammarError(f"the schema's keyword `{name}` must be {words}")
