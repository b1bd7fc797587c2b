"""The keywords of JSON schemas, as data: what each means here. docs/api.md has them as a table.

llguidance refuses most keywords that it does not know by itself; a keyword that it would pass over although the keyword
changes which texts are valid is refused here. A keyword that is in no table is an annotation, as the standard has it.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from text_generation_router.text.grammars.asked import RefusedGrammarError
from text_generation_router.text.schema_references import ANNOTATIONS, resolved

# What type each keyword of a JSON schema has, so that code behind `prepare` may trust it.

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


SUPPORTED: Final = frozenset(
    (
        "$anchor", "$defs", "$id", "$ref", "$schema", "additionalItems", "additionalProperties", "allOf", "anyOf",
        "const", "definitions", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems",
        "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf",
        "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "required", "type",
    )
)  # fmt: skip

# The keywords that limit the values of one type only, those of integers being those of numbers.
OF_TYPE: Final = {
    "array": {
        "additionalItems", "contains", "items", "maxContains", "maxItems", "minContains", "minItems", "prefixItems",
        "unevaluatedItems", "uniqueItems",
    },
    "number": {"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"},
    "object": {
        "additionalProperties", "dependencies", "dependentRequired", "dependentSchemas", "maxProperties",
        "minProperties", "patternProperties", "properties", "propertyNames", "required", "unevaluatedProperties",
    },
    "string": {"format", "maxLength", "minLength", "pattern"},
}  # fmt: skip

# Keywords that are not supported, each with the values that mean the same as no keyword.
REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "$dynamicAnchor": (),
    "$dynamicRef": (),
    "$recursiveAnchor": (False,),
    "$recursiveRef": (),
    "$vocabulary": (),
    "contains": (),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "disallow": (),
    "divisibleBy": (),
    "else": (),
    "extends": (),
    "if": (),
    "maxContains": (),
    "minContains": (),
    "not": (False,),
    "propertyNames": (True, {}),
    "then": (),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
    "x-guidance": (),  # would switch checks off
}

# Strings of these formats follow their standards.
FORMATS: Final = (
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
)  # fmt: skip

# The standard's other formats of strings, which are refused by their names. Any other `format` is an annotation.
OTHER_FORMATS: Final = (
    "idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer",
    "uri-reference", "uri-template",
)  # fmt: skip

# llguidance writes the 29th of February in every year, the year 0, a 60th second at any time, fractions of seconds
# without an end, and `t` and `z`. Patterns that its strings match as well, so that only days that there were, no leap
# seconds, at most microseconds (as Python's datetime has them) and the usual letters are written.
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = f"({_YEAR}-(0[13-9]|1[0-2])-[0-9]{{2}}|{_YEAR}-02-([01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
_TIME = r"[0-9]{2}:[0-9]{2}:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-][0-9]{2}:[0-9]{2})"
CALENDAR: Final = {"date": f"^{_DAY}$", "time": f"^{_TIME}$", "date-time": f"^{_DAY}T{_TIME}$"}

# Where a schema has other schemas: as the value itself, in a list, or in an object.
ONE: Final = ("additionalItems", "additionalProperties", "items")
LIST: Final = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
MAP: Final = ("$defs", "definitions", "patternProperties", "properties")


# Keywords of one schema that no grammar follows: which of them say nothing there, and what `nullable` means.

Schema = dict[str, Any]

# Keywords that mean nothing unless the schema has one of others.
_NEEDS = {"if": ("then", "else"), "then": ("if",), "else": ("if",)}
_NEEDS |= {"minContains": ("contains",), "maxContains": ("contains",)}
# Keywords of a schema that is wrapped stay where references expect them.
_STAYS = frozenset(("$anchor", "$defs", "$id", "$schema", "definitions"))


def unsupported(root: Schema, schema: Schema) -> Iterator[str]:
    """The names of the schema's keywords that change which values are valid, and that no grammar follows."""
    yield from (name for name in REFUSED if name in schema and not _says_nothing(root, schema, name))
    if schema.get("format") in OTHER_FORMATS and may_be(schema, "string"):
        yield "format"


def drop_neutral(schema: Schema) -> None:
    """Removes keywords that say nothing, and formats that no standard defines. To be called after `unsupported`."""
    for name in REFUSED:
        schema.pop(name, None)
    if "format" in schema and may_be(schema, "string") and schema["format"] not in FORMATS:
        del schema["format"]


def _says_nothing(root: Schema, schema: Schema, name: str) -> bool:
    value = schema[name]
    if any(type(value) is type(neutral) and value == neutral for neutral in REFUSED[name]):
        return True
    if name in _NEEDS and not any(other in schema for other in _NEEDS[name]):
        return True
    kind = next((kind for kind, names in OF_TYPE.items() if name in names), None)
    if kind is not None and not may_be(schema, kind):
        return True
    return name == "propertyNames" and _takes_all_strings(resolved(root, value))


def _takes_all_strings(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.keys() <= {"type", *ANNOTATIONS} and may_be(schema, "string")


def may_be(schema: Schema, kind: str) -> bool:
    """Whether the schema's `type`, if it has one, allows values of a kind."""
    kinds = schema.get("type", kind)
    return bool(kinds == kind) or (isinstance(kinds, list) and kind in kinds)


def take_nullable(schema: Schema) -> None:
    """Changes a schema with OpenAPI's `nullable` to the same without it."""
    if not schema.pop("nullable", False):
        return
    if not schema.keys().isdisjoint(("$ref", "allOf", "anyOf", "oneOf", "not", "if")):
        inner = {name: schema.pop(name) for name in list(schema) if name not in _STAYS}
        schema["anyOf"] = [inner, {"type": "null"}]
        return
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    if "enum" in schema and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    kinds = schema.get("type", "null")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "null" not in kinds:
        schema["type"] = [*kinds, "null"]
