"""Asks llguidance whether it can follow a grammar: over the model's tokens, or over a vocabulary of single bytes."""

import re
from functools import cache

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from text_generation_common.grammars import GRAMMAR_LIMITS
from text_generation_router.text.grammars.asked import RefusedGrammarError
from text_generation_router.text.grammars.conversion import one_line

LIMITS = LLParserLimits(**GRAMMAR_LIMITS, verbose_errors=False)

NOTHING = "no text has the form that it asks for"
# llguidance's messages, and what they mean to a reader who knows only the request.
MESSAGES = (
    (r'Unimplemented keys: \["(?P<name>[^"]*)"', "the schema's keyword `{name}` is not supported"),
    (r"^oneOf constraints are not supported", "the schema's keyword `oneOf` is supported only where no value can match "
     "two of its schemas: send `anyOf`"),
    (r"^Unknown format: (?P<name>.*)", "the schema's `format` '{name}' is not supported"),
    (r"^Resource '(?:json-schema:///)?(?P<name>[^']*)'", "the schema refers to '{name}', and only references to its "
     "own parts are supported"),
    (r"^Unsatisfiable schema: (?P<name>.*)", "the schema allows no value: {name}"),
    (r"min/maxProperties only supported", "the schema's keywords `minProperties` and `maxProperties` are supported "
     "only where all `properties` are required, or as 1"),
    (r"^no tokenizer - can't validate", "special tokens are not supported"),
    (r"look-?arounds?", "a regular expression must not have look-around, nor anchors or word boundaries inside it"),
    (r"^NoExtension", NOTHING),
    (r"^Failed to generate regex for \w+ range", "a bound of a number is too large or has too many digits"),
    (r"^(Unable to determine if regex is empty|ParserTooComplex|LexerTooComplex|.*fuel exhausted|.*Current row has|"
     r".*lexer precomputation failed|"
     r".*[Tt]oo (large|big|many))", "it is too large or complex"),
    (r"backreferences are not supported", "a regular expression must not have back-references"),
)  # fmt: skip


class Bytes:
    """A tokenizer with a token for each byte, and one for the end of the text."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"<eos>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()), slices=[])


def verify(grammar: str, tokenizer: LLTokenizer | None = None) -> None:
    """Raises RefusedGrammarError if llguidance cannot follow the grammar, or would pass over a part of it. Its work is
    bounded by LIMITS. Special tokens are refused, also with a `tokenizer` that has them."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    if is_error or messages:
        raise RefusedGrammarError(explained(messages[0]))
    compile_grammar(grammar, tokenizer or byte_tokenizer())


def compile_grammar(grammar: str, tokenizer: LLTokenizer) -> None:
    """Compiles the grammar as a shard does. Raises RefusedGrammarError."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    # The first mask is computed as well: it fails if the grammar has no text, or is too large to be followed. Some that
    # are too large fail at the first token only.
    allowed = int.from_bytes(matcher.compute_bitmask(), "little") if not matcher.is_error() else 0
    ordinary = allowed & ~sum(1 << end for end in tokenizer.eos_tokens)
    if ordinary:
        _try_token(matcher, (ordinary & -ordinary).bit_length() - 1, tokenizer.vocab_size)  # the lowest allowed
    if matcher.is_error():
        raise RefusedGrammarError(explained(matcher.get_error()))
    if not allowed:
        raise RefusedGrammarError(NOTHING)


def _try_token(matcher: LLMatcher, token_id: int, num_tokens: int) -> None:
    """Lets the matcher read a token and compute the mask after it; then it is as before, or has failed."""
    words = -(-num_tokens // 32)
    masks = np.empty(2 * words, np.uint32)
    # llguidance's type stubs lack this method.
    matcher.unsafe_compute_mask_ptr_with_draft_token(masks.ctypes.data, 4 * words, [token_id])  # type: ignore[attr-defined]


def explained(message: str) -> str:
    """llguidance's message in our words, where they are clearer."""
    place = re.match(r"(?:at )?(\d+)\((\d+)\): ", message)
    message = message[place.end() :] if place else message
    message = message.removeprefix("failed to compile JSON schema: ")
    for pattern, words in MESSAGES:
        if found := re.search(pattern, message):
            return words.format(**found.groupdict())
    if "\nerror: " in message:  # an error in a regular expression, below its text
        return f"a regular expression cannot be read: {one_line(message.split(chr(10) + 'error: ')[-1])}"
    where = f"line {place[1]}, column {place[2]}: " if place and "\n" in message else ""
    return where + one_line(message)
