"""JSON schemas made ready for llguidance: refused keywords, and objects that have no other properties than they list.

`{"properties": {…}}` allows other properties as well. TGI's grammars do not, and a model that may add any property to
an object rarely ends it. So an object that lists its properties gets `additionalProperties: false`, unless the schema
says more about them: then other properties may be needed to satisfy it.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

import orjson

from text_generation_router.text.grammars.asked import MAX_DEPTH, AskedGrammar, GrammarKind, RefusedGrammarError
from text_generation_router.text.grammars.keywords import (
    CALENDAR,
    LIST,
    MAP,
    OF_TYPE,
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


# Leaves out of a JSON schema what no grammar follows, for requests that do not demand that the schema is followed.

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
