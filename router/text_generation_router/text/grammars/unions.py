"""`oneOf` of JSON schemas: which are told apart by a property, so that no value matches two of them."""

from collections.abc import Callable
from typing import Any

import orjson

Resolve = Callable[[Any], Any]


def have_discriminator(schemas: Any, resolve: Resolve) -> bool:
    """Whether all schemas are of objects with one property that they require and that has different values in each.
    `resolve` follows references. llguidance finds this out itself only for strings, and without references."""
    objects = [resolve(schema) for schema in schemas] if isinstance(schemas, list) else []
    if not objects or not all(_is_object(one) for one in objects):
        return False
    return any(_differs(name, objects, resolve) for name in objects[0]["properties"])


def _is_object(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "object" and isinstance(schema.get("properties"), dict)


def _differs(name: str, objects: list[dict[str, Any]], resolve: Resolve) -> bool:
    seen: set[bytes] = set()
    for one in objects:
        required = one.get("required")
        values = _values(resolve(one["properties"].get(name)))
        if not values or not isinstance(required, list) or name not in required or not seen.isdisjoint(values):
            return False
        seen |= values
    return True


def _values(schema: Any) -> set[bytes]:
    """The strings and integers that the schema allows, if it lists them, as JSON."""
    if not isinstance(schema, dict):
        return set()
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list) or not all(type(value) in (str, int) for value in listed):
        return set()
    return {orjson.dumps(value) for value in listed}
