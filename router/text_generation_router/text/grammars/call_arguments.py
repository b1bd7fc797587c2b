"""The rules of a tool's arguments in calls whose arguments are not one JSON object."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from text_generation_router.text.calls.formats import XmlSyntax
from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind, RefusedGrammarError
from text_generation_router.text.grammars.pythonic import PythonicArguments
from text_generation_router.text.grammars.rules import MarkedTexts, Rules
from text_generation_router.text.grammars.schemas import prepare
from text_generation_router.text.grammars.tagged import TaggedArguments


@dataclass(frozen=True, slots=True)
class ArgumentStyle:
    """How arguments are written: between tags or, without them, as in a call of Python."""

    tags: XmlSyntax | None = None
    is_loose: bool = False  # whether the line breaks around tags may be missing


@dataclass(frozen=True, slots=True)
class DefinedRule:
    """A part of a rule, and the definitions that it refers to."""

    body: str
    definitions: str = ""


def arguments_rule(
    style: ArgumentStyle, schema: Mapping[str, Any] | None, prefix: str, token_ids: Mapping[str, int]
) -> DefinedRule:
    """The arguments that a tool's schema allows; without one, any arguments. `prefix`: of all names that are defined.
    `token_ids`: of the texts of the syntax that are special tokens. Raises RefusedGrammarError."""
    rules, root = Rules(prefix), orjson.loads(orjson.dumps(schema or {}))
    prepare(root)
    if style.tags is None:
        made: TaggedArguments | PythonicArguments = PythonicArguments(rules, root)
    else:
        made = TaggedArguments(rules, style.tags, MarkedTexts(token_ids), root, style.is_loose)
    body = made.anything() if schema is None else made.all()
    return DefinedRule(body, rules.text)


def asked_arguments(style: ArgumentStyle, schema: Mapping[str, Any], is_loose: bool = False) -> AskedGrammar:
    """What is to be checked before such a rule is used."""
    text = orjson.dumps([asdict(style), schema]).decode()
    return AskedGrammar("tools", GrammarKind.ARGUMENTS, text, is_loose=is_loose)


def rules_of(asked: AskedGrammar) -> str:
    """The rules of `asked_arguments`, with special tokens as texts. Raises RefusedGrammarError."""
    style, schema = orjson.loads(asked.text)
    tags = XmlSyntax(**style["tags"]) if style["tags"] else None
    try:
        rule = arguments_rule(ArgumentStyle(tags, style["is_loose"]), schema, "a", {})
    except RecursionError:
        raise RefusedGrammarError("the schema is nested too deeply") from None
    return f'start: "(" {rule.body} ")"\n{rule.definitions}'
