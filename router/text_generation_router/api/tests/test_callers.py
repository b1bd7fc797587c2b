"""The caller that a request's headers and fields describe reaches the engine."""

import logging

import pytest

from text_generation_common.flags.kinds import CacheScope
from text_generation_router.http.keys import names_of_keys
from text_generation_router.scheduling.request import Share

KEY = "Secret-Key-1"


def test_the_share_reaches_the_engine_from_every_route(server, route):
    for headers, tenant in (({}, ""), ({"x-tenant": "team-a"}, "team-a")):
        server.ask(route, headers)
        assert server.engine.asked[-1].request.share == Share("peer 192.0.2.1", tenant)


def test_all_prompts_of_a_call_have_its_share(server):
    headers = {"content-type": "application/json", "x-tenant": "t"}
    server.post("/v1/completions", {"prompt": ["a", "b"]}, headers)
    assert [asked.request.share.tenant for asked in server.engine.asked] == ["t", "t"]


def placed(route, **fields):
    """The request's fields at the place in the body where the route reads them."""
    return fields if route.is_openais else {"parameters": fields}


@pytest.mark.parametrize("value", ["a" * 129, "a" * 10_000, "a b", "\xe9", "a\x7fb", "a\tb", "a\x00", "\xff" * 10_000])
def test_an_invalid_tenant_is_refused_on_every_route(server, route, value):
    answer = server.ask(route, {"x-tenant": value})
    status = 200 if route.fails_as_event else route.status(422)
    assert (answer.status, answer.told["error_type"]) == (status, "validation")
    assert not server.engine.asked and server.permits.left == 4 and server.failures("validation") == 1


def test_a_tenant_is_neither_logged_nor_counted_by_name(make_server, route, caplog):
    server = make_server(api_keys=names_of_keys([KEY], None))
    headers = {"authorization": f"Bearer {KEY}", "x-tenant": "canary-7f3a"}
    with caplog.at_level(logging.DEBUG):
        assert server.ask(route, headers).status == 200
        answer = server.ask(route, headers | {"x-tenant": "canary-7f3a " * 20})
    assert b"error" in answer.body and b"canary" not in answer.body
    assert "Success" in caplog.text and "canary" not in caplog.text and KEY not in caplog.text
    page = server.get("/metrics").body
    assert b"canary" not in page and KEY.encode() not in page


def test_a_priority_reaches_the_engine(server, route):
    for given, told in ((None, 0), (-(2**31), -(2**31)), (2**31 - 1, 2**31 - 1)):
        server.ask(route, **placed(route, priority=given))
        assert server.engine.asked[-1].request.priority == told
    server.ask(route)
    assert server.engine.asked[-1].request.priority == 0


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 1.0, "1", True, [], {}])
def test_a_priority_is_an_integer_of_32_bits(server, route, value):
    answer = server.ask(route, **placed(route, priority=value))
    assert (answer.status, answer.told["error_type"]) == (route.status(422), "unprocessable")
    field = "priority" if route.is_openais else "parameters.priority"
    assert f"type: {field}: " in answer.told["error"] and not server.engine.asked


def test_a_cache_salt_reaches_the_engine_and_is_bounded(server, route):
    for given, told in ((None, ""), ("mine", "mine")):
        server.ask(route, **placed(route, cache_salt=given))
        assert server.engine.asked[-1].request.namespace == ("", "", told)
    for given in ("x" * 129, 7):
        assert server.ask(route, **placed(route, cache_salt=given)).status == route.status(422)


def test_no_salt_and_no_tenant_make_the_name_of_another_cache(make_server, route):
    server = make_server(api_keys=names_of_keys(["one", "two"], None), prefix_cache_scope=CacheScope.TENANT)
    seen = set()
    wanted = [
        (key, tenant, salt) for key in ("one", "two") for tenant in ("", "a", "ab") for salt in ("", "b", "a", "ab")
    ]
    for key, tenant, salt in wanted:
        headers = {"authorization": f"Bearer {key}", "x-tenant": tenant}
        server.ask(route, headers, **placed(route, cache_salt=salt))
        seen.add(server.engine.asked[-1].request.namespace)
    assert len(seen) == len(wanted)
