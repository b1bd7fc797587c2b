"""Who a request is counted to, and how urgent it is."""

import hashlib
import logging

import pytest
from starlette.requests import Request

from text_generation_router.api.caller import caller_of
from text_generation_router.api.keys import digests_of
from text_generation_router.errors import ValidationError

KEY = "Secret-Key-1"


def caller(*headers: tuple[str, str]):
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return caller_of(Request({"type": "http", "headers": raw}))


def test_the_tenant_reaches_the_engine_from_every_route(server, route):
    for headers, tenant in (({}, ""), ({"x-tenant": "team-a"}, "team-a")):
        server.ask(route, headers)
        assert server.engine.streams[-1].request.tenant == tenant


def test_all_prompts_of_a_call_have_its_tenant(server):
    headers = {"content-type": "application/json", "x-tenant": "t"}
    server.post("/v1/completions", {"prompt": ["a", "b"]}, headers)
    assert [stream.request.tenant for stream in server.engine.streams] == ["t", "t"]


def test_without_a_name_it_is_the_key_that_counts_and_never_shows():
    tenant = caller(("authorization", f"Bearer {KEY}")).tenant
    assert tenant == caller(("authorization", f"bearer   {KEY} ")).tenant != ""
    assert tenant != caller(("authorization", f"Bearer {KEY}2")).tenant
    assert KEY not in tenant and hashlib.sha256(KEY.encode()).hexdigest() not in tenant and len(tenant) < 32
    assert caller(("authorization", f"Bearer {KEY}"), ("x-tenant", "a")).tenant == "a"
    assert caller(("authorization", f"Bearer {KEY}"), ("x-tenant", "")).tenant == tenant


def test_nobody_can_name_itself_as_the_holder_of_a_key():
    tenant = caller(("authorization", f"Bearer {KEY}")).tenant
    with pytest.raises(ValidationError):
        caller(("x-tenant", tenant))


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Basic dTpw", KEY, "\xff\xfe"])
def test_what_is_no_key_is_nobody(value):
    assert caller(("authorization", value)).tenant == ""
    assert caller().tenant == ""


@pytest.mark.parametrize("value", ["a" * 129, "a" * 10_000, "a b", "\xe9", "a\x7fb", "a\tb", "a\x00", "\xff" * 10_000])
def test_a_tenant_that_is_none_is_refused_by_the_headers_name(server, route, value):
    with pytest.raises(ValidationError, match="`X-Tenant` must be at most 128 visible ASCII"):
        caller(("x-tenant", value))
    answer = server.ask(route, {"x-tenant": value})
    error = answer.events[0] if route.fails_as_event else answer.json
    assert (answer.status, error["error_type"]) == (200 if route.fails_as_event else 422, "validation")
    assert not server.engine.streams and server.permits.left == 4 and server.failures("validation") == 1


def test_a_tenant_may_have_128_characters():
    assert caller(("x-tenant", "~" * 128)).tenant == "~" * 128


@pytest.mark.parametrize("name", ["X-Tenant", "X-Request-Timeout"])
def test_of_two_headers_neither_is_believed(name):
    with pytest.raises(ValidationError, match=f"`{name}` must be given once"):
        caller((name.lower(), "1"), (name.lower(), "2"))


def test_a_tenant_is_neither_logged_nor_counted_by_name(make_server, route, caplog):
    server = make_server(api_key_digests=digests_of([KEY], None))
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
        server.ask(route, priority=given, parameters={"priority": given})
        assert server.engine.streams[-1].request.priority == told
    server.ask(route)
    assert server.engine.streams[-1].request.priority == 0


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 1.0, "1", True, [], {}])
def test_a_priority_is_an_integer_of_32_bits(server, route, value):
    answer = server.ask(route, priority=value, parameters={"priority": value})
    assert (answer.status, answer.json["error_type"]) == (422, "unprocessable")
    field = "priority" if route.is_openais else "parameters.priority"
    assert f"type: {field}: " in answer.json["error"] and not server.engine.streams


def test_a_cache_salt_reaches_the_engine_and_is_bounded(server, route):
    for given, told in ((None, ""), ("mine", "mine")):
        server.ask(route, cache_salt=given, parameters={"cache_salt": given})
        assert server.engine.streams[-1].request.namespace == told
    for given in ("x" * 129, 7):
        assert server.ask(route, cache_salt=given, parameters={"cache_salt": given}).status == 422
