"""Writes schemas.jsonl: 300 JSON schemas of the kinds that programs send, one in each line.

python -m text_generation_router.text.grammars.tests.make_schemas schemas.jsonl"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

Schema = dict[str, Any]

WORDS = (
    "name title city country street email phone status kind color size weight price count total amount currency rating"
    " score level priority owner author publisher language genre duration start end created updated due note comment"
    " summary reason result action target source category tag label code version branch commit host port path query"
    " temperature humidity speed altitude latitude longitude patient dose diagnosis symptom isbn sku invoice customer"
).split()
VALUES = "red green blue small medium large open closed draft paid low high north south east west daily weekly".split()
PATTERNS = (
    "^[A-Z]{2}[0-9]{4}$", "^[a-z][a-z0-9_]{0,15}$", r"^\d{3}-\d{4}$", "^(GET|PUT|POST) /[a-z]{1,8}$", "^#[0-9a-f]{6}$",
    r"^v?\d{1,2}\.\d{1,2}(\.\d{1,3})?$", "^[^,;]{1,20}$", r"^\+?[0-9 ]{7,15}$", "^[A-Z][a-z]+( [A-Z][a-z]+){0,2}$",
)  # fmt: skip
FORMATS = ("date", "date-time", "time", "email", "ipv4", "ipv6", "uuid", "hostname", "duration", "uri")
UNSUPPORTED: tuple[Schema, ...] = (
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    {"type": "object", "properties": {"a": {"not": {"type": "string"}}}},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"$ref": "https://example.com/other.json"},
    {"type": "string", "format": "regex"},
    {"type": "string", "pattern": "(?=.*[0-9])[a-z0-9]+"},
    {"type": "string", "format": "uri-template"},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"type": "object", "unevaluatedProperties": False},
)


class Maker:
    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def schema(self, number: int) -> Schema:
        """Schemas of 12 kinds, each with more parts than the last one of its kind."""
        kinds: tuple[Callable[[int], Schema], ...] = (
            self._record, self._nested, self._list, self._references, self._tree, self._union, self._tagged,
            self._combined, self._map, self._tuple, self._single, self._typical,
        )  # fmt: skip
        made = kinds[number % len(kinds)](number // len(kinds))
        if number % 5 == 0:
            made = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": self._word().title()} | made
        return made

    def _word(self) -> str:
        return self._random.choice(WORDS)

    def _words(self, count: int) -> list[str]:
        return self._random.sample(WORDS, count)

    def _number(self) -> Schema:
        low = self._random.randrange(-50, 50)
        return self._random.choice(
            (
                {"type": "integer"},
                {"type": "number"},
                {"type": "integer", "minimum": low, "maximum": low + self._random.randrange(1, 2000)},
                {"type": "number", "minimum": low, "exclusiveMaximum": low + 0.5},
                {"type": "integer", "exclusiveMinimum": low},
                {"type": "integer", "minimum": 0, "multipleOf": self._random.choice((2, 5, 25, 60))},
                {"type": "number", "multipleOf": self._random.choice((0.01, 0.5))},
            )
        )

    def _string(self) -> Schema:
        shortest = self._random.randrange(4)
        return self._random.choice(
            (
                {"type": "string"},
                {"type": "string", "maxLength": self._random.randrange(5, 60)},
                {"type": "string", "minLength": shortest, "maxLength": shortest + self._random.randrange(20)},
                {"type": "string", "enum": self._random.sample(VALUES, 4)},
                {"enum": self._random.sample(VALUES, 2)},
                {"const": self._random.choice(VALUES)},
                {"type": "string", "pattern": self._random.choice(PATTERNS)},
                {"type": "string", "format": self._random.choice(FORMATS)},
            )
        )

    def _scalar(self) -> Schema:
        made = self._random.choice((self._string, self._string, self._number, lambda: {"type": "boolean"}))()
        kind = self._random.randrange(8)
        if kind == 0 and "type" in made and "enum" not in made:
            made["type"] = [made["type"], "null"]
        if kind == 1:
            made = {"anyOf": [made, {"type": "null"}], "default": None}
        if kind == 2:
            made["description"] = f"The {self._word()} of the {self._word()}."
        return made

    def _record(self, size: int) -> Schema:
        names = self._words(1 + size % 9)
        made: Schema = {"type": "object", "properties": {name: self._scalar() for name in names}}
        made["required"] = names if size % 3 else self._random.sample(names, len(names) // 2)
        if size % 4 == 0:
            made["additionalProperties"] = False
        return made

    def _nested(self, size: int) -> Schema:
        made = self._record(size % 3)
        for _ in range(1 + size % 6):
            made = {"type": "object", "properties": {self._word(): made, "id": {"type": "integer"}}, "required": ["id"]}
        return made

    def _list(self, size: int) -> Schema:
        items = self._scalar() if size % 2 else self._record(size % 4)
        made: Schema = {"type": "array", "items": items}
        if size % 5:
            made |= {"minItems": size % 3, "maxItems": size % 3 + 1 + size % 4}
        return made if size % 4 == 3 else {"type": "object", "properties": {"items": made}, "required": ["items"]}

    def _references(self, size: int) -> Schema:
        names = self._words(2 + size % 4)
        parts = {name.title(): self._record(n + 1) for n, name in enumerate(names)}
        properties = {name: {"$ref": f"#/$defs/{name.title()}"} for name in names}
        return {"type": "object", "properties": properties, "required": names[:2], "$defs": parts}

    def _tree(self, size: int) -> Schema:
        children = {"type": "array", "items": {"$ref": "#/definitions/node"}, "maxItems": 1 + size % 3}
        node = {"type": "object", "properties": {"value": self._scalar(), "children": children}, "required": ["value"]}
        return {"$ref": "#/definitions/node", "definitions": {"node": node}}

    def _union(self, size: int) -> Schema:
        made: Schema = {"anyOf": [self._record(n) for n in range(1, 2 + size % 4)] + [self._scalar()]}
        return made if size % 2 else {"type": "array", "items": made, "maxItems": 3}

    def _tagged(self, size: int) -> Schema:
        tags = self._random.sample(VALUES, 2 + size % 4)
        parts = {}
        for number, tag in enumerate(tags):
            record = self._record(number + 1)
            record["properties"] = {"type": {"const": tag}} | record["properties"]
            record["required"] = ["type", *record["required"]]
            parts[tag] = record
        branches = [{"$ref": f"#/$defs/{tag}"} for tag in tags] if size % 2 else list(parts.values())
        made: Schema = {"oneOf": branches, "discriminator": {"propertyName": "type"}}
        return made | {"$defs": parts} if size % 2 else made

    def _combined(self, size: int) -> Schema:
        parts: list[Schema] = []
        for _ in range(1 + size % 3):
            taken = {name for part in parts for name in part["properties"]}
            names = [name for name in self._words(6) if name not in taken][:2]
            parts.append({"type": "object", "properties": {name: self._scalar() for name in names}, "required": names})
        if size % 4 == 0:
            return {"allOf": [{"$ref": "#/$defs/base"}], "$defs": {"base": self._record(size)}}
        if size % 4 == 1:
            return {"allOf": [{"type": "integer", "minimum": size}, {"maximum": size + 90}, {"multipleOf": 3}]}
        return {"type": "object", "allOf": parts}

    def _map(self, size: int) -> Schema:
        values = self._scalar()
        if size % 3 == 0:
            return {"type": "object", "additionalProperties": values, "minProperties": 1, "maxProperties": 1 + size % 4}
        if size % 3 == 1:
            patterns = {"^[a-z]{1,6}$": values, "^[0-9]{1,3}$": self._scalar()}
            return {"type": "object", "patternProperties": patterns, "additionalProperties": False}
        names = self._words(2)
        made = {"type": "object", "properties": {name: self._scalar() for name in names}, "required": names}
        return made | {"additionalProperties": values, "maxProperties": 4}

    def _tuple(self, size: int) -> Schema:
        parts = [self._scalar() for _ in range(1 + size % 5)]
        made: Schema = {"type": "array", "prefixItems": parts, "minItems": len(parts)}
        return made | ({"items": False} if size % 2 else {"items": self._number(), "maxItems": len(parts) + 2})

    def _single(self, size: int) -> Schema:
        others = [*self._random.sample(VALUES, 3), size, None, [1, "a"], {"a": 1}]
        return self._scalar() if size % 2 else {"enum": others}

    def _typical(self, size: int) -> Schema:
        """What the libraries of language models send: an extraction with a list of records, or a call's arguments."""
        person = self._record(4)
        if size % 2:
            steps = {"type": "array", "items": self._record(2), "minItems": 1, "maxItems": 4}
            return {
                "type": "object",
                "properties": {"steps": steps, "final_answer": {"type": "string", "maxLength": 80}},
                "required": ["steps", "final_answer"],
                "additionalProperties": False,
            }
        properties = {"people": {"type": "array", "items": {"$ref": "#/$defs/Person"}, "maxItems": 3}}
        return {"$defs": {"Person": person}, "properties": properties, "required": ["people"], "type": "object"}


def schemas() -> list[Schema]:
    maker = Maker(seed=18)
    return [*(maker.schema(number) for number in range(300 - len(UNSUPPORTED))), *UNSUPPORTED]


if __name__ == "__main__":
    lines = [json.dumps(schema, separators=(",", ":")) for schema in schemas()]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
