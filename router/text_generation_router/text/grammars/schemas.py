"""JSON schemas made ready for llguidance: refused keywords, and objects that have no other properties than they list.

`{"properties": {…}}` allows other properties as well. TGI's grammars do not, and a model that may add any property to
an object rarely ends it. So an object that lists its properties gets `additionalProperties: false`, unless the schema
says more about them: then other properties may be needed to satisfy it.
"""

import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import orjson

from text_generation_router.text.grammars.asked import MAX_DEPTH, RefusedGrammarError
from text_generation_router.text.grammars.keywords import (
    CALENDAR,
    LIST,
    MAP,
    ONE,
    check_types,
    drop_neutral,
    may_be,
    take_nullable,
    unsupported,
)
from text_generation_router.text.json_depth import is_deeper
from text_generation_router.text.schema_references import ANNOTATIONS, resolved, target

# `oneOf` of JSON schemas: which are told apart by a property, so that no value matches two of them.

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


Schema = dict[str, Any]

MAX_MULTIPLE = 10_000
# Most properties of one object, and most patterns of properties: llguidance's work grows with their square.
MAX_NAMES = {"properties": 500, "patternProperties": 32}
# Keywords that leave no doubt about other properties, or that an object without other properties may contradict.
SAYS_MORE = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties", "$anchor", "$id"))
# Keywords that say nothing about an object beside a reference to another schema.
NEUTRAL_BESIDE = ANNOTATIONS | {"$schema", "$defs", "definitions", "type"}


def prepare(schema: Schema) -> None:
    """Changes the schema in place, which must be a tree: no object twice. Raises RefusedGrammarError."""
    parts = parts_of(schema)
    for part in parts:
        _refuse_keywords(schema, part)
    if has_large_multiples(parts):
        raise RefusedGrammarError(
            f"the schema's keyword `multipleOf` is supported up to {MAX_MULTIPLE}, as the least common multiple of all"
        )
    for part in parts:
        drop_neutral(part)
        if "anyOf" not in part and have_discriminator(part.get("oneOf"), lambda one: resolved(schema, one)):
            part["anyOf"] = part.pop("oneOf")
        if may_be(part, "string") and part.get("format") in CALENDAR:
            part["allOf"] = [*part.get("allOf", ()), {"pattern": CALENDAR[part["format"]]}]
    Closing(schema).close()


def parts_of(schema: Schema) -> list[Schema]:
    """The schema and all schemas in it, none of them with `nullable`. Raises RefusedGrammarError."""
    if is_deeper(schema, MAX_DEPTH):
        raise RefusedGrammarError(f"the schema has more than {MAX_DEPTH} levels of objects and lists")
    found = _found(schema)
    for part in found:
        check_types(part)
    if any("nullable" in part for part in found):
        for part in found:
            take_nullable(part)
        found = _found(schema)
    return found


def _found(schema: Schema) -> list[Schema]:
    # References may lead to schemas below keywords that are not the standard's.
    return list({id(part): part for part in (*all_parts(schema), *Closing(schema).parts)}.values())


def all_parts(schema: Schema) -> Iterator[Schema]:
    """The schema and all schemas in it."""
    stack: list[Any] = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            yield part
            stack.extend(_parts_of(part, MAP))


def _parts_of(schema: Schema, maps: tuple[str, ...]) -> Iterator[Any]:
    for name in ONE:
        yield schema.get(name)
    for name in LIST:
        if isinstance(listed := schema.get(name), list):
            yield from listed
    for name in maps:
        if isinstance(named := schema.get(name), dict):
            yield from named.values()


def _refuse_keywords(root: Schema, schema: Schema) -> None:
    for name in unsupported(root, schema):
        if name == "format":
            raise RefusedGrammarError(f"the schema's `format` {str(schema['format'])[:64]!r} is not supported")
        raise RefusedGrammarError(f"the schema's keyword `{name}` is not supported")
    for name, most in MAX_NAMES.items():
        if len(schema.get(name, ())) > most:
            raise RefusedGrammarError(f"the schema has more than {most} `{name}` in one object")


def has_large_multiples(parts: list[Schema]) -> bool:
    """llguidance follows a multiple of n with n states and without a bound, in `allOf` with those of the common
    multiple."""
    common = 1
    for part in parts:
        given = part.get("multipleOf", math.inf)
        if given < math.inf:
            common = math.lcm(common, int("".join(map(str, Decimal(str(given)).normalize().as_tuple().digits))))
    return common > MAX_MULTIPLE


class Closing:
    """Follows the references of one schema from its root, and closes the objects that list all of their properties.

    A schema of an object that is combined with others, such as one of two in `allOf`, stays open: the others may demand
    properties that it does not list.
    """

    def __init__(self, root: Schema) -> None:
        self.parts: list[Schema] = []  # that can be reached
        self._root = root
        self._open: dict[int, bool] = {}  # by the id of a part: whether it stays open
        self._follow()

    def close(self) -> None:
        for part in self.parts:
            if not self._open[id(part)] and _lists_all_properties(part):
                part["additionalProperties"] = False

    def _follow(self) -> None:
        stack: list[tuple[Any, bool]] = [(self._root, False)]
        while stack:
            part, is_open = stack.pop()
            if isinstance(part, dict) and self._is_news(part, is_open):
                stack.extend(self._reached(part, is_open))

    def _is_news(self, part: Schema, is_open: bool) -> bool:
        known = self._open.get(id(part))
        if known is None:
            self.parts.append(part)
        elif known or not is_open:
            return False
        self._open[id(part)] = is_open
        return True

    def _reached(self, part: Schema, is_open: bool) -> Iterator[tuple[Any, bool]]:
        """The schemas that the part names: of the same value first, then of values inside it."""
        same = [target(self._root, part["$ref"])] if "$ref" in part else []
        for name in ("allOf", "anyOf", "oneOf"):
            if isinstance(listed := part.get(name), list):
                same.extend(listed)
        combined = is_open or _is_combined(part)
        if same:
            self._open[id(part)] = combined
        yield from ((one, combined) for one in same)
        inner = {name: value for name, value in part.items() if name not in ("allOf", "anyOf", "oneOf")}
        yield from ((one, False) for one in _parts_of(inner, ("patternProperties", "properties")))


def _is_combined(schema: Schema) -> bool:
    """Whether several schemas hold for the same value."""
    count = int("$ref" in schema) + sum(name in schema for name in ("anyOf", "oneOf"))
    count += len(schema["allOf"]) if isinstance(schema.get("allOf"), list) else 0
    others = any(name not in NEUTRAL_BESIDE and name not in ("$ref", "allOf", "anyOf", "oneOf") for name in schema)
    return count > 1 or (count == 1 and others)


def _lists_all_properties(schema: Schema) -> bool:
    listed, required, fewest = schema.get("properties"), schema.get("required", ()), schema.get("minProperties", 0)
    if listed is None or not SAYS_MORE.isdisjoint(schema):
        return False
    if any(name in schema for name in ("$ref", "allOf", "anyOf", "oneOf")):
        return False
    return all(name in listed for name in required) and isinstance(fewest, int) and fewest <= len(listed)
