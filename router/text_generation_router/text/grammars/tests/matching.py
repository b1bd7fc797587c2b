"""Follows a grammar byte by byte, and looks for what is wrong with a text; for tests."""

import json
from collections.abc import Iterator
from decimal import Decimal

import jsonschema
from llguidance import LLMatcher

from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind
from text_generation_router.text.grammars.checking_child import LIMITS, byte_tokenizer, check


def grammar_of(kind: GrammarKind, text: str, **options) -> str:
    checked = check(AskedGrammar("f", kind, text, **options))
    assert not checked.refusal, checked.refusal
    return checked.grammar


def refusal_of(kind: GrammarKind, text: str, **options) -> str:
    return check(AskedGrammar("f", kind, text, **options)).refusal


def matches(grammar: str, text: str) -> bool:
    """Whether the whole text has the form."""
    matcher = LLMatcher(byte_tokenizer(), grammar, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    content = text.encode()
    return matcher.try_consume_tokens(list(content)) == len(content) and matcher.is_accepting()


def problems_of(schema: str, text: str) -> Iterator[str]:
    """What is wrong with the text. Numbers are decimal, as in JSON: 0.07 is a multiple of 0.01."""
    kind = jsonschema.Draft202012Validator
    validator = kind(json.loads(schema, parse_float=Decimal), format_checker=kind.FORMAT_CHECKER)
    yield from (error.message for error in validator.iter_errors(json.loads(text, parse_float=Decimal)))
