"""Grammars that are meant to cost much: long repetitions, many states, references that double. As a program, checks all
of them and writes a line of JSON for each: its kind, seconds of work, and MiB by which the process has grown since the
start."""

import json
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind
from text_generation_router.text.grammars.checking_child import byte_tokenizer
from text_generation_router.text.grammars.tests.matching import check

REGEXES = (
    "(a{1,1000}){1,1000}", "((a{1,1000}){1,1000}){1,1000}", "a{1,1000000}", "(a|b|ab)*c{500,1000}", "(.*a){50}",
    "(a*)*" * 1000, "(" * 200 + "a" + ")" * 200, "(" * 5000 + "a" + ")" * 5000, "(.|\n)*" * 50, "(?:x+x+)+y",
    "|".join(f"{number:x}" for number in range(10_000)), "[a-z]{1,500}" * 30, r"(\p{L}{1,100}\p{N}{1,100}){1,100}",
    "(a?){1000}a{1000}", "(a|a?)+$", r"(\w+\s?)*$", "(.{1,200}x){20}", "(?i)" + "k" * 20_000, "[^a]" * 10_000,
)  # fmt: skip
RULES = (
    'start: "a" start', 'start: start start | "a"', 'start: x{1000000}\nx: "a"', "start: X\nX: /a{1,1000}/{1,1000}",
    "start: a\n" + "".join(f'{chr(97 + n)}: {" ".join([chr(98 + n)] * 9)}\n' for n in range(24)) + 'y: "x"',
    "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, 'root ::= "a"{1,100000000}', "root ::= " + "|[a-z]" * 9000,
    "start: " + "(" * 3000 + '"a"' + ")" * 3000, "start: A\nA: /(.*a){30}/ & /(.*b){30}/", "start: ~X\nX: /(.*a){200}/",
    "start: " + "|".join(f"x{n}" for n in range(1500)) + "".join(f'\nx{n}: "{n}" x{n % 7}?' for n in range(1500)),
)  # fmt: skip


def chain(count: int, link: Any, last: Any) -> dict[str, Any]:
    """Schemas of which each refers to the next one."""
    parts = {f"d{number}": link({"$ref": f"#/$defs/d{number + 1}"}, number) for number in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": parts | {f"d{count}": last}}


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        value = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    return value


def objects_with(count: int, value: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": value for number in range(count)}}


SCHEMAS: tuple[Any, ...] = (
    nested(30), nested(300), {"enum": [f"v{number}" for number in range(7000)]}, objects_with(2000, {"type": "string"}),
    objects_with(2000, {"$ref": "#"}), objects_with(500, {"$ref": "#"}),
    {"type": "array", "minItems": 10**6, "items": {"type": "string"}},
    {"type": "array", "maxItems": 10**9}, {"type": "string", "minLength": 10**8},
    {"type": "string", "maxLength": 10**9, "pattern": "^a"}, {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
    {"type": "integer", "multipleOf": 1_234_577, "minimum": -(10**15), "maximum": 10**15},
    {"type": "integer", "multipleOf": 9973, "minimum": -(10**15), "maximum": 10**15},
    {"type": "number", "multipleOf": 1e-9, "minimum": -(10**9)}, {"type": "number", "multipleOf": 9973, "minimum": 0.5},
    {"type": "integer", "allOf": [{"multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]},
    {"allOf": [{"anyOf": [{"type": "string", "minLength": n}, {"type": "integer", "minimum": n}]} for n in range(20)]},
    {"allOf": [{"anyOf": [objects_with(n, {"type": "integer"}) for n in range(4)]} for _ in range(12)]},
    {"type": "string", "allOf": [{"pattern": f"(.*{letter}){{20}}"} for letter in "abcdefgh"]},
    chain(200, lambda ref, n: {"anyOf": [ref, ref]}, {"type": "integer"}),
    chain(300, lambda ref, n: {"properties": {"a": ref, "b": ref}, "required": ["a", "b"]}, {"type": "integer"}),
    chain(40, lambda ref, n: {"allOf": [ref, ref]}, {"type": "integer"}),
    chain(30, lambda ref, n: {"allOf": [ref, {"properties": {f"p{n}": ref}}]}, {"type": "object"}),
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}, {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    {"oneOf": [{"properties": {"k": {"const": n}}, "required": ["k"], "type": "object"} for n in range(700)]},
    {"oneOf": [{"type": "string", "pattern": f"^a{{{n}}}$"} for n in range(100)]},
    {"anyOf": [objects_with(n, {"type": "string"}) for n in range(60)]},
    {"patternProperties": {f"^a{{{n}}}b": {} for n in range(1, 33)}}, {"type": "array", "prefixItems": [{}] * 5000},
    objects_with(500, {}) | {"required": [f"p{number}" for number in range(500)]},
    {"anyOf": [objects_with(500, {"type": "integer"})] + [objects_with(400, {"type": "null"})] * 2},
)  # fmt: skip


def rule_chain(count: int, link: str, last: str) -> str:
    """Rules of which each refers to the next one. In `link`, `{0}` is a rule's number and `{1}` the next one's."""
    lines = ["start: " + link.format(0, 0).partition(":")[0]]
    return "\n".join([*lines, *(link.format(n, n + 1) for n in range(count)), last.format(count)])


# Grammars that end a process which compiles them: llguidance fails at ranges of integers below -2^63, and its chains of
# rules take the stack of the thread.
DEADLY_NUMBERS: tuple[Any, ...] = (
    {"const": -(2**63)}, {"enum": ["x", -(2**63)]}, {"type": "integer", "const": -1e308},
    {"properties": {"a": {"type": "integer", "minimum": -1e19, "maximum": -1e19}}},
    {"type": "array", "items": {"anyOf": [{"const": -(2**63)}, {"type": "string"}]}},
)  # fmt: skip
DEADLY_RULES = (
    rule_chain(4500, "a{0}: a{1}", 'a{0}: "x"'), rule_chain(3000, 'a{0}: "y" a{1}?', 'a{0}: "x"'),
    'start: "a" %json {"const": -9223372036854775808}',
)  # fmt: skip


def deadly() -> Iterator[AskedGrammar]:
    yield from (AskedGrammar("f", GrammarKind.RULES, text) for text in DEADLY_RULES)
    yield from (AskedGrammar("f", GrammarKind.JSON_SCHEMA, json.dumps(schema)) for schema in DEADLY_NUMBERS)


def grammars() -> Iterator[AskedGrammar]:
    for kind, texts in ((GrammarKind.REGEX, REGEXES), (GrammarKind.RULES, RULES)):
        yield from (AskedGrammar("f", kind, text) for text in texts)
    yield from (AskedGrammar("f", GrammarKind.JSON_SCHEMA, json.dumps(schema)) for schema in SCHEMAS)
    for text in ("[" * 60_000, '{"items":' * 5000 + "{}" + "}" * 5000):
        yield AskedGrammar("f", GrammarKind.JSON_SCHEMA, text)
    for choices in ([f"{number}" for number in range(4096)], ["a" * length for length in range(1, 350)]):
        yield AskedGrammar("f", GrammarKind.CHOICE, json.dumps(choices))


def main() -> None:
    byte_tokenizer()
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for asked in grammars():
        began = time.thread_time()
        refusal = check(asked).refusal
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024
        said = {"kind": asked.kind, "begin": asked.text[:60], "seconds": time.thread_time() - began, "refusal": refusal}
        sys.stdout.write(json.dumps(said | {"mib": grown}) + "\n")


if __name__ == "__main__":
    main()
