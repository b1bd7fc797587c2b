"""Values go over the wire and come back equal; what no front or engine of ours would send is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_common.sampling import Sampling
from text_generation_proto import engine_pb2 as pb
from text_generation_router.engine.protocol import (
    Ended,
    FirstStep,
    JoiningRules,
    ModelInfo,
    Snapshot,
    TokenLimits,
    Tokens,
)
from text_generation_router.errors import Refusal, RefusedError
from text_generation_router.scheduling.prompt_logprobs import PromptLogprobs
from text_generation_router.scheduling.request import EndReason, GenerationRequest, Past, Share
from text_generation_router.wire.steps import (
    PIECE_BYTES,
    FrontTokens,
    TokenRun,
    check_positions,
    ended_of,
    ended_to_pb,
    logprobs_of,
    pieces_of,
    refused_of,
    refused_to_pb,
    runs_of,
)
from text_generation_router.wire.submits import Submitted, submit_of, submitted
from text_generation_router.wire.version import VERSION, WireError, check_version, facts_of, snapshot_of

VOCAB = 1000
tokens = st.integers(0, VOCAB - 1)
halves = st.sampled_from([0.25, 0.5, 1.0])  # numbers that float32 has exactly


@st.composite
def submits(draw) -> list[Submitted]:
    sampling = Sampling(
        do_sample=draw(st.booleans()),
        temperature=draw(halves),
        top_k=draw(st.integers(0, 100)),
        top_p=draw(halves),
        top_n_tokens=draw(st.integers(0, 5)),
        logit_bias=tuple(draw(st.lists(st.tuples(tokens, halves), max_size=3, unique_by=lambda pair: pair[0]))),
        allowed_token_ids=tuple(draw(st.lists(tokens, max_size=3))),
        bad_words_ids=tuple(map(tuple, draw(st.lists(st.lists(tokens, min_size=1, max_size=2), max_size=2)))),
        grammar=draw(st.sampled_from(["", "{}"])),
    )
    request = GenerationRequest(
        input_ids=tuple(draw(st.lists(tokens, min_size=1, max_size=9))),
        max_new_tokens=draw(st.integers(4, 50)),
        sampling=sampling,
        ignore_eos=draw(st.booleans()),
        share=Share(draw(st.text(max_size=3)), draw(st.text(max_size=3))),
        priority=draw(st.integers(-5, 5)),
        namespace=tuple(draw(st.lists(st.text(max_size=3), max_size=2))),
        timeout_s=draw(st.none() | st.integers(0, 9).map(float)),
        prompt_logprobs=draw(st.none() | st.integers(0, 5)),
        stop_token_ids=frozenset(draw(st.lists(tokens, max_size=3))),
        adapter=draw(st.sampled_from(["", "a" * 64])),
    )
    past = Past(
        age_s=draw(st.integers(0, 9).map(float)),
        has_run=draw(st.booleans()),
        suspicions=draw(st.integers(0, 2)),
        counts=draw(st.integers(0, 2)),
        served_elsewhere=draw(st.integers(0, 9).map(float)),
    )
    group = draw(st.sampled_from(["", "life/0"]))
    return [
        Submitted(
            index,
            replace(request, sampling=replace(sampling, seed=draw(st.integers(0, 2**64 - 1)))),
            replace(past, output_ids=tuple(draw(st.lists(tokens, max_size=3)))),
            draw(st.none() | st.integers(0, 512)),
            group,
        )
        for index in range(1, draw(st.integers(1, 3)) + 1)
    ]


@given(submits())
def test_a_submit_comes_back_equal(sequences) -> None:
    assert submitted(pb.Submit.FromString(submit_of(sequences).SerializeToString()), VOCAB) == sequences


def good_submit() -> pb.Submit:
    request = GenerationRequest((1, 2, 3), 4, Sampling(seed=7))
    return submit_of([Submitted(1, request, Past(), 512)])


BAD_SUBMITS = {
    "no sequences": lambda s: s.ClearField("sequences"),
    "a long name of a group": lambda s: setattr(s.losses, "group", "x" * 300),
    "no prompt": lambda s: setattr(s, "input_ids", b""),
    "half a token": lambda s: setattr(s, "input_ids", b"123"),
    "a token outside of the vocabulary": lambda s: setattr(s, "input_ids", np.int32([VOCAB]).tobytes()),
    "a negative token": lambda s: setattr(s, "input_ids", np.int32([-1]).tobytes()),
    "an output token outside": lambda s: setattr(s.sequences[0], "output_ids", np.int32([VOCAB]).tobytes()),
    "nothing left to do": lambda s: setattr(s.sequences[0], "output_ids", np.int32([1] * 4).tobytes()),
    "temperature NaN": lambda s: setattr(s.parameters, "temperature", float("nan")),
    "temperature 0": lambda s: setattr(s.parameters, "temperature", 0.0),
    "top_p 2": lambda s: setattr(s.parameters, "top_p", 2.0),
    "top tokens without end": lambda s: setattr(s, "top_n_tokens", 10**6),
    "a bias outside": lambda s: s.parameters.logit_bias.add(token=VOCAB, value=1.0),
    "service below nothing": lambda s: setattr(s, "served_elsewhere", -1.0),
    "more service than can be counted": lambda s: setattr(s, "served_elsewhere", 1e300),
    "service without a number": lambda s: setattr(s, "served_elsewhere", float("nan")),
    "endless service": lambda s: setattr(s, "served_elsewhere", float("inf")),
    "an endless bias": lambda s: s.parameters.logit_bias.add(token=1, value=float("inf")),
    "too many allowed tokens": lambda s: s.parameters.allowed_token_ids.extend([1] * 1025),
    "an empty bad word": lambda s: s.parameters.bad_words_ids.add(),
}


@pytest.mark.parametrize("name", BAD_SUBMITS)
def test_a_submit_that_no_front_would_send_is_refused(name) -> None:
    submit = good_submit()
    assert len(submitted(submit, VOCAB)) == 1
    BAD_SUBMITS[name](submit)
    with pytest.raises(WireError):
        submitted(submit, VOCAB)


def test_tokens_of_a_step_come_back_by_request() -> None:
    step = FrontTokens()
    step.add(5, 0, Tokens((11,), (-0.5,), (((11, -0.5), (12, -1.5)),), 0.1, FirstStep(0.25, 3)))
    step.add(9, 7, Tokens((21, 22), (-1.0, -2.0), ((), ((4, -0.25),)), 0.2, None))
    message = pb.Tokens.FromString(step.message.SerializeToString())
    assert list(runs_of(message)) == [
        TokenRun(5, 0, (11,), (-0.5,), (((11, -0.5), (12, -1.5)),)),
        TokenRun(9, 7, (21, 22), (-1.0, -2.0), ((), ((4, -0.25),))),
    ]
    (first,) = message.firsts
    assert (first.index, first.queue_s, first.inference_s, first.cached_tokens) == (5, 0.25, 0.1, 3)


def test_tokens_without_top_tokens_have_no_lists() -> None:
    step = FrontTokens()
    step.add(5, 0, Tokens((11,), (-0.5,), (), 0.1, None))
    assert not step.message.top_counts
    assert list(runs_of(step.message)) == [TokenRun(5, 0, (11,), (-0.5,), ())]


@pytest.mark.parametrize("name", ["positions", "ids", "logprobs", "top_counts", "top_ids", "top_logprobs"])
def test_arrays_that_do_not_fit_together_are_refused(name) -> None:
    step = FrontTokens()
    step.add(5, 0, Tokens((11,), (-0.5,), (((1, -1.0),),), 0.1, None))
    message = step.message
    setattr(message, name, getattr(message, name) + b"1234")
    with pytest.raises(WireError, match=name):
        runs_of(message)


def test_a_front_takes_each_token_once_and_notices_a_gap() -> None:
    run = TokenRun(1, 4, (7, 8, 9), (-1.0, -2.0, -3.0), ())
    assert check_positions(run, 4) is run
    assert check_positions(run, 6) == TokenRun(1, 6, (9,), (-3.0,), ())
    assert check_positions(run, 7) is None
    with pytest.raises(WireError, match="missing"):
        check_positions(run, 3)


@given(st.sampled_from(EndReason), st.none() | st.just(0.5), st.lists(st.tuples(halves, halves), max_size=2))
def test_an_end_comes_back_equal(reason, queue_s, replays) -> None:
    ended = Ended(reason, 1.5, "why", queue_s, tuple(replays), 2, 1)
    message = pb.Ended.FromString(ended_to_pb(3, ended).SerializeToString())
    assert (message.index, ended_of(message)) == (3, ended)


@given(st.sampled_from(Refusal))
def test_a_refusal_comes_back_equal(reason) -> None:
    read = refused_of(pb.Refused.FromString(refused_to_pb([1, 2], RefusedError(reason, 9)).SerializeToString()))
    assert (read.reason, read.retry_after_s) == (reason, 9)


@pytest.mark.parametrize("read", [lambda: ended_of(pb.Ended(reason=99)), lambda: refused_of(pb.Refused())])
def test_an_unknown_reason_is_refused(read) -> None:
    with pytest.raises(WireError):
        read()


@pytest.mark.parametrize("num_top", [0, 2, 1000])
def test_log_probabilities_of_a_prompt_come_back_in_pieces(num_top) -> None:
    count = 700
    known = PromptLogprobs(
        np.linspace(-5, 0, count, dtype=np.float32),
        np.arange(count * num_top, dtype=np.int32).reshape(count, num_top),
        np.full((count, num_top), -1.0, np.float32),
    )
    pieces = [pb.Prompt.FromString(piece.SerializeToString()) for piece in pieces_of(4, known)]
    assert all(piece.ByteSize() <= PIECE_BYTES + 100 for piece in pieces)
    assert [piece.start for piece in pieces] == np.cumsum([1] + [len(logprobs_of(p)) for p in pieces[:-1]]).tolist()
    read = PromptLogprobs.joined([logprobs_of(piece) for piece in pieces])
    for name in ("logprobs_P", "top_ids_PK", "top_logprobs_PK"):
        np.testing.assert_array_equal(getattr(read, name), getattr(known, name))


def test_facts_come_back_equal_and_an_empty_model_is_refused() -> None:
    model = ModelInfo("torch.float32", "cpu", VOCAB, 64, (1, 2), "cpu", 2, 5, grammar_refusal="no bytes")
    model = replace(model, adapters=frozenset({"a" * 64, "b" * 64}))
    for max_batch_size in (3, None):
        snapshot = Snapshot(model, TokenLimits(63, 64, 640), JoiningRules(0.3, 20, max_batch_size))
        assert snapshot_of(pb.Facts.FromString(facts_of(snapshot).SerializeToString())) == snapshot
    with pytest.raises(WireError):
        snapshot_of(pb.Facts())


def test_versions_next_to_each_other_understand_each_other() -> None:
    assert check_version(VERSION) == VERSION
    assert check_version(VERSION + 1) == VERSION
    assert check_version(VERSION - 1) == VERSION - 1
    with pytest.raises(WireError, match="upgrade"):
        check_version(0)
