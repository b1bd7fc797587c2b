import asyncio
import json
import logging

import pytest

from text_generation_router.api.tests.conftest import ROUTES
from text_generation_router.engine.protocol import Ended
from text_generation_router.http import request_log
from text_generation_router.scheduling.request import EndReason

CANARY = "canary-7f3a"


def ask_everything(server):
    message = {"role": "user", "content": CANARY}
    for stream in (False, True):
        for path in ("/", "/generate", "/v1/completions", "/v1/chat/completions", "/tokenize"):
            for inputs in (CANARY, CANARY * 99):
                server.post(path, {"inputs": inputs, "prompt": inputs, "messages": [message], "stream": stream})
    for rule in (CANARY, f"{CANARY}("):
        server.post("/generate", {"inputs": "Hi", "parameters": {"grammar": {"type": "regex", "value": rule}}})
        server.post("/v1/completions", {"prompt": "Hi", "guided_json": {"properties": {rule: {"pattern": rule}}}})
        server.post("/v1/completions", {"prompt": "Hi", "guided_grammar": rule})


def test_no_text_of_users_or_models_is_logged(server, caplog):
    server.engine.script.texts = (CANARY, CANARY)
    with caplog.at_level(logging.DEBUG):
        ask_everything(server)
        server.engine.script.ends_after = (1, Ended(EndReason.FAILED, cause="boom"))
        ask_everything(server)
    assert "Success" in caplog.text and CANARY not in caplog.text
    assert CANARY.encode() not in server.get("/metrics").body


def test_one_line_per_answered_request_has_its_numbers(server, caplog):
    with caplog.at_level(logging.INFO):
        server.post("/generate", {"inputs": "Hi"})
        server.post("/generate", {"inputs": ""})
    [record] = [record for record in caplog.records if record.getMessage().startswith("Success")]
    assert record.fields["prompt_tokens"] == 2 and record.fields["queue_time"] == "0.250000s"
    assert record.fields["generated_tokens"] == 2
    assert (record.fields["route"], record.fields["finish_reason"]) == ("/generate", "length")
    times = ("total_time", "validation_time", "queue_time", "inference_time", "time_per_token")
    assert [f"{record.fields[f'{name}_s']:.6f}s" for name in times] == [record.fields[name] for name in times]


def lines_of(caplog):
    """Message and fields of the lines about the ends of requests."""
    names = ("Answered", "Cancelled", "Failed", "Refused", "Refused more", "Success")
    return [(one.getMessage(), one.fields) for one in caplog.records if one.getMessage() in names]


@pytest.mark.parametrize(
    ("path", "body", "status", "error_type", "route"),
    [
        ("/generate", {"inputs": ""}, 422, "validation", "/generate"),
        ("/generate_stream", {"inputs": ""}, 422, "validation", "/generate_stream"),
        ("/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": "x"}}, 422, "unprocessable", "/generate"),
        ("/v1/completions", {"prompt": ""}, 400, "validation", "/v1/completions"),
        ("/v1/chat/completions", b"{", 400, "invalid_json", "/v1/chat/completions"),
        ("/v1/messages", {"messages": []}, 400, "unprocessable", "/v1/messages"),
        ("/tokenize", {}, 422, "unprocessable", "/tokenize"),
        (f"/{CANARY}", {"inputs": "Hi"}, 404, "not_found", ""),
        ("/info", {"inputs": "Hi"}, 405, "method_not_allowed", "/info"),
    ],
)
def test_a_refusal_is_one_line_with_its_kind_and_route(server, caplog, path, body, status, error_type, route):
    with caplog.at_level(logging.INFO):
        server.post(path, body)
    fields = {"status": status, "error_type": error_type, "method": "POST", "route": route}
    assert lines_of(caplog) == [("Refused", fields)]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_that_fails_is_one_line_with_the_tokens_made(server, caplog, route, stream):
    server.engine.script.ends_after = (1, Ended(EndReason.FAILED, cause="boom"))
    with caplog.at_level(logging.INFO):
        server.ask(route, stream=stream)
    [(name, fields)] = lines_of(caplog)
    status = 500 if route.path.startswith("/v1") else 424
    assert (name, fields["status"], fields["route"]) == ("Failed", status, route.path)
    assert (fields["error_type"], fields["generated_tokens"]) == ("generation", 1)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_one_line_with_the_tokens_made(server, caplog, route, stream):
    server.engine.script.hang_after = 1
    body = json.dumps(route.body | {"stream": stream}).encode()
    with caplog.at_level(logging.INFO):
        asyncio.run(server.call("POST", route.path, body, leave_when=server.hangs))
    [(name, fields)] = lines_of(caplog)
    assert (name, fields["status"], fields["route"]) == ("Cancelled", 499, route.path)
    assert fields["generated_tokens"] == 1


def test_answers_that_generate_nothing_are_a_line_each_and_probes_only_at_level_debug(server, caplog):
    with caplog.at_level(logging.INFO):
        server.post("/tokenize", {"inputs": "Hi"})
        for path in ("/info", "/health", "/metrics", "/v1/models/local/model"):
            server.get(path)
    routes = [(name, fields["route"]) for name, fields in lines_of(caplog)]
    assert routes == [("Answered", path) for path in ("/tokenize", "/info", "/v1/models/{name:path}")]
    with caplog.at_level(logging.DEBUG):
        server.get("/health")
    assert lines_of(caplog)[-1] == ("Answered", {"status": 200, "method": "GET", "route": "/health"})


def test_more_refusals_of_one_kind_from_one_address_than_five_in_a_second_are_counted_in_one_line(caplog, monkeypatch):
    monkeypatch.setattr(request_log, "PERIOD_S", 0.05)

    async def refuse() -> None:
        log = request_log.RefusalLog()
        for number in range(12):
            for address, error_type in (("a", "x"), ("b", "x"), ("a", "y")):
                if number < 12 if (address, error_type) == ("a", "x") else number < 5:
                    log.add(address, error_type, {"status": 400, "error_type": error_type})
        while "Refused more" not in caplog.text:
            await asyncio.sleep(0.01)
        log.add("a", "x", {"status": 400, "error_type": "x"})

    asyncio.run(asyncio.wait_for(refuse(), 60))
    names = [name for name, _ in lines_of(caplog)]
    assert names == ["Refused"] * 15 + ["Refused more", "Refused"]
    counted = {"status": 400, "error_type": "x", "address": "a", "requests": 7}
    assert lines_of(caplog)[15] == ("Refused more", counted)
