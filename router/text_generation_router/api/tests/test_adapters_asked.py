"""How a request names a LoRA adapter on each route, and what becomes of a name that the server has not."""

import pytest

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


def test_models_lists_the_adapters_after_the_served_model(make_server):
    server = make_server(adapters=ADAPTERS)
    models = server.get("/v1/models").json["data"]
    assert [(model["id"], model.get("parent")) for model in models] == [
        ("local/model", None), ("sql", "local/model"), ("poems", "local/model"),
    ]  # fmt: skip
    assert server.get("/v1/models/poems").json == models[2]
    assert server.get("/v1/models/other").status == 404
