"""Requests with a grammar on one shard: their texts are what the grammars say, in every company and schedule."""

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from constrained_rows import (
    DRAWN,
    FOLLOWS,
    GRAMMARS,
    GREEDY,
    MAX_FREE,
    SUM,
    Router,
    Schedule,
    make_constrained,
    with_grammar,
)
from grammar_tools import END, byte_compiler, lark_grammar, regex_grammar
from shard_tools import BATCH, CPU, generate, make_runner, random_ids

from text_generation_common.errors import LOST, NO_TOKEN, NOT_COMPILED
from text_generation_common.sampling import Sampling
from text_generation_server.grammars import constraints as constraints_module
from text_generation_server.grammars.compiler import NO_TOKENIZER
from text_generation_server.grammars.constraints import Constraints
from text_generation_server.runner import ModelRunner
from text_generation_server.step.results import Pending, StepOutput
from text_generation_server.step.rows import PromptChunk, StepBatch


@pytest.fixture(scope="module")
def runner(model: Path) -> Iterator[ModelRunner]:
    runner = make_constrained(model)
    runner.warmup(512, None, 70, None)
    yield runner


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, replace(DRAWN, top_p=0.9, typical_p=0.95, top_k=20)])
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_text_is_what_its_grammar_says_and_ends_with_it(runner: ModelRunner, name: str, sampling: Sampling) -> None:
    run = Router(runner).run({i: with_grammar(sampling, name, seed=i) for i in range(1, 5)})
    assert sorted(run.complete) == [1, 2, 3, 4] and not run.failures and not run.running
    for i in range(1, 5):
        assert FOLLOWS[name](run.text(i)), run.text(i)


def test_an_end_token_ends_a_text_that_could_go_on(runner: ModelRunner) -> None:
    asked = {i: replace(DRAWN, seed=i, grammar=regex_grammar("(ab)*"), logit_bias=((END, 1.0),)) for i in range(16)}
    run = Router(runner).run(asked)
    assert sorted(run.complete) == list(range(16))
    assert all(run.tokens(i)[-1] == END and END not in run.tokens(i)[:-1] for i in asked)
    assert all(re.fullmatch("(ab)*", run.text(i)) for i in asked) and len({len(run.tokens(i)) for i in asked}) > 2


def test_end_tokens_stay_banned_for_the_least_number_of_tokens(runner: ModelRunner) -> None:
    asked = replace(DRAWN, grammar=regex_grammar("(ab)*"), logit_bias=((END, 30.0),))
    assert Router(runner).run({1: asked}).tokens(1) == [END]
    banned = replace(asked, min_new_tokens=5, end_token_ids=(END,))
    tokens = Router(runner).run({1: banned}).tokens(1)
    assert len(tokens) >= 6 and tokens[-1] == END


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_a_text_is_the_same_alone_in_a_crowd_and_in_chunks_to_the_bit(runner: ModelRunner, sampling: Sampling) -> None:
    asked = {i: with_grammar(sampling, name, seed=i) for i, name in enumerate(GRAMMARS)}
    alone = {i: Router(runner).run({i: s}) for i, s in asked.items()}
    crowd = Router(runner).run(asked | {i: replace(sampling, seed=i, top_n_tokens=i % 3) for i in range(10, 20)})
    chunked = Router(runner)
    for i, own in asked.items():
        first = chunked.client.first_chunk(i, random_ids(9, i), end=4, parameters=own)
        chunked.step([first])
        chunked.step([PromptChunk(i, 4, 9, True)])
    while chunked.running:
        chunked.step()
    for i in asked:
        for other in (crowd, chunked):
            assert other.tokens(i) == alone[i].tokens(i)
            assert other.client.logprobs[i] == alone[i].client.logprobs[i]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_resumed_text_goes_on_as_it_would_have(runner: ModelRunner, name: str, sampling: Sampling) -> None:
    """After 1, 4, 7 … tokens, on rows that are new to the shard."""
    own, prompt = with_grammar(sampling, name), random_ids(9, 1)
    whole = Router(runner).run({1: own}).tokens(1)
    for made in range(1, len(whole), 3):
        again = Router(runner)
        history = torch.cat([prompt, torch.tensor(whole[:made])])
        again.step([again.client.first_chunk(1, history, prompt_length=9, parameters=own)])
        while again.running:
            again.step()
        assert whole[:made] + again.tokens(1) == whole


def test_a_prompt_whose_beginning_is_cached_gets_the_same_text(runner: ModelRunner) -> None:
    own = with_grammar(DRAWN, "schema")
    whole = Router(runner).run({1: own}).tokens(1)
    run = Router(runner)
    owner = run.client.first_chunk(7, random_ids(9, 1), parameters=GREEDY)
    run.step([owner])
    chunk = run.client.first_chunk(1, random_ids(9, 1), start=5, parameters=own)
    assert owner.slots is not None and chunk.slots is not None
    run.step([replace(chunk, slots=torch.cat([owner.slots[:5], chunk.slots[5:]]))])
    while 1 in run.running:
        run.step()
    assert run.tokens(1) == whole


