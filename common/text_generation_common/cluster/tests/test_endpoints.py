import pytest

from text_generation_common.cluster.endpoints import TcpEndpoint, UnixEndpoint, parse_endpoint
from text_generation_common.errors import ArgumentValidation


@pytest.mark.parametrize(
    ("text", "endpoint", "target"),
    [
        ("unix:///run/tgi/engine", UnixEndpoint("/run/tgi/engine"), "unix:///run/tgi/engine"),
        ("10.0.0.3:50051", TcpEndpoint("10.0.0.3", 50051), "10.0.0.3:50051"),
        ("Gpu-1.lan:1", TcpEndpoint("gpu-1.lan", 1), "gpu-1.lan:1"),
        ("[FD00::1]:65535", TcpEndpoint("fd00::1", 65535), "[fd00::1]:65535"),
    ],
)
def test_an_address_is_a_socket_or_host_and_port(text, endpoint, target):
    assert parse_endpoint(text) == endpoint
    assert endpoint.target == target


@pytest.mark.parametrize(
    "text",
    [
        *("", ":1", "host", "host:", "host:x", "host:-1", "host:65536", "host:000001", "host:0", "host:٣"),
        *("fd00::1:80", "[]:1", "0.0.0.0:80", "[::]:80", "http://host:80", "*.lan:80", "a b:80", "[fe80::1%eth0]:80"),
        *("unix:run/tgi", "unix://run/tgi", "unix:/run/tgi", "unix:///" + "x" * 107, "unix-abstract:x:80"),
    ],
)
def test_other_addresses_are_refused_in_one_line(text):
    with pytest.raises(ArgumentValidation) as caught:
        parse_endpoint(text)
    assert "\n" not in str(caught.value) and repr(text) in str(caught.value)


def test_a_server_may_let_the_kernel_choose_its_port_but_not_listen_on_every_network():
    assert parse_endpoint("127.0.0.1:0", listens=True) == TcpEndpoint("127.0.0.1", 0)
    for text in ("0.0.0.0:50051", "[::]:50051"):
        with pytest.raises(ArgumentValidation, match="every network"):
            parse_endpoint(text, listens=True)
