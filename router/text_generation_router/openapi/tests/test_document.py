import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from text_generation_common.version import own_version
from text_generation_router import cli
from text_generation_router.engine.protocol import TokenLimits
from text_generation_router.offload.process import ChildProcess
from text_generation_router.openapi import routes
from text_generation_router.openapi.document import document_of
from text_generation_router.openapi.operation_json import Interface
from text_generation_router.openapi.operations import OPERATIONS, Operation, Tag
from text_generation_router.openapi.routes import DOCUMENT_PATHS

DOCUMENT = document_of(Interface(version="1.2.3"))
POSTS = [operation for operation in OPERATIONS if operation.method == "post"]


def operations_of(document: dict[str, Any]) -> dict[str, Any]:
    return {f"{method} {path}": one for path, methods in document["paths"].items() for method, one in methods.items()}


def test_the_document_has_exactly_the_routes_of_the_application(server):
    there = {
        f"{method.lower()} {route.path.replace(':path', '')}"
        for route in server.app.routes
        for method in route.methods - {"HEAD"}
        if not route.path.startswith(("/docs", "/ui/")) and route.path not in DOCUMENT_PATHS
    }
    assert set(operations_of(DOCUMENT)) == there
    assert server.get("/openapi.json").json == DOCUMENT


async def test_requests_that_come_while_the_document_is_made_wait_for_it(server, monkeypatch: pytest.MonkeyPatch):
    """One child process makes it, so that streams go on."""
    started: list[ChildProcess] = []

    async def start(*arguments: Any, **options: Any) -> ChildProcess:
        started.append(await ChildProcess.start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(routes, "ChildProcess", SimpleNamespace(start=start))
    document = routes.DocumentRoutes(server.services).document
    answers = [answer.body for answer in await asyncio.gather(*(document(None) for _ in range(5)))]
    assert len(started) == 1 and not started[0].is_usable
    assert set(answers) == {answers[0]} and json.loads(answers[0]) == DOCUMENT


def test_every_operation_is_described_and_names_its_statuses():
    tags = {tag.value[0] for tag in Tag}
    names = [one["operationId"] for one in operations_of(DOCUMENT).values()]
    assert len(set(names)) == len(names)
    for label, one in operations_of(DOCUMENT).items():
        assert one["description"] and set(one["tags"]) <= tags, label
        assert "default" not in one["responses"] and {"200", "500"} <= set(one["responses"]), label
        assert all(answer["description"] for answer in one["responses"].values())


def test_every_field_of_bodies_and_answers_is_described():
    bare = [
        f"{name}.{field}"
        for name, schema in DOCUMENT["components"]["schemas"].items()
        for field, value in schema.get("properties", {}).items()
        if not value.get("description")
    ]
    assert bare == []


@pytest.mark.parametrize("operation", POSTS, ids=lambda operation: operation.path)
def test_the_examples_of_a_route_run(server, operation: Operation):
    examples = operations_of(DOCUMENT)[f"post {operation.path}"]["requestBody"]["content"]["application/json"][
        "examples"
    ]
    assert examples
    server.engine.limits = TokenLimits(max_input_tokens=200, max_total_tokens=300, max_batch_total_tokens=300)
    for example in examples.values():
        answer = server.post(operation.path, example["value"])
        assert (answer.status, answer.headers.get("x-ignored-parameters")) == (200, None)


@pytest.mark.parametrize("closed", [False, True])
def test_the_document_says_which_routes_need_a_key(make_server, closed):
    server = make_server(api_keys={b"0" * 32: ""}, closed_routes=closed)
    document = document_of(Interface(version="1.2.3", has_keys=True, closed_routes=closed))
    assert document["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    for label, one in operations_of(document).items():
        method, path = label.split()
        status = server.get(path.replace("{name}", "m"), method.upper()).status
        assert (status == 401) == ("security" in one) == ("401" in one["responses"]), label


def test_without_keys_no_route_mentions_one():
    assert "securitySchemes" not in DOCUMENT["components"]
    assert all("401" not in one["responses"] for one in operations_of(DOCUMENT).values())


def test_errors_are_told_in_the_dialect_of_the_route():
    def schema(document: dict[str, Any], label: str, status: str) -> str:
        answer = operations_of(document)[label]["responses"][status]
        return answer["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]

    assert schema(DOCUMENT, "post /generate", "424") == "ErrorJson"
    assert schema(DOCUMENT, "post /v1/completions", "400") == "V1ErrorJson"
    assert not {"422", "424"} & set(operations_of(DOCUMENT)["post /v1/completions"]["responses"])
    tgis = document_of(Interface(version="1", tgi_dialect=True))
    assert schema(tgis, "post /v1/completions", "422") == "ErrorJson"


def test_refused_fields_and_fields_without_effect_are_listed():
    schema = DOCUMENT["components"]["schemas"]["ChatRequest"]
    assert schema["x-refused"]["modalities"] == {"why": "is not supported yet", "taken": [None, ["text"]]}
    assert "user" in schema["x-no-effect"] and not schema["x-refused"].keys() & schema["properties"].keys()


def test_a_command_prints_the_document(monkeypatch, capsys):
    result = CliRunner().invoke(cli.schema_app, [])
    assert result.exit_code == 0
    assert json.loads(result.output) == document_of(Interface(version=own_version()))
    monkeypatch.setattr("sys.argv", ["text-generation-router", "print-schema", "--help"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0 and "OpenAPI" in capsys.readouterr().out
