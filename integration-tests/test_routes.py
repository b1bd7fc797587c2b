"""The short form of `make test-routes`, and that it draws every field and finds each kind of difference."""

from dataclasses import replace

import pytest
from make_routes import compare
from route_answers import difference, events, joined, steady
from route_cases import RouteCase, all_fields, bodies, cases, drawn

CHAT = RouteCase("/v1/chat/completions", {}, (), True)
SEED = 1


def test_answers_are_equal_whole_streamed_alone_and_in_a_crowd_whose_shards_and_engine_are_killed() -> None:
    made = cases(SEED, 50)
    found = compare(made, SEED, num_kills=3, num_others=8)
    print(f"seed {SEED}: {found.num_refused} of {len(made)} refused, {found.preemptions} preemptions, {found.kills}")
    assert found.differences == []
    assert found.kills.total() == 3 and found.num_refused < len(made) / 4


def test_each_field_of_each_body_is_drawn_for_each_route() -> None:
    made = cases(SEED, 2000)
    assert all_fields() - drawn(made).keys() == set()
    # The two forms of the native route are one case.
    assert {case.path for case in made} == set(bodies()) - {"/generate_stream"}


def test_a_field_that_is_new_in_a_schema_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    import route_cases

    properties = route_cases.document()["components"]["schemas"]["CompletionRequest"]["properties"]
    monkeypatch.setitem(properties, "novel", {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "null"}]})
    found = [case.body["novel"] for case in cases(SEED, 400) if "novel" in case.body]
    assert found and all(3 <= value <= 9 for value in found)


def stream(*deltas: str, finish: str = "stop") -> str:
    chunks = [f'data: {{"choices":[{{"index":0,"delta":{{"content":"{delta}"}}}}]}}' for delta in deltas]
    return "\n\n".join([*chunks, f'data: {{"choices":[{{"index":0,"delta":{{}},"finish_reason":"{finish}"}}]}}'])


def test_a_stream_of_another_text_ending_or_usage_differs_and_one_cut_elsewhere_does_not() -> None:
    def told(text: str) -> object:
        return steady(joined([*events(text)]))

    whole = told(stream("a fox")) | {"usage": {"total_tokens": 2}}
    assert difference(CHAT, whole, told(stream("a", " fox")), True) == ""
    assert ".content" in difference(CHAT, whole, told(stream("a", "fox")), True)
    assert "finish_reason" in difference(CHAT, whole, told(stream("a fox", finish="length")), True)
    with_usage = told(stream("a fox") + '\n\ndata: {"choices":[],"usage":{"total_tokens":3}}')
    assert "total_tokens" in difference(CHAT, whole, with_usage, True)
    assert "refused" in difference(CHAT, whole, {"refused": "no"}, True)
    refused = {"refused": "`prompt_logprobs` must not be given if `stream` is true"}
    assert difference(replace(CHAT, body={"prompt_logprobs": 0}), whole, refused, True) == ""
    assert "refused" in difference(CHAT, whole, refused, True)