def test_a_step_without_a_grammar_asks_for_no_masks(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while no request has a grammar, nor in the steps between the chunks of the prompt of one that has."""
    run, sampled = Router(runner), []
    sample = runner._sampler._kernels.sample
    monkeypatch.setattr(runner._constraints, "begin", lambda *_: pytest.fail("masks were asked for"))
    monkeypatch.setattr(
        runner._sampler._kernels,
        "sample",
        lambda logits, choices: sampled.append(choices.masks) or sample(logits, choices),
    )
    run.step([run.client.first_chunk(i, random_ids(9, i), parameters=DRAWN) for i in range(3)])
    run.step([run.client.first_chunk(5, random_ids(9), end=4, parameters=with_grammar(DRAWN, "lark"))])
    run.step([PromptChunk(5, 4, 7, False)])
    assert sampled == [None] * 3


def test_steps_that_are_read_late_follow_their_grammars(runner: ModelRunner) -> None:
    """Two steps are launched before the first is read, as on a GPU; a row is dropped between them, and one joins."""
    asked = {1: with_grammar(DRAWN, "schema"), 2: with_grammar(DRAWN, "lark"), 3: with_grammar(GREEDY, "schema")}
    alone = {i: Router(runner).run({i: s}).tokens(i) for i, s in asked.items()}
    run = Router(runner)
    client = run.client

    def launch(ids: list[int], *chunks: PromptChunk) -> Pending[StepOutput]:
        return runner.step([StepBatch(BATCH, ids)] if ids else [], client.take(len(ids)), BATCH, list(chunks))

    def chunk(i: int) -> PromptChunk:
        return client.first_chunk(i, random_ids(9, i), parameters=asked[i])

    steps = [launch([], chunk(1), chunk(2)), launch([2, 1]), launch([1, 2], chunk(3))]
    runner.filter(BATCH, [1, 3])
    steps += [launch([1, 3]) for _ in range(max(map(len, alone.values())))]
    found: dict[int, list[int]] = {1: [], 2: [], 3: []}
    complete: dict[int, int] = {}
    for step in reversed(steps):
        step.wait()
    for output in map(Pending.wait, steps):
        for request_id, token in zip(output.request_ids, output.token_ids.tolist(), strict=True):
            if request_id not in complete:
                found[request_id].append(token)
        assert not output.failures
        complete |= dict.fromkeys(output.complete_ids, 1)
    assert found[1] == alone[1] and found[3] == alone[3] and found[2] == alone[2][:3]
    assert sorted(complete) == [1, 3]


def test_64_rows_follow_their_grammars_and_threads_do_not_change_them(model: Path, runner: ModelRunner) -> None:
    asked = {i: with_grammar(DRAWN, list(GRAMMARS)[i % 3], seed=i) for i in range(64)}
    run = Router(runner).run(asked)
    assert sorted(run.complete) == list(range(64))
    for i in asked:
        assert FOLLOWS[list(GRAMMARS)[i % 3]](run.text(i))
    threaded = make_runner(model, constraints=Constraints(byte_compiler(), CPU, threads=2))
    threaded.warmup(512, None, 70, None)
    again = Router(threaded).run(asked)
    assert again.client.tokens == run.client.tokens and again.client.logprobs == run.client.logprobs


def test_no_schedule_of_two_steps_in_flight_changes_a_text(runner: ModelRunner) -> None:
    names = list(GRAMMARS)
    asked = {i: with_grammar(DRAWN if i % 2 else GREEDY, names[i % 3], seed=i) for i in range(6)}
    alone = {i: Router(runner).run({i: own}).tokens(i) for i, own in asked.items()}
    free = {i: replace(DRAWN, seed=i) for i in (6, 7)}
    for i, own in free.items():
        alone[i] = generate(runner, random_ids(9, i), MAX_FREE, own).tokens[7]
    for seed in range(12):
        assert Schedule(runner, asked | free, seed).run() == alone, f"schedule {seed}"


# Grammars that fail, and steps that fail with them: one request fails by name, and nothing else changes.
def test_neighbours_do_not_change_by_a_bit_when_a_grammar_fails_in_the_middle(model: Path) -> None:
    """Each of the words needs states of its own, so that the limit is reached within the text."""
    runner = make_constrained(model, limits={"max_lexer_states": 40})
    runner.warmup(512, None, 16, None)
    words = "|".join(f"{a}{b}{a}{b}{c}" for a in "abcdefg" for b in "hijklmn" for c in "opq")
    asked = {i: replace(DRAWN, seed=i) for i in range(5)}
    alone = Router(runner).run(asked | {9: with_grammar(DRAWN, "regex")})
    beside = Router(runner)
    beside.join(asked | {9: with_grammar(DRAWN, regex_grammar(f"(({words}) )+"))})
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
    [(regex_grammar("(ab"), NOT_COMPILED), (lark_grammar("start: nothing_there"), NOT_COMPILED), ("{", NOT_COMPILED)],
)
def test_a_grammar_that_cannot_be_compiled_fails_by_name_alone(runner: ModelRunner, grammar: str, reason: str) -> None:
    run = Router(runner)
    run.join({1: replace(GREEDY, grammar=grammar), 2: GREEDY})
    assert list(run.failures) == [1] and run.failures[1].startswith(reason) and "\n" not in run.failures[1]
    assert run.running == [2]


def test_a_shard_without_a_tokenizer_refuses_grammars_and_serves_the_rest(model: Path) -> None:
    runner = make_runner(model)
    runner.warmup(64, None, 4, None)
    run = Router(runner)
    run.join({1: replace(GREEDY, grammar=SUM), 2: GREEDY})
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
    run.join({i: with_grammar(GREEDY, "lark") for i in range(3)})
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
    run.join({1: own})
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the kernel failed"):
        patch.setattr(runner._sampler._kernels, "sample", fail)
        run.step()
    again = Router(runner).run({1: own})
    assert again.tokens(1) == whole.tokens(1) and again.complete == [1]
