"""Draws grammars, schemas and tools at random, most of them odd: numbers at the edges of machine types, depth, breadth,
chains, text that is not Unicode, values of wrong types for every keyword."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from text_generation_router.text.calls.written import WRITTEN_FORMS
from text_generation_router.text.grammars.asked import MAX_BYTES, AskedGrammar, GrammarKind
from text_generation_router.text.grammars.forms import CallsForm, ChatForm, WantedGrammar
from text_generation_router.text.grammars.keywords import FORMATS, REFUSED, SUPPORTED
from text_generation_router.text.grammars.tests.evil_grammars import rule_chain

Schema = dict[str, Any]
EDGES = [sign * (2**bits + more) for bits in (31, 53, 63, 64) for more in (-1, 0, 1) for sign in (1, -1)]
NUMBERS = [
    *EDGES, *map(float, EDGES), 1e308, -1e308, 1e19, -1e19, 10**30, 0, 1, -1, -0.0, 0.1, 1e-9, 5e-324, 0.5, 3, 12,
]  # fmt: skip
NOT_FINITE = [float("nan"), float("inf"), -float("inf")]
STRINGS = ("", "a", "red", "green", '"', "\\", "é🌊", "\n", "\0", "\ud800", "x" * 300, "</s>", "<|x|>", "/", "#", "%")
WRONG = (
    None, True, False, 0, -1, 1.5, "", "x", [], [1], {}, {"a": 1}, [[]], [{}], [None], "\ud800", {"": []}, ["a", "a"],
)  # fmt: skip
NAMES = ("a", "b", "c", "name", "", "a b", '"', "é", "$ref", "type", "properties")
ATOMS = (
    "a", "[a-z]", "[^a]", ".", r"\d", r"\w", r"\s", r"\p{L}", "é", "(ab|c)", "(?i:x)", r"\b", "^", "$", "(?=a)", "\\",
    "[", "(", r"\x41", r"\u00e9", "(a*)*", "[a-z]{3,9}", "\0", r"\1", "(?P<n>a)", " ",
)  # fmt: skip
COUNTS = (0, 1, 2, 9, 100, 1000, 10**6, 2**31, 2**32, 2**63, 2**64)
LINKS = (
    "a{0}: a{1}", 'a{0}: "y" a{1}?', 'a{0}: "y" | a{1} "z"', "A{0}: A{1}", 'A{0}: "y" A{1}?', "a{0}: (a{1})*",
    "A{0}: /[a-f]/ A{1} | A{1}", "a{0}: a{1} a{1}", "A{0}: ~A{1}", "A{0}: A{1} & /.*/", "a{0}: a{1}{{0,2}}",
    "a{0}: A{0}\nA{0}: /x/ a{1}",
)  # fmt: skip
LENGTHS = (2, 5, 30, 300, 1500, 2500, 2700, 4000)
# How often a drawn value is one of the costly kinds, or of a wrong type.
RARELY, OFTEN = 0.03, 0.3


@dataclass(frozen=True, slots=True)
class Drawn:
    kind: GrammarKind | None  # None: calls of `tools`
    text: str = ""
    tools: Mapping[str, Schema] | None = None
    strict: Sequence[str] = ()
    format: str = "hermes"

    @property
    def wanted(self) -> WantedGrammar:
        if self.tools is None:
            assert self.kind is not None
            return WantedGrammar(AskedGrammar("f", self.kind, self.text))
        calls = CallsForm(self.format, self.tools, self.strict, is_required=True, several=True)
        return WantedGrammar(None, ChatForm(None, calls, {}))


def draw(rng: Random) -> Drawn:
    while True:
        drawn = rng.choices((_schema_text, _rules, _gbnf, _regex, _choice, _tools), (8, 4, 2, 3, 1, 3))[0](rng)
        if len(drawn.text.encode(errors="replace")) <= MAX_BYTES:
            return drawn


def _schema_text(rng: Random) -> Drawn:
    value: Any = rng.choice((*WRONG, *NUMBERS)) if rng.random() < RARELY else schema(rng, rng.randint(1, 4))
    text = json.dumps(value, ensure_ascii=rng.random() < 0.9)
    if rng.random() < RARELY:  # text that is no longer JSON
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice(STRINGS) + text[place + rng.randint(0, 3) :]
    return Drawn(GrammarKind.JSON_SCHEMA, text)


def schema(rng: Random, depth: int) -> Any:
    makers: list[Callable[[Random, int], Any]] = [_number, _number, _string, _listed]
    if depth > 0:
        makers += [_object, _object, _array, _union, _reference]
    made = rng.choice(makers)(rng, depth - 1) if rng.random() > RARELY else _large(rng)
    if isinstance(made, dict) and rng.random() < OFTEN:
        name = rng.choice(sorted(SUPPORTED | REFUSED.keys() | {"nullable", "default", "title", "x"}))
        made[name] = _any_value(rng, depth)
    return made


def _any_value(rng: Random, depth: int) -> Any:
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice(NUMBERS if rng.random() > RARELY else NOT_FINITE)
    if kind == 1:
        return rng.choice(STRINGS)
    return rng.choice(WRONG) if kind < 4 or depth <= 0 else schema(rng, depth - 1)


def _number(rng: Random, depth: int) -> Schema:
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    bounds = {name: rng.choice(NUMBERS) for name in rng.sample(names, rng.randint(0, 3))}
    if rng.random() < 0.2:  # both bounds near each other
        bounds |= dict.fromkeys(("minimum", "maximum"), rng.choice(NUMBERS))
    return {"type": rng.choice(("integer", "number"))} | bounds


def _string(rng: Random, depth: int) -> Schema:
    made: Schema = {"type": "string"}
    if rng.random() < 0.3:
        made["pattern"] = _expression(rng)
    if rng.random() < 0.3:
        made["format"] = rng.choice((*FORMATS, "regex", "int32", "no such format"))
    for name in ("minLength", "maxLength"):
        if rng.random() < 0.3:
            made[name] = rng.choice((*COUNTS, *NUMBERS))
    return made


def _listed(rng: Random, depth: int) -> Schema:
    values = [rng.choice((*NUMBERS, *STRINGS, *WRONG)) for _ in range(rng.randint(1, 5))]
    return {"enum": values} if rng.random() < 0.5 else {"const": values[0]}


def _object(rng: Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 4))
    made: Schema = {"type": "object", "properties": {name: schema(rng, depth) for name in names}}
    if rng.random() < 0.7:
        made["required"] = rng.sample(names, rng.randint(0, len(names)))
    if rng.random() < 0.2:
        made["additionalProperties"] = rng.choice((True, False, schema(rng, depth - 1)))
    if rng.random() < 0.1:
        made["patternProperties"] = {_expression(rng): schema(rng, depth - 1)}
    if rng.random() < 0.1:
        made[rng.choice(("minProperties", "maxProperties"))] = rng.choice(NUMBERS)
    return made


def _array(rng: Random, depth: int) -> Schema:
    made: Schema = {"type": "array", "items": schema(rng, depth)}
    if rng.random() < 0.2:
        made["prefixItems"] = [schema(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    for name in ("minItems", "maxItems"):
        if rng.random() < 0.3:
            made[name] = rng.choice((*COUNTS[:5], *NUMBERS))
    return made


def _union(rng: Random, depth: int) -> Schema:
    parts = [schema(rng, depth) for _ in range(rng.randint(0, 4))]
    return {rng.choice(("anyOf", "allOf", "oneOf")): parts}


def _reference(rng: Random, depth: int) -> Schema:
    targets = ("#", "#/$defs/a", "#/$defs/b", "#/$defs/none", "#/properties/a", "#a", "https://e.org/x", "", "\ud800")
    defined = {name: schema(rng, depth) for name in ("a", "b")}
    return {"$ref": rng.choice(targets), "$defs": defined, "properties": {"a": {"$ref": rng.choice(targets)}}}


def _large(rng: Random) -> Schema:
    size = rng.choice((20, 63, 64, 65, 200, 600))
    kind = rng.randrange(4)
    if kind == 0:
        made: Schema = {"type": "integer"}
        for _ in range(min(size, 200) // rng.choice((1, 2, 4))):
            made = rng.choice(
                ({"type": "array", "items": made}, {"properties": {"a": made}}, {"anyOf": [made, {"type": "null"}]})
            )
        return made
    if kind == 1:
        return {"type": "object", "properties": {f"p{number}": _number(rng, 0) for number in range(size)}}
    if kind == 2:
        return {"enum": [rng.choice((f"v{number}", number)) for number in range(size)]}
    parts: Schema = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(size)}
    return {"$ref": "#/$defs/d0", "$defs": parts | {f"d{size}": _number(rng, 0)}}


def _expression(rng: Random) -> str:
    made = ""
    for _ in range(rng.randint(1, 6)):
        atom = rng.choice(ATOMS)
        count = rng.choice(("", "", "*", "+", "?", f"{{{rng.choice(COUNTS)}}}", f"{{1,{rng.choice(COUNTS[:7])}}}", "{"))
        made += atom + count
    return f"({made})" * rng.choice((1, 1, 2, 20)) if rng.random() < 0.2 else made


def _regex(rng: Random) -> Drawn:
    depth = rng.choice((100, 249, 251, 3000)) if rng.random() < RARELY else 0
    return Drawn(GrammarKind.REGEX, "(" * depth + _expression(rng) + "b?)" * depth)


def _chain(rng: Random) -> str:
    link = rng.choice(LINKS)
    last = '"x"' if rng.random() < 0.7 else "%json " + json.dumps(schema(rng, 1))
    return rule_chain(
        rng.choice(LENGTHS), link, link.partition("{0}")[0] + "{0}: " + last.replace("{", "{{").replace("}", "}}")
    )


def _part(rng: Random, depth: int) -> str:
    parts = [
        '"a"', '"é"i', "/[a-z]+/", "b", "c", "D", "E", '""', '"\\n"', "<|x|>", "<[5]>", "<[99999999]>", '"a".."z"',
        "@x",
    ]  # fmt: skip
    if depth > 0:
        inner = " ".join(_part(rng, depth - 1) for _ in range(rng.randint(1, 3)))
        count = rng.choice(COUNTS)
        parts += [
            f"({inner})",
            f"({inner})*",
            f"({inner})?",
            f"({inner} | {inner})",
            f"({inner}){{{count}}}",
            f"({inner}){{1,{count}}}",
        ]
        parts += [f"/{_expression(rng)}/", f"%json {json.dumps(schema(rng, 1))}", f"[{inner}]", f"~({inner})"]
    return rng.choice(parts)


def _rules(rng: Random) -> Drawn:
    if rng.random() < 3 * RARELY:
        return Drawn(GrammarKind.RULES, _chain(rng))
    names = (
        "start",
        "b",
        "c",
        "D",
        "E",
        rng.choice(("f[lazy]", "f[max_tokens=3]", "f[temperature=2]", "f", "%ignore", "1")),
    )
    lines = [
        f"{name}: " + rng.choice((" ", " | ")).join(_part(rng, 2) for _ in range(rng.randint(1, 3))) for name in names
    ]
    return Drawn(GrammarKind.RULES, "\n".join(lines[: rng.randint(1, 6)]))


def _gbnf(rng: Random) -> Drawn:
    if rng.random() < 2 * RARELY:
        chain = rule_chain(rng.choice(LENGTHS), rng.choice(("a{0} ::= a{1}", 'a{0} ::= "y" a{1}?')), 'a{0} ::= "x"')
        return Drawn(GrammarKind.RULES, "root ::= a0\n" + chain.partition("\n")[2])
    parts = (
        '"a"',
        "[a-z]",
        '[^"]+',
        "b",
        "c*",
        "(b | c)",
        '"\\x41"',
        "[",
        '"',
        f"c{{{rng.choice(COUNTS)}}}",
        "# x\n",
        ".",
        "é",
    )
    lines = [
        f"{name} ::= " + " ".join(rng.choice(parts) for _ in range(rng.randint(0, 4))) for name in ("root", "b", "c")
    ]
    return Drawn(GrammarKind.RULES, "\n".join(lines))


def _choice(rng: Random) -> Drawn:
    count = rng.choice((0, 1, 3, 20, 4097)) if rng.random() < 0.1 else rng.randint(1, 5)
    texts = [text for text in STRINGS if text.isprintable()]  # bodies with other texts are refused before
    choices = [rng.choice(texts) + str(rng.randrange(9)) * rng.randint(0, 5) for _ in range(count)]
    return Drawn(GrammarKind.CHOICE, json.dumps(choices))


def _tools(rng: Random) -> Drawn:
    tools = {f"f{number}": made for number in range(rng.randint(1, 4)) if isinstance(made := schema(rng, 3), dict)}
    names = [*tools][: rng.randint(0, 1)]
    return Drawn(None, tools=tools or {"f": {}}, strict=names, format=rng.choice(sorted(WRITTEN_FORMS)))
