"""Arguments between tags that may be strings among other types: a text's beginning tells which value it is."""

import json
from typing import Any

from text_generation_router.text.calls.typed_values import json_of
from text_generation_router.text.grammars.asked import RefusedGrammarError
from text_generation_router.text.grammars.literals import LIMITS, combined, listed_values, of_type
from text_generation_router.text.grammars.raw_strings import string_body
from text_generation_router.text.grammars.rules import ANY, literal
from text_generation_router.text.schema_references import resolved

_SPACE = r"[\s\x1c-\x1f]*"
# Texts that a reader takes for values of a type: as a whole, or by the character with which they begin.
_READ_AS = {"null": f"/{_SPACE}(?i:null|none){_SPACE}/", "boolean": f"/{_SPACE}(?i:true|false){_SPACE}/"}
_BEGINS = {"array": r"\[", "object": r"\{", "number": "[-0-9]", "integer": "[-0-9]"}
_SPELLED = {"null": ("null",), "boolean": ("true", "false")}


class Alternatives:
    """The values of a schema that may be strings, or whose types it does not say: texts, and other values."""

    def __init__(self, root: dict[str, Any], types: frozenset[str], avoided: str) -> None:
        """`types`: all types that the schema says, by which a reader tells what a text is."""
        self.others: list[dict[str, Any]] = []  # lists, objects and numbers, which are written as JSON
        self._root, self._types, self._avoided = root, types, avoided
        self._listed: list[str] = []
        self._strings: list[str] = []  # the bodies of terminals
        self._free: set[str] = set()  # types of which every value is allowed

    def add(self, schema: Any) -> None:
        schema = resolved(self._root, schema)
        if schema is True or (isinstance(schema, dict) and not LIMITS & schema.keys()):
            self._strings.append(ANY)
            return
        if not isinstance(schema, dict):
            raise RefusedGrammarError("a part of its schema allows no value, or refers to nothing")
        limits = LIMITS & schema.keys()
        kinds = schema.get("type")
        if ("enum" in limits or "const" in limits) and limits <= {"enum", "const", "type"}:
            self._listed += [text for value in listed_values(schema) if (text := self._text_of(value)) is not None]
        elif limits in ({"anyOf"}, {"allOf"}) and (parts := combined(schema)):
            for part in parts:
                self.add(part)
        elif isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
            for kind in kinds:
                self.add(of_type(schema, kind))
        else:
            self._add_of_one_type(schema, limits, kinds)

    def _add_of_one_type(self, schema: dict[str, Any], limits: frozenset[str], kind: Any) -> None:
        if kind == "string":
            self._strings.append(string_body(schema, limits))
        elif limits == {"type"} and kind in ("boolean", "integer", "null", "number"):
            self._free.add(kind)
        elif isinstance(kind, str) and kind in _BEGINS:
            self.others.append(schema)
        else:
            keyword = next(iter(sorted(limits - {"type"})), "type")
            raise RefusedGrammarError(f"the keyword `{keyword}` is not supported for a value that may be a string")

    def texts(self) -> str:
        """The body of a terminal for all that is not in `others`; "": nothing."""
        if ANY in self._strings:
            self._strings = [ANY]
        elif numbers := self._free & {"integer", "number"}:  # a text may be one, and not be allowed as a string
            self.others.append({"type": max(numbers)})
        free = self._free if ANY in self._strings else frozenset[str]()
        like_others = [_READ_AS[kind] for kind in sorted(_READ_AS.keys() & self._types - free)]
        begins = {_BEGINS[kind] for kind in _BEGINS.keys() & self._types - free}
        if begins:
            like_others.append(f"/{_SPACE}({'|'.join(sorted(begins))})/ {ANY}")
        texts = ["".join((f"({body})", *(f" & ~({other})" for other in like_others))) for body in self._strings]
        listed = (*self._listed, *(text for kind in self._free - free for text in _SPELLED.get(kind, ())))
        return " | ".join((*texts, *map(literal, sorted(set(listed)))))

    def _text_of(self, value: Any) -> str | None:
        """How a value is written; None: a reader would read another one."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        read = json.loads(json_of(text, self._types))
        same = type(read) is type(value) and read == value
        return text if same and self._avoided not in text else None
