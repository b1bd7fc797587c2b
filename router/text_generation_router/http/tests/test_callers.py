"""The caller of a request: its address, its owner and tenant, its cache domain."""

import hashlib

import pytest
from starlette.requests import Request

from text_generation_common.flags.kinds import CacheScope
from text_generation_router.errors import StartError, ValidationError
from text_generation_router.http.caller import Callers
from text_generation_router.http.peer import networks_of, peer_of
from text_generation_router.scheduling.request import Share

KEY = "Secret-Key-1"
PROXIES = networks_of(["10.0.0.0/8", "fd00::7"])


def request(*headers: tuple[str, str], client: str | None = "192.0.2.1") -> Request:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    address = None if client is None else (client, 4711)
    return Request({"type": "http", "path": "/generate", "headers": raw, "client": address})


def caller(*headers: tuple[str, str], has_keys: bool = True, scope: CacheScope = CacheScope.KEY):
    return Callers(has_keys, (), scope).caller_of(request(*headers))


def peer(client: str | None, *headers: tuple[str, str], trusted=PROXIES) -> str:
    return peer_of(request(*headers, client=client), trusted)


def test_the_key_owns_the_share_and_never_shows():
    share = caller(("authorization", f"Bearer {KEY}")).share
    assert share == caller(("authorization", f"bearer   {KEY} ")).share
    assert share.owner != caller(("authorization", f"Bearer {KEY}2")).share.owner
    assert KEY not in share.owner and hashlib.sha256(KEY.encode()).hexdigest() not in share.owner
    assert len(share.owner) < 32 and share.tenant == ""


def test_a_tenant_divides_its_keys_share_and_no_other():
    one, other = (("authorization", f"Bearer {KEY}{i}") for i in (1, 2))
    assert caller(one, ("x-tenant", "a")).share == Share(caller(one).share.owner, "a")
    assert caller(one, ("x-tenant", "a")).share != caller(other, ("x-tenant", "a")).share
    assert caller(one, ("x-tenant", "")).share == caller(one).share


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer x", "Basic dTpw", KEY, "\xff\xfe"])
def test_without_server_keys_an_authorization_header_makes_no_new_share(value):
    assert caller(("authorization", value), has_keys=False).share == Share("peer 192.0.2.1")


def test_a_peer_is_its_address_and_an_ipv6_peer_its_network():
    assert peer("192.0.2.1") == peer("::ffff:192.0.2.1") == "192.0.2.1"
    assert peer("2001:db8:0:1::1") == peer("2001:db8:0:1:ffff::2") == "2001:db8:0:1::/64"
    assert peer("2001:db8:0:2::1") == "2001:db8:0:2::/64" and peer("fe80::1%eth0") == "fe80::/64"
    assert peer(None) == peer("") == ""


FORWARDED = [("x-forwarded-for", "{}"), ("forwarded", "for={}"), ("forwarded", 'proto=https;FOR="{}";by=10.0.0.9')]


@pytest.mark.parametrize(("header", "form"), FORWARDED)
def test_a_forwarded_address_counts_from_a_trusted_proxy_only(header, form):
    line = header, form.format("198.51.100.7")
    assert peer("10.0.0.1", line) == peer("fd00::7", line) == "198.51.100.7"
    assert peer("192.0.2.1", line) == "192.0.2.1" and peer("fd00::8", line) == "fd00::/64"
    assert peer("10.0.0.1", line, trusted=()) == "10.0.0.1"


@pytest.mark.parametrize(("header", "form"), FORWARDED)
def test_of_several_hops_the_rightmost_that_is_not_trusted_counts(header, form):
    """A client can forge all entries of X-Forwarded-For or Forwarded to the left of the rightmost address that is not
    trusted."""
    chain = ", ".join(form.format(address) for address in ("203.0.113.9", "198.51.100.7", "10.0.0.2"))
    assert peer("10.0.0.1", (header, chain)) == "198.51.100.7"
    lines = [(header, form.format(address)) for address in ("203.0.113.9", "198.51.100.7", "10.0.0.2")]
    assert peer("10.0.0.1", *lines) == "198.51.100.7"
    assert peer("10.0.0.1", (header, form.format("10.0.0.3"))) == "10.0.0.3"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("198.51.100.7:80", "198.51.100.7"),
        ("[2001:db8::1]", "2001:db8::/64"),
        ("[2001:db8::1]:80", "2001:db8::/64"),
        ("2001:db8::1", "2001:db8::/64"),
        ("::ffff:198.51.100.7", "198.51.100.7"),
    ],
)
def test_every_form_of_an_address_is_read(text, expected):
    assert peer("10.0.0.1", ("x-forwarded-for", text)) == peer("10.0.0.1", ("forwarded", f'for="{text}"')) == expected


