"""JSON values of a schema as a call spells them: as JSON, as literals of Python, or as text without quotes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from llguidance import regex_to_lark

from text_generation_router.text.grammars.asked import RefusedGrammarError
from text_generation_router.text.grammars.keywords import OF_TYPE, SUPPORTED
from text_generation_router.text.grammars.rules import ANY, Rules, literal, without
from text_generation_router.text.grammars.schemas import narrow
from text_generation_router.text.schema_references import target

# Strings without quotes, as a part of a call's text: what their JSON schema allows, as a terminal of Lark.

_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
# Leap years and the year 0 are left to the patterns that prepared schemas have for them.
_DATE = "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))"
# Each format in its usual form: every text is valid, and not every valid text is written.
_FORMATS = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_CLOCK}",
    "duration": "P([0-9]{1,4}W|[0-9]{1,4}D(T[0-9]{1,4}[HMS])?|T[0-9]{1,4}[HMS])",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,16}}){{0,2}}@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|::1?",
    "time": _CLOCK,
    "uri": rf"[a-z][a-z0-9+.-]{{1,15}}://{_LABEL}(\.{_LABEL}){{0,4}}(:[0-9]{{1,4}})?(/[A-Za-z0-9._~+-]{{0,64}}){{0,8}}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
_SUPPORTED = frozenset(("type", "minLength", "maxLength", "pattern", "format", "allOf"))


def string_body(schema: dict[str, Any], constraining: frozenset[str]) -> str:
    """The body of a terminal: the strings that a prepared schema of the type `string` allows. `constraining`: the
    schema's keywords that limit its values. Raises RefusedGrammarError."""
    if unsupported := sorted(constraining - _SUPPORTED):
        raise RefusedGrammarError(f"the keyword `{unsupported[0]}` is not supported for a string without quotes")
    parts = [_length(schema)]
    if "pattern" in constraining:
        parts.append(searched(schema["pattern"]))
    if "format" in constraining:
        parts.append(regex(_FORMATS[schema["format"]]))
    for part in schema.get("allOf", ()):
        if not isinstance(part, dict) or part.keys() != {"pattern"}:
            raise RefusedGrammarError("the keyword `allOf` is not supported for a string without quotes")
        parts.append(searched(part["pattern"]))
    return " & ".join(f"({part})" for part in dict.fromkeys(parts)) if len(parts) > 1 else parts[0]


def regex(pattern: str) -> str:
    """A regular expression of JSON schemas that a whole text matches. It must not have anchors."""
    return f"/{regex_to_lark(f'({pattern})', 'dw')}/"


def searched(pattern: Any) -> str:
    """The body of a terminal: the texts in which a regular expression of JSON schemas is found."""
    if not isinstance(pattern, str):
        raise RefusedGrammarError("the schema's `pattern` must be a string")
    return " | ".join(f"({_branch(branch)})" for branch in _branches(pattern))


def _length(schema: dict[str, Any]) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not all(isinstance(bound, int) for bound in (least, 0 if most is None else most)):
        raise RefusedGrammarError("the schema's `minLength` and `maxLength` must be integers")
    if most is None and not least:
        return ANY
    if most is not None and most < least:
        raise RefusedGrammarError("no string has the length that the schema asks for")
    return f"/(?s:.{{{least},{'' if most is None else most}}})/"


def _branch(pattern: str) -> str:
    begins, ends = pattern.startswith("^"), _ends_with_anchor(pattern)
    inner = pattern[begins : len(pattern) - ends]
    if any(character in "^$" for character, _ in _plain(inner)):
        raise RefusedGrammarError("a `pattern` must not have anchors inside it")
    found = regex(inner) if inner else literal("")
    return f"{'' if begins else ANY} {found} {'' if ends else ANY}".strip()


def _ends_with_anchor(pattern: str) -> bool:
    return ("$", len(pattern) - 1) in _plain(pattern)


def _branches(pattern: str) -> list[str]:
    """The alternatives of a pattern, each with its own anchors."""
    cuts, depth = [-1], 0
    for character, at in _plain(pattern):
        depth += (character == "(") - (character == ")")
        if character == "|" and not depth:
            cuts.append(at)
    return [pattern[begin + 1 : end] for begin, end in zip(cuts, [*cuts[1:], len(pattern)], strict=True)]


def _plain(pattern: str) -> Iterator[tuple[str, int]]:
    """The characters of a pattern that are neither escaped nor in brackets, with their places."""
    in_brackets = is_escaped = False
    for at, character in enumerate(pattern):
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif in_brackets:
            in_brackets = character != "]"
        elif character == "[":
            in_brackets = True
        else:
            yield character, at


# Keywords that limit a value. The others only name schemas.
LIMITS = SUPPORTED - {"$anchor", "$defs", "$id", "$schema", "definitions"}
# How schemas are written: as `json.dumps` and Python's `repr` write values. Without white space of another form, their
# texts can stand beside the other texts of a call.
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_ITEMS = 1000  # beyond, a list is left to llguidance
# Finite as a 64-bit float.
INTEGER, NUMBER = r"/-?(0|[1-9][0-9]{0,17})/", r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/"
DOUBLE_QUOTED = r"""/"([^"\\\x00-\x1f]|\\["\\bfnrt])*"/"""
SINGLE_QUOTED = r"""/'([^'\\\x00-\x1f]|\\['\\bfnrt])*'/"""
ARRAY, OBJECT = frozenset(("type", "items", "minItems", "maxItems")), frozenset(("type", "properties", "required"))


