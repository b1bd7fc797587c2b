"""Cases generated from the document, valid and invalid ones: every answer has a status, a content type and a body that
the document names. `make test-schema` sends 2,000 cases to each route."""

import asyncio
import json
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit

import jsonschema_rs
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from text_generation_common.tests.examples import examples
from text_generation_router.api.responses.tools import CallName
from text_generation_router.api.responses.writer import OutputItems
from text_generation_router.openapi.document import document_of
from text_generation_router.openapi.operation_json import Interface
from text_generation_router.text.tokens.pieces import CallArguments, CallStart

DOCUMENT = document_of(Interface(version="1.2.3"))
LABELS = [f"{method.upper()} {path}" for path, methods in DOCUMENT["paths"].items() for method in methods]
MANY = settings.get_profile("schema").max_examples
# Valid cases of each route, and as many invalid ones.
CASES = MANY if settings.default.max_examples == MANY else examples(4).max_examples


@cache
def document_schema() -> Any:
    return schemathesis.openapi.from_dict(DOCUMENT)


@cache
def validator_of(schema: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(json.loads(schema) | {"components": DOCUMENT["components"]})


def check_value(schema: Any, value: Any) -> None:
    validator_of(json.dumps(schema)).validate(value)


def check(operation: dict[str, Any], answer: Any, error_schema: Any, may_expire: bool) -> None:
    assert answer.status < 500 or (answer.status == 504 and may_expire)
    documented = operation["responses"][str(answer.status)]
    assert answer.headers["x-request-id"]
    assert {"retry-after", "www-authenticate"} & answer.headers.keys() <= {
        name.lower() for name in documented["headers"]
    }
    if not answer.body:
        assert "content" not in documented
        return
    kind = answer.headers["content-type"].partition(";")[0]
    schema = documented["content"][kind]["schema"]
    if kind == "application/json":
        check_value(schema, answer.json)
    if kind == "text/event-stream":
        for event in answer.events:
            if event != "[DONE]":
                check_value({"anyOf": [schema["x-event"], *error_schema]}, event)


def error_schemas(operation: dict[str, Any]) -> list[Any]:
    return [operation["responses"]["500"]["content"]["application/json"]["schema"]]


def requests_for(schema: Any, label: str, mode: GenerationMode) -> st.SearchStrategy[requests.PreparedRequest]:
    method, path = label.split()
    if path == "/vertex" and mode is GenerationMode.POSITIVE:
        return valid_instances(schema)

    def request_of(case: Any) -> requests.PreparedRequest:
        return requests.Request(**case.as_transport_kwargs(base_url="http://test")).prepare()

    return schema[path][method].as_strategy(mode).map(request_of)


def valid_instances(schema: Any) -> st.SearchStrategy[requests.PreparedRequest]:
    """Valid bodies of /vertex, made of valid bodies of two other routes. As one schema they would take a second each to
    generate."""
    paths = "/generate", "/v1/chat/completions"
    cases = st.one_of(*(schema[path]["POST"].as_strategy(GenerationMode.POSITIVE) for path in paths))

    def request_of(instances: list[Any]) -> requests.PreparedRequest:
        content = json.dumps({"instances": [case.body for case in instances]})
        return requests.Request(
            "POST", "http://test/vertex", data=content, headers={"content-type": "application/json"}
        ).prepare()

    return st.lists(cases, min_size=1, max_size=2).map(request_of)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("label", LABELS)
def test_every_answer_is_documented(session_server, label, mode):
    method, path = label.split()
    operation = DOCUMENT["paths"][path][method.lower()]
    if mode is GenerationMode.NEGATIVE and "requestBody" not in operation:
        return  # there is no invalid case
    cases = requests_for(document_schema(), label, mode)
    # A body on /invocations may be one of OpenAI's, whose stream has OpenAI's errors.
    told = error_schemas(operation) + (error_schemas(DOCUMENT["paths"]["/v1/completions"]["post"]))

    seen = set()

    num_cases = CASES if "requestBody" in operation else 2 * CASES

    @settings(
        max_examples=num_cases, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck]
    )
    @given(request=cases)
    def send(request: requests.PreparedRequest) -> None:
        body = request.body or b""
        content = body.encode() if isinstance(body, str) else body
        headers = {name.lower(): str(value) for name, value in request.headers.items()}
        place = unquote(urlsplit(str(request.url)).path)
        answer = asyncio.run(session_server.call(method, place, content, headers))
        session_server.engine.asked.clear()
        seen.add(answer.status)
        check(operation, answer, told, b"timeout" in content or "x-request-timeout" in headers)

    send()
    # With few cases, perhaps each one is refused by a limit of the server. No random name is that of the model.
    assert 200 in seen or CASES < MANY or mode is GenerationMode.NEGATIVE or "{name}" in path


@pytest.mark.parametrize("namespace", [None, "space"])
@pytest.mark.parametrize("is_custom", [False, True])
def test_the_document_has_every_item_and_event_of_calls(namespace: str | None, is_custom: bool):
    output = OutputItems("1", {"f": CallName("f", namespace, is_custom)})
    pieces = [CallStart(0, "f"), CallArguments(0, '{"input": '), CallArguments(0, '"text"}')]
    events = [event for piece in pieces for event in output.add(piece)] + list(output.end_all("completed"))
    streamed = DOCUMENT["paths"]["/v1/responses"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    assert len(events) >= 4  # the item begins, its text comes and is complete, the item is complete
    for number, event in enumerate(events):
        check_value(streamed["schema"]["x-event"], event | {"sequence_number": number})
