"""The program of a child process that makes and checks grammars. llguidance, which is native code, reads there what a
client has sent, and may end the process: only what the child has compiled reaches a shard.

A job is a WantedGrammar as JSON. An answer is a MadeGrammar as JSON.
"""

import os
import re
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from text_generation_common.grammars import COMPILER_STACK_BYTES, GRAMMAR_LIMITS, read_grammar_tokens
from text_generation_common.model_files import read_model_file
from text_generation_router.offload.child import Handler
from text_generation_router.text.grammars.asked import AskedGrammar, MadeGrammar, RefusedGrammarError
from text_generation_router.text.grammars.chat_forms import ChatGrammar
from text_generation_router.text.grammars.conversion import converted, one_line
from text_generation_router.text.grammars.forms import WantedGrammar
from text_generation_router.text.grammars.schemas import loosened

# Asks llguidance whether it can follow a grammar: over the model's tokens, or over a vocabulary of single bytes.

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


# How far the process stands back for tokens: 0 to 19.
NICENESS = 10
# A shard's thread has twice this stack for the same grammar.
STACK_BYTES = COMPILER_STACK_BYTES // 2


def make_handlers(setup: bytes) -> Mapping[str, Handler]:
    os.nice(NICENESS)
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    stack = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
    folder, count, end_ids = orjson.loads(setup)
    text = read_model_file(Path(folder) / "tokenizer.json").decode()
    tokenizer = read_grammar_tokens(text, count, end_ids)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # a panic's message may have a client's text
    return handlers_of(tokenizer)


def handlers_of(tokenizer: LLTokenizer) -> Mapping[str, Handler]:
    return {"check": lambda content: orjson.dumps(made(WantedGrammar.of_json(content), tokenizer))}


@dataclass(frozen=True, slots=True)
class Checked:
    grammar: str  # llguidance's JSON text; "" if it is refused
    refusal: str = ""  # why it is refused
    left_out: tuple[str, ...] = ()  # names of the schema's keywords that the grammar does not follow
    followed: str = ""  # the text of what was asked without these


def made(wanted: WantedGrammar, tokenizer: LLTokenizer) -> MadeGrammar:
    """The grammar of one request."""
    left_out: list[tuple[str, str]] = []
    try:
        return MadeGrammar(_grammar(wanted, tokenizer, left_out), left_out=left_out)
    except RefusedGrammarError as refusal:
        return MadeGrammar("", str(refusal), refusal.field)
    except BaseException as panic:  # a panic of Rust code is not an Exception
        if isinstance(panic, Exception):
            raise
        return MadeGrammar("", "the grammar cannot be compiled: the compiler fails at it")


def _grammar(wanted: WantedGrammar, tokenizer: LLTokenizer, left_out: list[tuple[str, str]]) -> str:
    """Adds to `left_out`, as in MadeGrammar. Raises RefusedGrammarError."""
    if wanted.form is None:
        assert wanted.asked is not None
        return _checked(wanted.asked, left_out, tokenizer).grammar
    answer = None if wanted.asked is None else _checked(wanted.asked, left_out).grammar
    grammar = ChatGrammar(wanted.form, lambda asked: _checked(asked, left_out).followed).of(answer)
    compile_grammar(grammar, tokenizer)
    return grammar


def _checked(asked: AskedGrammar, left_out: list[tuple[str, str]], tokenizer: LLTokenizer | None = None) -> Checked:
    """The same for a part of it."""
    found = check(asked, tokenizer)
    if found.refusal:
        if asked.is_loose:  # any arguments are taken, or the request is refused
            left_out.append((asked.field, "parameters"))
        raise RefusedGrammarError(found.refusal, asked.field)
    left_out += ((asked.field, name) for name in found.left_out)
    return found


def check(asked: AskedGrammar, tokenizer: LLTokenizer | None = None) -> Checked:
    """What was asked, over the tokens of `tokenizer` or single bytes."""
    attempt = cache(partial(_attempt, tokenizer=tokenizer))
    if not asked.is_loose:
        return attempt(asked)
    try:
        loose, left_out = loosened(asked, lambda one: not attempt(one).refusal)
    except (RefusedGrammarError, orjson.JSONDecodeError):
        return attempt(asked)
    return replace(attempt(loose), left_out=left_out, followed=loose.text if left_out else asked.text)


def _attempt(asked: AskedGrammar, tokenizer: LLTokenizer | None) -> Checked:
    try:
        grammar = converted(asked)
        verify(grammar, tokenizer)
    except RefusedGrammarError as refusal:
        return Checked("", str(refusal))
    return Checked(grammar, followed=asked.text)