@dataclass(frozen=True, slots=True)
class Notation:
    true: str
    false: str
    null: str
    strings: str  # the body of a terminal: strings in their quotes
    avoided: str = ""  # a text that no string contains, because it would end the value

    def text_of(self, value: Any) -> str:
        """A JSON value in this notation. Strings are in double quotes."""
        match value:
            case bool() | None:
                return {True: self.true, False: self.false, None: self.null}[value]
            case list():
                return f"[{', '.join(map(self.text_of, value))}]"
            case dict():
                return "{" + ", ".join(f"{_dumped(key)}: {self.text_of(inner)}" for key, inner in value.items()) + "}"
        return _dumped(value)


def json_notation(avoided: str) -> Notation:
    return Notation("true", "false", "null", without(DOUBLE_QUOTED, avoided), avoided)


PYTHON = Notation("True", "False", "None", f"{DOUBLE_QUOTED} | {SINGLE_QUOTED}")


class Literals:
    """Makes the rules of the values of one schema's parts."""

    def __init__(self, rules: Rules, root: dict[str, Any], notation: Notation) -> None:
        """`root`: a prepared schema, to which the references of its parts refer."""
        self._rules, self._root, self._notation = rules, root, notation
        self._any = ""
        self._as_json_rules: dict[bytes, str] = {}  # by the JSON of their schemas
        self._referred: dict[int, str] = {}  # the rules of schemas that are referred to, by their ids

    def of(self, schema: Any) -> str:
        """What stands for the values of a part of the schema in a rule. Raises RefusedGrammarError."""
        if schema is True:
            return self.any()
        if not isinstance(schema, dict):
            raise RefusedGrammarError("a part of the schema allows no value")
        limits = LIMITS & schema.keys()
        if not limits:
            return self.any()
        if limits == {"$ref"}:
            return self._reference(schema)
        if "enum" in limits or "const" in limits:
            return self._listed(schema, limits)
        if limits in ({"anyOf"}, {"allOf"}) and (parts := combined(schema)):
            return self._one_of([self.of(part) for part in parts])
        if isinstance(kinds := schema.get("type"), list) and kinds and all(isinstance(kind, str) for kind in kinds):
            return self._one_of([self.of(of_type(schema, kind)) for kind in kinds])
        make = _MAKERS.get(kinds) if isinstance(kinds, str) else None
        return (make and make(self, schema, limits)) or self._as_json(schema)

    def any(self) -> str:
        if not self._any:
            self._any = self._rules.reserved()
            simple = " | ".join(self._simple(kind) for kind in ("null", "boolean", "number", "string"))
            self._rules.define(self._any, f"{simple} | {self._list(self._any, 0, None)} | {self._map(self._any)}")
        return self._any

    def _reference(self, schema: dict[str, Any]) -> str:
        found = target(self._root, schema["$ref"])
        if found is None:
            raise RefusedGrammarError(f"the schema refers to {str(schema['$ref'])[:64]!r}, which it does not have")
        if (name := self._referred.get(id(found))) is None:
            self._referred[id(found)] = name = self._rules.reserved()
            self._rules.define(name, self.of(found))
        return name

    def _listed(self, schema: dict[str, Any], limits: frozenset[str]) -> str:
        if not limits <= {"enum", "const", "type"}:
            return self._as_json(schema)
        texts = [self._notation.text_of(value) for value in listed_values(schema)]
        avoided = self._notation.avoided
        kept = [literal(text) for text in texts if not (avoided and avoided in text)]
        if not kept:
            raise RefusedGrammarError("none of the values that the schema lists can be written")
        return self._rules.rule(" | ".join(dict.fromkeys(kept)))

    def _simple(self, kind: str) -> str:
        notation = self._notation
        match kind:
            case "null":
                return literal(notation.null)
            case "boolean":
                return f"({literal(notation.true)} | {literal(notation.false)})"
            case "string":
                return self._rules.terminal(notation.strings)
        return self._rules.terminal(INTEGER if kind == "integer" else NUMBER)

    def _simple_type(self, schema: dict[str, Any], limits: frozenset[str]) -> str:
        return self._simple(schema["type"]) if limits == {"type"} else ""

    def _array(self, schema: dict[str, Any], limits: frozenset[str]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        bounds = (least, MAX_ITEMS if most is None else most)
        if not limits <= ARRAY or not all(isinstance(bound, int) and 0 <= bound <= MAX_ITEMS for bound in bounds):
            return ""
        if isinstance(items := schema.get("items", True), list) or bounds[0] > bounds[1]:
            return ""
        return self._list(self.of(items), least, most) if most != 0 else literal("[]")

    def _object(self, schema: dict[str, Any], limits: frozenset[str]) -> str:
        if not limits <= OBJECT | {"additionalProperties"}:
            return ""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            return ""
        if not all(isinstance(name, str) and name in properties for name in required):
            return ""
        others = schema.get("additionalProperties", True)
        if not properties:
            return literal("{}") if others is False else self._rules.rule(self._map(self.of(others)))
        avoided = self._notation.avoided
        given = {
            name: part
            for name, part in properties.items()
            if not ((part is False or (avoided and avoided in _dumped(name))) and name not in required)
        }
        pairs = [(f"{literal(_dumped(name) + ': ')} {self.of(part)}", name in required) for name, part in given.items()]
        return self._rules.rule(f'"{{" {sequence(self._rules, pairs)} "}}"')

    def _one_of(self, parts: Sequence[str]) -> str:
        if not parts:
            raise RefusedGrammarError("a part of the schema allows no value")
        return self._rules.rule(" | ".join(dict.fromkeys(parts)))

    def _list(self, item: str, least: int, most: int | None) -> str:
        count = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        items = f'{item} (", " {item}){count}'
        return self._rules.rule(f'"[" {items} "]"' if least else f'"[" ({items})? "]"')

    def _map(self, value: str) -> str:
        pair = f'{self._simple("string")} ": " {value}'
        return f'"{{" ({pair} (", " {pair})*)? "}}"'

    def _as_json(self, schema: dict[str, Any]) -> str:
        """By llguidance itself, in the notation of JSON."""
        key = orjson.dumps(schema)
        if key not in self._as_json_rules:
            alone = self._alone(schema)
            if self._notation.avoided:
                narrow(alone, self._notation.avoided)
            text = orjson.dumps(alone | {"x-guidance": STYLE}).decode()
            self._as_json_rules[key] = self._rules.rule(f"%json {text}")
        return self._as_json_rules[key]

    def _alone(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A copy of a part of the schema with all that it refers to."""
        found: dict[str, Any] = {}
        names: dict[str, str] = {}

        def copied(value: Any) -> Any:
            if isinstance(value, list):
                return [copied(item) for item in value]
            if not isinstance(value, dict):
                return value
            copy = {key: copied(inner) for key, inner in value.items() if key not in ("$defs", "definitions")}
            if isinstance(reference := value.get("$ref"), str):
                copy["$ref"] = f"#/$defs/{named(reference)}"
            return copy

        def named(reference: str) -> str:
            if reference not in names:
                names[reference] = name = f"part{len(names)}"
                if (part := target(self._root, reference)) is None:
                    raise RefusedGrammarError(f"the schema refers to {reference[:64]!r}, which it does not have")
                found[name] = copied(part)
            return names[reference]

        alone: dict[str, Any] = copied(schema)
        return alone | {"$defs": found} if found else alone


def sequence(rules: Rules, members: Sequence[tuple[str, bool]]) -> str:
    """Members in their order, with commas between them. A member may be missing if it is not required."""
    later = first = ""
    for member, is_required in reversed(members):
        begin = f"{member} {later}".strip()
        first = begin if is_required else rules.rule(f"({begin}) | {first}" if first else f"({begin})?")
        after = f'", " {member}' if is_required else f'(", " {member})?'
        later = rules.rule(f"{after} {later}".strip())
    return first


def combined(schema: Mapping[str, Any]) -> list[Any]:
    """The alternatives of a schema that has only `anyOf`, or the only part of one that has only `allOf`."""
    alternatives, parts = schema.get("anyOf"), schema.get("allOf")
    if isinstance(alternatives, list):
        return [part for part in alternatives if part is not False]
    return parts if isinstance(parts, list) and len(parts) == 1 else []


def listed_values(schema: Mapping[str, Any]) -> list[Any]:
    """The values that `const` or `enum` lists, as far as they have the type that the schema asks for."""
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list):
        raise RefusedGrammarError("the schema's `enum` must be a list")
    if "const" in schema:
        values = [value for value in values if _dumped(value) == _dumped(schema["const"])]
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return [value for value in values if kinds is None or any(has_type(value, kind) for kind in kinds)]


def of_type(schema: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """What a schema of several types says of the values of one of them."""
    others = {name for other, names in OF_TYPE.items() if other != kind for name in names}
    if kind in ("integer", "number"):
        others -= OF_TYPE["number"]
    given = {name: value for name, value in schema.items() if name not in others} | {"type": kind}
    if kind != "string" and all(
        part.keys() == {"pattern"} for part in given.get("allOf", ()) if isinstance(part, dict)
    ):
        given.pop("allOf", None)
    return given


def has_type(value: Any, kind: str) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {
        "null": value is None,
        "boolean": isinstance(value, bool),
        "integer": is_number and isinstance(value, int),
        "number": is_number,
        "string": isinstance(value, str),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }.get(kind, False)


def _dumped(value: Any) -> str:
    return orjson.dumps(value).decode()


# For each type, how its values are made; "": llguidance makes them.
_MAKERS: dict[str, Callable[[Literals, dict[str, Any], frozenset[str]], str]] = {
    **dict.fromkeys(("null", "boolean", "integer", "number", "string"), Literals._simple_type),
    "array": Literals._array,
    "object": Literals._object,
}
