"""Compiled grammars: which are kept, which are refused, and the tokens that the matchers know."""

import os
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
from grammar_tools import END, byte_compiler, byte_level_tokenizer, lark_grammar, regex_grammar, tokens_of

from text_generation_server.errors import MatcherError
from text_generation_server.grammars import compiler as compiler_module
from text_generation_server.grammars.compiler import CompiledGrammars, GrammarCompiler, ModelTokens, OwnTime

TOKENIZER = byte_level_tokenizer()


def matched(future: "Future[Any]") -> Any:
    return future.result(20)


def test_a_matcher_has_read_the_output_and_leaves_the_kept_one_as_it_was() -> None:
    compiler, grammar = byte_compiler(), regex_grammar("abc")
    a, b, c = TOKENIZER.encode("abc").ids
    first, later = matched(compiler.start(grammar, [])), matched(compiler.start(grammar, [a, b]))
    assert later.consume_token(c) and later.is_stopped()
    assert not matched(compiler.start(grammar, [])).is_stopped()
    assert first.consume_tokens([a, b, c]) and first.is_stopped()


def test_an_output_that_the_grammar_does_not_allow_is_refused() -> None:
    with pytest.raises(MatcherError, match="does not allow its output so far"):
        matched(byte_compiler().start(regex_grammar("abc"), TOKENIZER.encode("abd").ids))


def test_a_grammar_is_compiled_once_while_it_is_kept() -> None:
    compiler, compiled = byte_compiler(), []
    compile_grammar = compiler._compile
    compiler._compile = lambda *a: compiled.append(a[1]) or compile_grammar(*a)  # type: ignore[method-assign]
    grammars = [regex_grammar("a" * i) for i in range(1, 4)]
    for grammar in [*grammars, *grammars]:
        matched(compiler.start(grammar, []))
    assert compiled == grammars


def test_the_grammars_that_were_used_last_are_kept_within_both_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_CACHED", 3)
    monkeypatch.setattr(compiler_module, "MAX_CACHED_CHARS", 10)
    kept: Any = CompiledGrammars()
    for grammar in "abc":
        kept.add(grammar, object())
    assert kept.find("a") is not None
    kept.add("d", object())
    assert [kept.find(grammar) is not None for grammar in "abcd"] == [True, False, True, True]
    kept.add("12345678", object())
    assert [kept.find(grammar) is not None for grammar in "acd"] == [False, True, True]
    kept.add("x" * 11, object())
    assert not kept._matchers and kept._chars == 0


def test_a_tokenizer_that_cannot_be_used_refuses_every_grammar_in_one_line() -> None:
    compiler = GrammarCompiler(ModelTokens('{"model": {"type": "none"}}', 320, (END,)))
    for _ in range(2):
        with pytest.raises(MatcherError, match=r"^grammars are not supported for this model's tokenizer.json: [^\n]+$"):
            matched(compiler.start(regex_grammar("abc"), []))


def test_an_error_does_not_contain_the_grammar() -> None:
    secret = lark_grammar('start: "my secret " unknown_rule')
    with pytest.raises(MatcherError) as caught:
        matched(byte_compiler().start(secret, []))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("vocab_size", [290, 320, 2048])
def test_ids_that_the_tokenizer_does_not_have_are_never_allowed(vocab_size: int) -> None:
    tokens = tokens_of(TOKENIZER, vocab_size)
    matcher = matched(GrammarCompiler(tokens).start(regex_grammar("(.|\n)*"), []))
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    allowed = [i for i in range(vocab_size) if bits >> i & 1]
    assert max(allowed) < TOKENIZER.get_vocab_size() and END in allowed and 0 not in allowed and 1 not in allowed
    assert bits >> vocab_size == 0


def test_a_grammar_that_was_compiled_early_has_a_matcher_at_once() -> None:
    compiler, grammar = byte_compiler(), regex_grammar("abc")
    may_go_on = threading.Event()
    compiler.prepare().result(20)
    compiler._thread.submit(may_go_on.wait, 20)  # the thread that steps wait for is busy
    matched(compiler.compile_early(grammar).work)
    started = compiler.start(grammar, [])
    assert started.done() and started.result().consume_tokens(TOKENIZER.encode("abc").ids)
    other = compiler.start(regex_grammar("abd"), [])
    assert not other.done()
    may_go_on.set()
    assert matched(other).consume_tokens(TOKENIZER.encode("abd").ids)


def test_an_early_grammar_that_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(MatcherError, match="cannot be compiled"):
        matched(byte_compiler().compile_early(lark_grammar("start: unknown_rule")).work)
    with pytest.raises(MatcherError, match="no tokenizer"):
        matched(GrammarCompiler(None).compile_early(regex_grammar("abc")).work)


def test_only_processor_time_counts_as_time_of_the_compiler() -> None:
    """A thread that waits, as the threads of a stopped process do, has none."""
    own, may_work, may_end = OwnTime(), threading.Event(), threading.Event()

    def work() -> None:
        own.begin()
        may_work.wait(60)
        while own.seconds < 0.2:
            pass
        may_end.wait(60)

    assert own.seconds == 0
    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.4)
    assert own.seconds < 0.2
    may_work.set()
    while own.seconds < 0.2:
        time.sleep(0.001)
    may_end.set()
    thread.join()


def test_the_thread_for_early_grammars_stands_back() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    compiler, usual = byte_compiler(), niceness()
    assert matched(compiler._early.submit(niceness)) == max(usual, compiler_module.NICENESS)
    assert matched(compiler._thread.submit(niceness)) == usual
