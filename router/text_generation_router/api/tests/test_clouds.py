"""The routes in the forms of cloud platforms."""

import pytest

from text_generation_router.api.common.body import LARGE_BYTES
from text_generation_router.engine.protocol import Ended
from text_generation_router.scheduling.request import EndReason

USER = [{"role": "user", "content": "Hi"}]
BODIES = {"/": {"inputs": "Hi"}, "/v1/chat/completions": {"messages": USER}, "/v1/completions": {"prompt": "Hi"}}
# Makes a body so large that a child process reads it.
SIZES = [{}, {"padding": "x" * LARGE_BYTES}]


def timeless(answer):
    """An answer without the second at which it was made."""
    return {name: value for name, value in answer.items() if name != "created"} if isinstance(answer, dict) else answer


@pytest.mark.parametrize("more", SIZES, ids=["small", "large"])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_invocation_is_answered_as_by_the_route_of_its_body(make_server, path, stream, more):
    server = make_server(payload_limit=200_000)
    body = BODIES[path] | {"stream": stream} | more
    headers = {"content-type": "application/json", "x-request-id": "mine"}
    wanted, given = (server.post(one, body, headers) for one in (path, "/invocations"))
    assert (given.status, given.headers.keys()) == (200, wanted.headers.keys())
    given_events, wanted_events = (one.events if stream else [one.json] for one in (given, wanted))
    assert [timeless(event) for event in given_events] == [timeless(event) for event in wanted_events]
    assert len({asked.request.input_ids for asked in server.engine.asked}) == 1


def test_an_invocation_of_no_known_form_is_refused(server):
    for body in ({}, {"input": "Hi"}):
        answer = server.post("/invocations", body)
        assert (answer.status, answer.json["error_type"]) == (422, "unprocessable") and "`inputs`" in answer.json[
            "error"
        ]
    answer = server.post("/invocations", {"inputs": "Hi", "parameters": {"grammar": {}}})
    assert (answer.status, answer.json["error_type"]) == (422, "validation")


@pytest.mark.parametrize("more", SIZES, ids=["small", "large"])
def test_vertex_answers_all_instances_in_order(make_server, more):
    server = make_server(payload_limit=200_000)
    script = type(server.engine.script)
    server.engine.scripts = [script(texts=(text,), logprobs=(0.0,)) for text in ("a", "b", "c")]
    instances = [
        {"inputs": "Hi", "parameters": {"max_new_tokens": 3, "seed": 5}} | more,
        {"messages": USER, "temperature": 0},
        {"inputs": "Ho", "parameters": {"return_full_text": True}},
    ]
    answer = server.post("/vertex", {"instances": instances})
    assert (answer.status, answer.json) == (200, {"predictions": ["a", "b", "Hoc"]})
    requests = [asked.request for asked in server.engine.asked]
    assert [request.sampling.do_sample for request in requests] == [True, False, True]
    assert (requests[0].max_new_tokens, requests[0].sampling.seed) == (3, 5)
    assert server.metric("tgi_request_count_total") == 4 and server.permits.left == 4


@pytest.mark.parametrize(
    ("instances", "name"),
    [
        ([], "instances"),
        (None, "instances"),
        ([5], "instances[0]"),
        ([{"inputs": "a"}, {"prompt": "a"}], "instances[1]"),
        ([{"inputs": "a"}] * 4, "batch size"),
        ([{"inputs": "a", "parameters": {"best_of": 2, "do_sample": True}}], "`best_of`"),
        ([{"messages": USER, "n": 2}], "`n`"),
        ([{"messages": USER, "stream": True}], "`stream`"),
        ([{"inputs": "a", "parameters": {"temperature": -1.0}}], "`temperature`"),
    ],
)
def test_vertex_refuses_by_name(server, instances, name):
    answer = server.post("/vertex", {"instances": instances})
    assert answer.status == 422 and name in answer.json["error"]
    assert not server.engine.asked and server.permits.left == 4


def test_a_failed_instance_fails_the_request(server):
    server.engine.script.ends_after = (1, Ended(EndReason.FAILED, cause="boom"))
    answer = server.post("/vertex", {"instances": [{"inputs": "a"}, {"inputs": "b"}]})
    assert (answer.status, answer.json["error_type"], server.permits.left) == (424, "generation", 4)
