"""Keywords of one schema that no grammar follows: which of them say nothing there, and what `nullable` means."""

from collections.abc import Iterator
from typing import Any

from text_generation_router.text.grammars.keywords import FORMATS, OF_TYPE, OTHER_FORMATS, REFUSED
from text_generation_router.text.schema_references import ANNOTATIONS, resolved

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
