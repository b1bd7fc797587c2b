"""Follows a grammar byte by byte, for tests."""

from llguidance import LLMatcher

from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind
from text_generation_router.text.grammars.checking import check
from text_generation_router.text.grammars.verification import LIMITS, byte_tokenizer


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
