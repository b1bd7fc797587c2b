"""Compiles grammars in threads of its own, and keeps those that were used last.

llguidance (https://github.com/guidance-ai/llguidance) does the work. Its matcher reads the tokens of an output, and
gives the set of the tokens that may follow them.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from text_generation_common.errors import NOT_COMPILED
from text_generation_common.grammars import GRAMMAR_LIMITS, read_grammar_tokens
from text_generation_server.errors import MatcherError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED = 128
MAX_CACHED_CHARS = 2**20  # most characters of all grammars that are kept
# How far the thread stands back that compiles grammars of requests to come: 0 to 19.
NICENESS = 10
MAX_REASON = 200  # most characters of llguidance's own words in an error
NO_TOKENIZER = "grammars are not supported by this shard: it has no tokenizer for them"


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """The tokens of a model."""

    tokenizer_json: str
    count: int  # number of the model's logits or, if that is larger, of the tokenizer's tokens
    end_ids: tuple[int, ...]  # the ids that end a text


class OwnTime:
    """Processor time of what a thread does. While its process is stopped, or waits for a processor, none passes."""

    def __init__(self) -> None:
        self._clock: int | None = None  # None: the thread has not begun
        self._begun_s = 0.0

    def begin(self) -> None:
        """To be called by the thread, which must outlive this object."""
        clock = time.pthread_getcpuclockid(threading.get_ident())
        self._begun_s = time.clock_gettime(clock)
        self._clock = clock

    @property
    def seconds(self) -> float:
        """Seconds since `begin`; to be read before the thread has other work."""
        return 0.0 if self._clock is None else time.clock_gettime(self._clock) - self._begun_s


@dataclass(frozen=True, slots=True)
class EarlyGrammar:
    """The grammar of a request to come, which is being compiled."""

    work: "Future[LLMatcher]"  # MatcherError: the grammar cannot be used
    time: OwnTime


class GrammarCompiler:
    """May be called from any thread, once `prepare` has been called. It loads llguidance, and reads the tokenizer.

    Steps wait for `start`. So its thread has the usual priority, and `compile_early` another thread, of low priority.
    """

    def __init__(self, tokens: ModelTokens | None, limits: Mapping[str, Any] = GRAMMAR_LIMITS) -> None:
        """Without `tokens`, every grammar is refused."""
        self.num_tokens = tokens.count if tokens else 0  # number of tokens of a mask
        self._tokens = tokens
        self._limits = limits
        self._thread, self._early = _threads()
        self._tokenizer: Future[LLTokenizer] | None = None
        self._compiled = CompiledGrammars()

    def prepare(self) -> "Future[LLTokenizer]":
        """Begins to read the tokenizer, which takes a second for 200,000 tokens. MatcherError: it cannot be used."""
        if self._tokenizer is None:
            self._tokenizer = self._thread.submit(_read_tokenizer, self._tokens)
            self._tokens = None  # tokenizer.json may have many megabytes
        return self._tokenizer

    def end_threads(self) -> None:
        """Waits for the work that was begun. Other threads start when there is more."""
        self._thread.shutdown()
        self._early.shutdown()
        self._thread, self._early = _threads()

    def start(self, grammar: str, output: Sequence[int]) -> "Future[LLMatcher]":
        """Begins to make a matcher that has read the tokens of `output`. It is made at once if the grammar is compiled
        and there is no output. MatcherError: the grammar cannot be used."""
        if not output and (compiled := self._compiled.find(grammar)) is not None:
            made: Future[LLMatcher] = Future()
            made.set_result(compiled.deep_copy())
            return made
        return self._thread.submit(self._matcher, self.prepare(), grammar, output)

    def compile_early(self, grammar: str) -> EarlyGrammar:
        """Begins to compile the grammar of a request to come. MatcherError: the tokenizer cannot be used."""
        tokenizer, own = self.prepare(), OwnTime()

        def compiled() -> "LLMatcher":
            own.begin()
            return self._find_or_compile(tokenizer, grammar)

        return EarlyGrammar(self._early.submit(compiled), own)

    def _find_or_compile(self, tokenizer: "Future[LLTokenizer]", grammar: str) -> "LLMatcher":
        compiled = self._compiled.find(grammar)
        if compiled is None:
            compiled = self._compile(tokenizer.result(), grammar)
            self._compiled.add(grammar, compiled)
        return compiled

    def _matcher(self, tokenizer: "Future[LLTokenizer]", grammar: str, output: Sequence[int]) -> "LLMatcher":
        matcher = self._find_or_compile(tokenizer, grammar).deep_copy()
        if output and not matcher.consume_tokens(list(output)):
            raise MatcherError(f"its grammar does not allow its output so far: {reason_of(matcher)}")
        return matcher

    def _compile(self, tokenizer: "LLTokenizer", grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        # Verbose errors contain the grammar.
        limits = LLParserLimits(**self._limits, verbose_errors=False)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        # The first mask takes the most time of all, and its copies have it at once.
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise MatcherError(f"{NOT_COMPILED}: {reason_of(matcher)}")
        return matcher


@dataclass(slots=True)
class CompiledGrammars:
    """The grammars that were used last, by their texts. No matcher in it has read a token. For use in any thread."""

    _matchers: "OrderedDict[str, LLMatcher]" = field(default_factory=OrderedDict)
    _chars: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, grammar: str) -> "LLMatcher | None":
        with self._lock:
            found = self._matchers.get(grammar)
            if found is not None:
                self._matchers.move_to_end(grammar)
            return found

    def add(self, grammar: str, matcher: "LLMatcher") -> None:
        with self._lock:
            if grammar not in self._matchers:
                self._chars += len(grammar)
            self._matchers[grammar] = matcher
            while len(self._matchers) > MAX_CACHED or self._chars > MAX_CACHED_CHARS:
                oldest, _ = self._matchers.popitem(last=False)
                self._chars -= len(oldest)


def reason_of(matcher: "LLMatcher") -> str:
    """Why a matcher has failed, in llguidance's words."""
    return _first_line(matcher.get_error())


def _read_tokenizer(tokens: ModelTokens | None) -> "LLTokenizer":
    if tokens is None:
        raise MatcherError(NO_TOKENIZER)
    try:
        return read_grammar_tokens(tokens.tokenizer_json, tokens.count, tokens.end_ids)
    except BaseException as error:  # a panic of Rust code is not an Exception
        reason = _first_line(str(error))
        raise MatcherError(f"grammars are not supported for this model's tokenizer.json: {reason}") from None


def _threads() -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
    return ThreadPoolExecutor(1, "grammars"), ThreadPoolExecutor(1, "early-grammars", initializer=_stand_back)


def _stand_back() -> None:
    """Lowers the priority of the thread that calls it."""
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < NICENESS:  # only root may lower it
        os.setpriority(os.PRIO_PROCESS, thread, NICENESS)


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0][:MAX_REASON]