@pytest.mark.parametrize(
    "text", ["", " ", "unknown", "_hidden", "1.2.3", "1.2.3.4.5", "a" * 10_000, "[::1", "]", ";", '"', "=,="]
)
def test_a_wrong_header_of_a_trusted_proxy_counts_to_the_last_known_hop(text):
    assert peer("10.0.0.1", ("x-forwarded-for", text)) == peer("10.0.0.1", ("forwarded", f"for={text}")) == "10.0.0.1"
    assert peer("10.0.0.1", ("forwarded", text)) == "10.0.0.1"
    assert peer("10.0.0.1", ("x-forwarded-for", f"1.1.1.1, {text} , 10.0.0.2")) == "10.0.0.2"


def test_of_two_headers_that_disagree_neither_is_believed():
    """The proxy writes one of the headers; the client may have written the other."""
    xff, forwarded = ("x-forwarded-for", "198.51.100.7"), ("forwarded", "for=203.0.113.9")
    assert peer("10.0.0.1", xff, forwarded) == "10.0.0.1"
    assert peer("10.0.0.1", xff, ("forwarded", "for=198.51.100.7")) == "198.51.100.7"


def test_a_chain_of_trusted_hops_longer_than_the_limit_ends_at_a_trusted_hop():
    assert peer("10.0.0.1", ("x-forwarded-for", "9.9.9.9" + ", 10.0.0.2" * 5_000)) == "10.0.0.2"


@pytest.mark.parametrize("word", ["", "proxy.local", "10.0.0.1/8", "10.0.0.0/33", "10.0.0.1:80"])
def test_a_trusted_proxy_that_is_not_a_network_is_refused(word):
    with pytest.raises(StartError, match=f"--trusted-proxy {word} is not an IP address or network"):
        networks_of([word])


@pytest.mark.parametrize("value", ["a" * 129, "a" * 10_000, "a b", "\xe9", "a\x7fb", "a\tb", "a\x00", "\xff" * 10_000])
def test_an_invalid_tenant_is_refused_by_the_headers_name(value):
    with pytest.raises(ValidationError, match="`X-Tenant` must be at most 128 visible ASCII"):
        caller(("x-tenant", value))


def test_a_tenant_may_have_128_characters():
    assert caller(("x-tenant", "~" * 128)).share.tenant == "~" * 128


@pytest.mark.parametrize("name", ["X-Tenant", "X-Request-Timeout"])
def test_a_header_given_twice_is_refused(name):
    with pytest.raises(ValidationError, match=f"`{name}` must be given at most once"):
        caller((name.lower(), "1"), (name.lower(), "2"))


def domain(key: str, tenant: str, scope: CacheScope, has_keys: bool = True):
    return caller(("authorization", f"Bearer {key}"), ("x-tenant", tenant), has_keys=has_keys, scope=scope).cache_domain


def test_cached_prefixes_are_shared_within_a_key_unless_a_flag_says_otherwise():
    ones, tenants, others = (("one", "a"), ("one", "b"), ("two", "a"))
    key, by_tenant, everybody = CacheScope.KEY, CacheScope.TENANT, CacheScope.ALL
    assert domain(*ones, key) == domain(*tenants, key) != domain(*others, key)
    assert len({domain(*who, by_tenant) for who in (ones, tenants, others)}) == 3
    assert len({domain(*who, everybody) for who in (ones, tenants, others)}) == 1


def test_without_keys_cached_prefixes_are_shared_by_all():
    assert domain("one", "a", CacheScope.KEY, has_keys=False) == domain("two", "b", CacheScope.KEY, has_keys=False)
    assert domain("one", "a", CacheScope.TENANT, has_keys=False) != domain(
        "one", "b", CacheScope.TENANT, has_keys=False
    )
