import pytest

from text_generation_common.cluster.identity import Identity, Role, deployment_name, host_name


def test_an_identity_is_read_from_its_uri():
    for role in Role:
        identity = Identity("tgi-2", role)
        assert Identity.from_uri(identity.uri) == identity


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://tgi/root",
        "spiffe://tgi/engine/1",
        "spiffe://tgi/",
        "spiffe:///engine",
        "spiffe://tgi/engine?x",
        "spiffe://TGI/engine",
        "https://tgi/engine",
        "xspiffe://tgi/engine",
        "",
    ],
)
def test_other_uris_name_no_role(uri):
    with pytest.raises(ValueError):
        Identity.from_uri(uri)


def test_the_names_of_servers_differ_by_host_role_and_deployment():
    names = [
        Identity(deployment, role).server_name(host)
        for deployment in ("a", "b")
        for role in Role
        for host in ("10.0.0.3", "fd00::1", "gpu-1.lan")
    ]
    assert len(set(names)) == len(names)
    assert Identity("tgi", Role.ENGINE).server_name("fd00::1") == "fd00--1.engine.tgi"


@pytest.mark.parametrize(
    ("text", "name"),
    [("10.0.0.3", "10.0.0.3"), ("FD00:0::1", "fd00::1"), ("Gpu-1.LAN", "gpu-1.lan"), ("localhost", "localhost")],
)
def test_hosts_are_written_in_one_form(text, name):
    assert host_name(text) == name


@pytest.mark.parametrize(
    "text",
    [
        *("", "0.0.0.0", "::", "10.0.0", "10.0.0.3.4", "fe80::1%eth0", "a b", "-a", "a..b", "a/b", "../x", "*.lan"),
        *("x" * 64, ".".join(["x" * 60] * 5)),
    ],
)
def test_other_texts_are_not_hosts(text):
    with pytest.raises(ValueError):
        host_name(text)


def test_a_wildcard_stands_for_the_first_label_only():
    assert host_name("*.engines.svc", wildcard=True) == "*.engines.svc"
    for text in ("*", "*.", "a.*.svc", "**.svc", "*a.svc"):
        with pytest.raises(ValueError):
            host_name(text, wildcard=True)


@pytest.mark.parametrize("text", ["", "Tgi", "a.b", "-a", "a-", "a/b", "x" * 51])
def test_a_deployment_is_named_by_one_label(text):
    with pytest.raises(ValueError):
        deployment_name(text)
