"""How a request names a LoRA adapter on each route, what becomes of a name that the server has not, and where the
adapter is named."""

import json
import logging

import pytest

from text_generation_router.engine.protocol import Ended
from text_generation_router.scheduling.request import EndReason

from .conftest import ROUTES, Route

SQL, POEMS = "5" * 64, "6" * 64
ADAPTERS = {"sql": SQL, "poems": POEMS}


def naming(route: Route, name: str) -> dict[str, object]:
    field = {"model": name} if route.is_openais else {"parameters": {"adapter_id": name}}
    return {**route.body, **field}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_every_route_takes_an_adapter_and_its_prompts_share_no_cached_prefix_with_others(make_server, route):
    server = make_server(adapters=ADAPTERS)
    for name, digest in ADAPTERS.items():
        assert server.post(route.path, naming(route, name)).status == 200
        assert server.engine.asked[-1].request.adapter == digest
    assert server.post(route.path, route.body).status == 200
    requests = [asked.request for asked in server.engine.asked]
    assert requests[-1].adapter == "" and len({request.namespace for request in requests}) == 3


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_an_adapter_that_the_server_has_not_is_refused_and_not_answered_by_the_model(make_server, route):
    server = make_server(adapters=ADAPTERS)
    answer = server.post(route.path, naming(route, "sqll"))
    if route.is_openais:
        assert answer.status == 404 and "The model `sqll` does not exist here" in answer.body.decode()
    else:
        said = "Input validation error: `adapter_id` must be one of the server's adapters (poems, sql). Given: sqll"
        assert answer.told == {"error": said, "error_type": "validation"}
        assert answer.status == (200 if route.fails_as_event else 422)
    assert not server.engine.asked


@pytest.mark.parametrize("route", [route for route in ROUTES if route.is_openais], ids=lambda route: route.path)
def test_names_that_clients_give_to_whatever_is_served_mean_the_model(make_server, route):
    with_adapters, without = make_server(adapters=ADAPTERS), make_server()
    for name in ("tgi", "dummy", "", "local/model"):
        assert with_adapters.post(route.path, naming(route, name)).status == 200
    assert without.post(route.path, naming(route, "gpt-4o")).status == 200
    assert {asked.request.adapter for asked in (*with_adapters.engine.asked, *without.engine.asked)} == {""}


def test_without_adapters_every_adapter_id_is_unknown(server):
    answer = server.post("/generate", {"inputs": "Hi", "parameters": {"adapter_id": "x"}})
    assert answer.status == 422 and answer.told["error"].endswith("one of the server's adapters (none). Given: x")


@pytest.mark.parametrize("stream", [False, True])
def test_the_details_name_the_adapter_of_a_request_that_has_one(make_server, stream):
    server = make_server(adapters=ADAPTERS)

    def details(**parameters: object) -> dict[str, object]:
        body = {"inputs": "Hi", "stream": stream, "parameters": {"details": True, "best_of": None, **parameters}}
        answer = server.post("/generate", body).body.decode() if not stream else server.post("/", body).body.decode()
        told = json.loads(answer.rstrip().rpartition("data:")[2])
        return dict((told[0] if isinstance(told, list) else told)["details"])

    assert details(adapter_id="sql")["adapter_id"] == "sql" and "adapter_id" not in details()


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_the_line_of_a_requests_end_and_the_metrics_name_its_adapter(make_server, caplog, route):
    server = make_server(adapters=ADAPTERS)
    with caplog.at_level(logging.INFO):
        server.post(route.path, naming(route, "sql"))
        server.post(route.path, route.body)
        server.engine.script.ends_after = (1, Ended(EndReason.FAILED, cause="boom"))
        server.post(route.path, naming(route, "poems"))
    lines = [(record.getMessage(), record.fields) for record in caplog.records if hasattr(record, "fields")]
    told = [(message, fields.get("adapter")) for message, fields in lines if message in ("Success", "Failed")]
    assert told == [("Success", "sql"), ("Success", None), ("Failed", "poems")]
    page = server.get("/metrics").body.decode()
    assert 'tgi_adapter_texts{adapter="sql"} 1\n' in page and 'tgi_adapter_texts{adapter="poems"} 1\n' in page


def test_models_lists_the_adapters_after_the_served_model(make_server):
    server = make_server(adapters=ADAPTERS)
    models = server.get("/v1/models").json["data"]
    assert [(model["id"], model.get("parent")) for model in models] == [
        ("local/model", None), ("sql", "local/model"), ("poems", "local/model"),
    ]  # fmt: skip
    assert server.get("/v1/models/poems").json == models[2]
    assert server.get("/v1/models/other").status == 404
