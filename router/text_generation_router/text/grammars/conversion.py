"""Turns what a request asks for into llguidance's JSON text of a grammar. Does not check that llguidance takes it."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import orjson
from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from text_generation_router.text.grammars.asked import MAX_CHOICES, AskedGrammar, GrammarKind, RefusedGrammarError
from text_generation_router.text.grammars.call_arguments import rules_of
from text_generation_router.text.grammars.rules import literal
from text_generation_router.text.grammars.schemas import prepare

# How JSON is written. One space may stand where JSON allows white space, as in TGI's grammars: with more of it a model
# may write white space without an end.
JSON_STYLE: Mapping[str, str] = MappingProxyType({"whitespace_pattern": r"\x20"})
# A rule of GBNF. Lark's rules have one colon, and no equals sign.
GBNF = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")
# Attributes of a Lark rule that change how tokens are drawn, or what is reported of the text.
ATTRIBUTES = re.compile(r"(?m)^[ \t]*[?!]?\w+(?:::\w+)?[ \t]*\[[^\]\n]*\b(temperature|capture|stop_capture)\b")


def converted(asked: AskedGrammar) -> str:
    """Raises RefusedGrammarError."""
    return CONVERSIONS[asked.kind](asked)


def _of_schema(asked: AskedGrammar) -> str:
    try:
        schema = orjson.loads(asked.text)
    except orjson.JSONDecodeError as error:
        raise RefusedGrammarError(f"the schema is not valid JSON: {error}") from None
    if asked.needs_properties and not (isinstance(schema, dict) and "properties" in schema):
        raise RefusedGrammarError("Grammar must have a 'properties' field")
    if asked.needs_properties:  # TGI's clients leave the type out and mean an object
        schema.setdefault("type", "object")
    return schema_grammar(schema)


def schema_grammar(schema: Any) -> str:
    """The grammar of a JSON schema, which is changed. Raises RefusedGrammarError."""
    return str(LLMatcher.grammar_from_json_schema(prepared_text(schema)))


def prepared_text(schema: Any) -> str:
    """The schema as llguidance's JSON text, with the options that all grammars have. The value is changed. Raises
    RefusedGrammarError."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RefusedGrammarError("the schema must be a JSON object")
    prepare(schema)
    return orjson.dumps(schema | {"x-guidance": dict(JSON_STYLE)}).decode()


def _of_regex(asked: AskedGrammar) -> str:
    if not asked.text:
        raise RefusedGrammarError("the regular expression is empty")
    if (len(asked.text) - len(asked.text.rstrip("\\"))) % 2:  # llguidance ignores the last one
        raise RefusedGrammarError("the regular expression ends with a backslash that escapes nothing")
    # As in TGI's grammars, \d, \w and \s are the ASCII characters.
    return lark_grammar(f"start: /{regex_to_lark(asked.text, 'dws')}/")


def _of_choice(asked: AskedGrammar) -> str:
    choices = list(dict.fromkeys(orjson.loads(asked.text)))
    if not choices:
        raise RefusedGrammarError("there is nothing to choose from")
    if len(choices) > MAX_CHOICES:
        raise RefusedGrammarError(f"at most {MAX_CHOICES} choices are supported, given: {len(choices)}")
    if "" in choices:
        raise RefusedGrammarError("an empty string cannot be chosen")
    return lark_grammar("start: CHOICE\nCHOICE: " + " | ".join(map(literal, choices)))


def lark_grammar(rules: str) -> str:
    """llguidance's JSON text of rules in its Lark syntax."""
    return orjson.dumps({"grammars": [{"lark_grammar": rules}]}).decode()


def _of_rules(asked: AskedGrammar) -> str:
    try:
        rules = gbnf_to_lark(asked.text) if GBNF.search(asked.text) else asked.text
    except RecursionError:
        raise RefusedGrammarError("the grammar is nested too deeply") from None
    except Exception as error:  # llguidance raises bare Exception
        raise RefusedGrammarError(f"the GBNF grammar cannot be read: {one_line(str(error))}") from None
    if found := ATTRIBUTES.search(rules):
        raise RefusedGrammarError(f"the attribute `{found[1]}` of a rule is not supported")
    return lark_grammar(rules)


def one_line(text: str) -> str:
    """The first line of a message, without the source text that follows."""
    return (text.splitlines() or [""])[0][:300]


CONVERSIONS: Mapping[GrammarKind, Callable[[AskedGrammar], str]] = MappingProxyType(
    {
        GrammarKind.JSON_SCHEMA: _of_schema,
        GrammarKind.REGEX: _of_regex,
        GrammarKind.CHOICE: _of_choice,
        GrammarKind.RULES: _of_rules,
        GrammarKind.ARGUMENTS: lambda asked: lark_grammar(rules_of(asked)),
    }
)
