"""The program of a child process that makes and checks grammars. llguidance, which is native code, reads there what a
client has sent, and may end the process: only what the child has compiled reaches a shard.

A job is a WantedGrammar as JSON. An answer is a MadeGrammar as JSON.
"""

import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import orjson
from llguidance import LLTokenizer

from text_generation_common.grammars import COMPILER_STACK_BYTES, read_grammar_tokens
from text_generation_common.model_files import read_model_file
from text_generation_router.offload.child import Handler
from text_generation_router.text.grammars.asked import AskedGrammar, MadeGrammar, RefusedGrammarError
from text_generation_router.text.grammars.chat_forms import ChatGrammar
from text_generation_router.text.grammars.conversion import converted
from text_generation_router.text.grammars.forms import WantedGrammar
from text_generation_router.text.grammars.loosening import loosened
from text_generation_router.text.grammars.verification import compile_grammar, verify

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
