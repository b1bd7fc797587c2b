"""Compiles grammars in a thread of its own, and keeps those that were used last.

llguidance (https://github.com/guidance-ai/llguidance) does the work. Its matcher reads the tokens of an output, and
gives the set of the tokens that may follow them.
"""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from text_generation_server.errors import MatcherError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED = 128
MAX_CACHED_CHARS = 2**20  # most characters of all grammars that are kept
# Most states of the automaton that reads a grammar's terminals. One state takes 1 to 2 kB.
MAX_LEXER_STATES = 20_000
MAX_REASON = 200  # most characters of llguidance's own words in an error
NO_TOKENIZER = "grammars are not supported by this shard: it has no tokenizer"


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """The tokens of a model."""

    tokenizer_json: str
    count: int  # number of the model's logits or, if that is larger, of the tokenizer's tokens
    end_ids: tuple[int, ...]  # the ids that end a text


class GrammarCompiler:
    """May be called from any thread. llguidance is loaded, and the tokenizer read, when `prepare` or `start` is called
    first."""

    def __init__(self, tokens: ModelTokens | None, max_lexer_states: int = MAX_LEXER_STATES) -> None:
        """Without `tokens`, every grammar is refused."""
        self.num_tokens = tokens.count if tokens else 0  # number of tokens of a mask
        self._tokens = tokens
        self._max_lexer_states = max_lexer_states
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._tokenizer: Future[LLTokenizer] | None = None
        self._compiled = CompiledGrammars()

    def prepare(self) -> "Future[LLTokenizer]":
        """Begins to read the tokenizer, which takes a second for 200,000 tokens. MatcherError: it cannot be used."""
        if self._tokenizer is None:
            self._tokenizer = self._thread.submit(_read_tokenizer, self._tokens)
            self._tokens = None  # tokenizer.json may have many megabytes
        return self._tokenizer

    def start(self, grammar: str, output: Sequence[int]) -> "Future[LLMatcher]":
        """Begins to make a matcher that has read the tokens of `output`. MatcherError: the grammar cannot be used."""
        return self._thread.submit(self._matcher, self.prepare(), grammar, output)

    def _matcher(self, tokenizer: "Future[LLTokenizer]", grammar: str, output: Sequence[int]) -> "LLMatcher":
        compiled = self._compiled.find(grammar)
        if compiled is None:
            compiled = self._compile(tokenizer.result(), grammar)
            self._compiled.add(grammar, compiled)
        matcher = compiled.deep_copy()
        if output and not matcher.consume_tokens(list(output)):
            raise MatcherError(f"its grammar does not allow its output so far: {reason_of(matcher)}")
        return matcher

    def _compile(self, tokenizer: "LLTokenizer", grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        # Verbose errors contain the grammar.
        limits = LLParserLimits(max_lexer_states=self._max_lexer_states, verbose_errors=False)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise MatcherError(f"its grammar cannot be compiled: {reason_of(matcher)}")
        return matcher


@dataclass(slots=True)
class CompiledGrammars:
    """The grammars that were used last, by their texts. No matcher in it has read a token."""

    _matchers: "OrderedDict[str, LLMatcher]" = field(default_factory=OrderedDict)
    _chars: int = 0

    def find(self, grammar: str) -> "LLMatcher | None":
        found = self._matchers.get(grammar)
        if found is not None:
            self._matchers.move_to_end(grammar)
        return found

    def add(self, grammar: str, matcher: "LLMatcher") -> None:
        self._matchers[grammar] = matcher
        self._chars += len(grammar)
        while len(self._matchers) > MAX_CACHED or self._chars > MAX_CACHED_CHARS:
            oldest, _ = self._matchers.popitem(last=False)
            self._chars -= len(oldest)


def reason_of(matcher: "LLMatcher") -> str:
    """Why a matcher has failed, in llguidance's words."""
    return _first_line(matcher.get_error())


def _read_tokenizer(tokens: ModelTokens | None) -> "LLTokenizer":
    if tokens is None:
        raise MatcherError(NO_TOKENIZER)
    from llguidance import LLTokenizer

    try:
        ends = list(tokens.end_ids) or None
        # llguidance takes a text that does not begin with a brace for the path of a file.
        return LLTokenizer("{" + tokens.tokenizer_json.lstrip()[1:], n_vocab=tokens.count, eos_token=ends)
    except BaseException as error:  # a panic of Rust code is not an Exception
        reason = _first_line(str(error))
        raise MatcherError(f"grammars are not supported for this model's tokenizer.json: {reason}") from None


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0][:MAX_REASON]
