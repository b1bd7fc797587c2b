"""Traces follow their distributions and files, and prompts share the prefixes that the trace names."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from text_generation_benchmark.simulation.trace import (
    NO_PREFIX,
    WORKLOADS,
    LogNormal,
    RequestMaker,
    Trace,
    TraceWorkload,
    Uniform,
    generate,
    read_csv,
    write_csv,
)

SHARED = TraceWorkload(Uniform(1, 9), Uniform(1, 20), 30, num_prefixes=3, prefix=Uniform(5, 8))


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    one, same, other = (generate(SHARED, 5, 20, seed) for seed in (1, 1, 2))
    assert (
        one.arrival_s.tolist() == same.arrival_s.tolist() and one.prompt_tokens.tolist() == same.prompt_tokens.tolist()
    )
    assert one.arrival_s.tolist() != other.arrival_s.tolist()


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_requests_arrive_at_the_rate_and_never_make_more_than_they_may(workload: TraceWorkload) -> None:
    trace = generate(workload, 50, 100, 0)
    assert len(trace) == pytest.approx(5000, rel=0.1) and trace.duration_s == pytest.approx(100, rel=0.02)
    assert (trace.output_tokens <= trace.max_new_tokens).all() and trace.prompt_tokens.min() > 0


def test_lengths_are_drawn_from_the_stated_distributions() -> None:
    random = np.random.default_rng(0)
    drawn = LogNormal(100, 0.5, 40, 300).draw(random, 10_000)
    assert np.median(drawn) == pytest.approx(100, rel=0.05) and drawn.min() == 40 and drawn.max() == 300
    assert set(Uniform(3, 5).draw(random, 100).tolist()) == {3, 4, 5}
    assert Uniform(7, 7).draw(random, 2).tolist() == [7, 7]


def test_prompts_begin_alike_exactly_as_far_as_their_prefix_goes() -> None:
    trace = generate(SHARED, 5, 10, 0)
    requests = RequestMaker(trace)
    ids = [requests.make(i).input_ids for i in range(len(trace))]
    assert [len(prompt) for prompt in ids] == trace.prompt_tokens.tolist()
    for i in range(len(trace)):
        for j in range(i):
            same = trace.prefix_id[i] == trace.prefix_id[j]
            assert common(ids[i], ids[j]) == (trace.prefix_tokens[i] if same else 0)


def test_prompts_without_a_prefix_share_nothing() -> None:
    trace = generate(replace(SHARED, num_prefixes=0), 5, 2, 0)
    requests = RequestMaker(trace)
    assert common(requests.make(0).input_ids, requests.make(1).input_ids) == 0


def test_engines_get_every_request_once() -> None:
    trace = generate(SHARED, 5, 10, 0)
    dealt = [trace.dealt(i, 3) for i in range(3)]
    assert sorted(np.concatenate([part.arrival_s for part in dealt]).tolist()) == trace.arrival_s.tolist()


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = generate(SHARED, 5, 10, 0)
    write_csv(trace, tmp_path / "t.csv")
    again = read_csv(tmp_path / "t.csv")
    assert again.arrival_s.tolist() == trace.arrival_s.tolist() and again.prefix_id.tolist() == trace.prefix_id.tolist()


def test_columns_with_default_values_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0.5,4,2\n0.75,3,1\n")
    trace = read_csv(path)
    assert trace.max_new_tokens.tolist() == [2, 1] and trace.prefix_id.tolist() == [NO_PREFIX] * 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("arrival_s,prompt_tokens\n0,1\n", "no column output_tokens"),
        ("arrival_s,prompt_tokens,output_tokens\n", "no requests"),
        ("arrival_s,prompt_tokens,output_tokens\n0,few,1\n", "column prompt_tokens"),
        ("arrival_s,prompt_tokens,output_tokens\nsoon,1,1\n", "column arrival_s"),
        ("arrival_s,prompt_tokens,output_tokens\n0,1\n", "column output_tokens"),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused_with_its_fault(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_csv(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("arrival_s", [1.0, 0.5], "request 2 .* before the request above"),
        ("output_tokens", [0, 1], "request 1 .* makes no token"),
        ("output_tokens", [9, 1], "more tokens than its max_new_tokens"),
        ("prefix_tokens", [5, 0], "no token of its own"),
        ("prefix_tokens", [2, 0], "without an id or a length"),
    ],
)
def test_impossible_requests_are_refused(column: str, value: list[float], reason: str) -> None:
    two = [np.array([0.0, 1.0])] + [
        np.array(values) for values in ([5, 5], [1, 1], [8, 8], [NO_PREFIX] * 2, [0, 0], [0, 0])
    ]
    with pytest.raises(ValueError, match=reason):
        replace(Trace(*two), **{column: np.array(value)})
