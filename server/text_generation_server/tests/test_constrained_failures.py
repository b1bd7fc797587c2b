"""Grammars that fail, and steps that fail with them: one request fails by name, and nothing else changes."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from constrained_rows import DRAWN, FOLLOWS, GREEDY, SUM, Router, make_constrained, with_grammar
from grammar_tools import END, lark_grammar, regex_grammar
from shard_tools import BATCH, make_checkpoint, make_runner, random_ids

from text_generation_common.errors import LOST, NO_TOKEN, NOT_COMPILED
from text_generation_server.grammars import constraints as constraints_module
from text_generation_server.grammars.compiler import NO_TOKENIZER
from text_generation_server.runner import ModelRunner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def runner(model: Path) -> Iterator[ModelRunner]:
    runner = make_constrained(model)
    runner.warmup(512, None, 70, None)
    yield runner


def test_neighbours_do_not_change_by_a_bit_when_a_grammar_fails_in_the_middle(model: Path) -> None:
    """Each of the words needs states of its own, so that the limit is reached within the text."""
    runner = make_constrained(model, limits={"max_lexer_states": 40})
    runner.warmup(512, None, 16, None)
    words = "|".join(f"{a}{b}{a}{b}{c}" for a in "abcdefg" for b in "hijklmn" for c in "opq")
    asked = {i: replace(DRAWN, seed=i) for i in range(5)}
    alone = Router(runner).run(asked | {9: with_grammar(DRAWN, "regex")})
    beside = Router(runner)
    chunks = [beside.client.first_chunk(i, random_ids(9, i), parameters=s) for i, s in asked.items()]
    beside.step(
        [
            *chunks,
            beside.client.first_chunk(
                9, random_ids(9, 9), parameters=with_grammar(DRAWN, regex_grammar(f"(({words}) )+"))
            ),
        ]
    )
    for _ in range(len(alone.tokens(0)) - 1):
        beside.step()
    assert list(beside.failures) == [9] and beside.failures[9] == f"{LOST}: lexer error: too many states: 40 >= 40"
    for i in asked:
        assert (beside.tokens(i), beside.client.logprobs[i]) == (alone.tokens(i), alone.client.logprobs[i])


def test_parameters_that_leave_no_token_fail_by_name_alone(runner: ModelRunner) -> None:
    asked = {
        1: with_grammar(DRAWN, "regex", allowed_token_ids=(7, 8)),
        2: replace(
            DRAWN, grammar=regex_grammar("(ab)?"), min_new_tokens=3, end_token_ids=(END,), allowed_token_ids=(END,)
        ),
        3: with_grammar(DRAWN, "schema", bad_words_ids=tuple((i,) for i in range(300))),
        4: with_grammar(DRAWN, "lark"),
    }
    run = Router(runner).run(asked)
    assert run.failures == dict.fromkeys((1, 2, 3), NO_TOKEN) and run.complete == [4]
    assert FOLLOWS["lark"](run.text(4))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (regex_grammar("(ab"), NOT_COMPILED),
        (lark_grammar("start: nothing_there"), NOT_COMPILED),
        ("{", NOT_COMPILED),
    ],
)
def test_a_grammar_that_cannot_be_compiled_fails_by_name_alone(runner: ModelRunner, grammar: str, reason: str) -> None:
    run = Router(runner)
    run.step(
        [
            run.client.first_chunk(i, random_ids(9, i), parameters=replace(GREEDY, grammar=g))
            for i, g in ((1, grammar), (2, ""))
        ]
    )
    assert list(run.failures) == [1] and run.failures[1].startswith(reason) and "\n" not in run.failures[1]
    assert run.running == [2]


def test_a_shard_without_a_tokenizer_refuses_grammars_and_serves_the_rest(model: Path) -> None:
    runner = make_runner(model)
    runner.warmup(64, None, 4, None)
    run = Router(runner)
    run.step(
        [
            run.client.first_chunk(i, random_ids(9, i), parameters=replace(GREEDY, grammar=g))
            for i, g in ((1, SUM), (2, ""))
        ]
    )
    assert run.failures == {1: NO_TOKENIZER}


def test_a_grammar_that_is_not_compiled_in_time_fails_by_name(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only thread of the compiler is busy until the request has failed."""
    monkeypatch.setattr(constraints_module, "WAIT_S", 0.01)
    run, busy = Router(runner), threading.Event()
    compiler = runner._constraints._compiler
    compiler._thread.submit(busy.wait)
    try:
        new = with_grammar(GREEDY, regex_grammar("a new one"))
        run.step([run.client.first_chunk(1, random_ids(9), parameters=new)])
    finally:
        busy.set()
    assert "was not compiled within 1 s" in run.failures[1]


def test_requests_that_leave_take_their_matchers_along(runner: ModelRunner) -> None:
    run = Router(runner)
    run.step([run.client.first_chunk(i, random_ids(9, i), parameters=with_grammar(GREEDY, "lark")) for i in range(3)])
    assert runner._constraints.num_rows == 3
    runner.filter(BATCH, [0, 2])
    assert runner._constraints.num_rows == 2
    runner.clear(None)
    assert runner._constraints.num_rows == 0


def test_a_step_that_raises_before_its_tokens_are_known_leaves_nothing(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the kernel failed")

    own = with_grammar(DRAWN, "regex")
    whole = Router(runner).run({1: own})
    run = Router(runner)
    run.step([run.client.first_chunk(1, random_ids(9, 1), parameters=own)])
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the kernel failed"):
        patch.setattr(runner._sampler._kernels, "sample", fail)
        run.step()
    again = Router(runner).run({1: own})
    assert again.tokens(1) == whole.tokens(1) and again.complete == [1]
