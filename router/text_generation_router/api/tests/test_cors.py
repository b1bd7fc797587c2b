"""What a browser's page of another origin may ask and read."""

import json
from pathlib import Path

import pytest

from text_generation_router.api.tests.conftest import ROUTES
from text_generation_router.http.cors import NOT_EXPOSED

# What Chromium asks for OpenAI's and Anthropic's client libraries.
PREFLIGHTS = json.loads((Path(__file__).parent / "preflights.json").read_text())["preflights"]
ORIGIN = {"origin": "https://a.example"}


def preflight(server, path, headers):
    return server.get(path, "OPTIONS", ORIGIN | {"access-control-request-headers": headers})


@pytest.mark.parametrize("asked", PREFLIGHTS, ids=lambda asked: asked["path"])
@pytest.mark.parametrize("keys", [{}, {b"x" * 32: ""}], ids=["without keys", "with keys"])
def test_client_libraries_may_send_all_their_headers(make_server, asked, keys):
    answer = preflight(make_server(api_keys=keys), asked["path"], asked["headers"])
    assert answer.status == 200 and answer.headers["access-control-allow-origin"] == "*"
    allowed = answer.headers["access-control-allow-headers"].split(",")
    assert set(allowed) >= {*asked["headers"].split(","), "authorization"}
    assert asked["method"] in answer.headers["access-control-allow-methods"].split(",")


@pytest.mark.parametrize("names", ["x-stainless-anything, X-Of-A-Page", "a!#$%&'*+.^_`|~9"])
def test_any_header_name_may_be_sent(server, names):
    assert preflight(server, "/generate", names).headers["access-control-allow-headers"] == names


@pytest.mark.parametrize("names", ["", 'a"b', "x: y", "caf\xe9", "a\tb", "<b>"])
def test_only_a_list_of_names_is_repeated(server, names):
    allowed = preflight(server, "/generate", names).headers["access-control-allow-headers"]
    assert "authorization" in allowed.split(",") and (not names or names not in allowed)


@pytest.mark.parametrize("path", ["/nothing", "/admin/replicas", "/v1/nothing", "/generate/"])
@pytest.mark.parametrize("keys", [{}, {b"x" * 32: ""}], ids=["without keys", "with keys"])
def test_options_of_a_path_that_does_not_exist_are_404(make_server, path, keys):
    answer = preflight(make_server(api_keys=keys), path, "content-type")
    assert answer.status == 404 and "error" in answer.json
    assert make_server().get("/v1/models/any/name", "OPTIONS", ORIGIN).status == 200


@pytest.mark.parametrize("keys", [{}, {b"x" * 32: ""}], ids=["answered", "refused"])
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
@pytest.mark.parametrize("stream", [False, True])
def test_a_page_may_read_every_header_of_an_answer(make_server, route, keys, stream):
    headers = ORIGIN | {"content-type": "application/json"}
    body = route.body | {"a_new_field": 1, "stream": stream}
    answer = make_server(api_keys=keys).post(route.path, body, headers)
    exposed = answer.headers.pop("access-control-expose-headers").split(",")
    sent = {name for name in answer.headers if not name.startswith("access-control-")}
    assert "x-request-id" in exposed and set(exposed) == sent - {name.decode() for name in NOT_EXPOSED}
    assert ("request-id" in exposed) is (route.path == "/v1/messages")
    assert ("x-ignored-parameters" in exposed) is (not keys)
