import logging
import socket

import pytest

from text_generation_common.addresses import address_of, bound_socket, mention_openness, reachable, resolved

logger = logging.getLogger(__name__)


@pytest.mark.parametrize("hostname", ["localhost", "3f2a", ""])
def test_a_name_becomes_every_address_with_a_warning(hostname: str, caplog: pytest.LogCaptureFixture) -> None:
    assert address_of(hostname, logger) == "0.0.0.0"
    assert caplog.messages == [
        "HOSTNAME in the environment is not an IP address, and has no effect; --hostname chooses an address"
    ]


@pytest.mark.parametrize(
    ("hostname", "is_open"), [("0.0.0.0", True), ("::", True), ("127.0.0.1", False), ("::1", False)]
)
def test_a_port_that_other_machines_reach_is_told_with_the_way_to_close_it(
    hostname: str, is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        mention_openness(hostname, 3000, logger)
    told = ["Port 3000 is open to other machines; --hostname 127.0.0.1 closes it"]
    assert caplog.messages == (told if is_open else [])


def test_a_name_is_resolved_to_an_address_of_this_machine_or_refused() -> None:
    assert resolved("localhost") == "127.0.0.1"
    assert resolved("::1") == "::1"
    for name in ("foo.invalid", "", "a" * 300, "bad name"):
        with pytest.raises(ValueError, match="neither an IP address nor a name"):
            resolved(name)


@pytest.mark.parametrize("hostname", ["127.0.0.1", "::1", "::"])
def test_an_address_stays_as_it_is(hostname: str, caplog: pytest.LogCaptureFixture) -> None:
    assert address_of(hostname, logger) == hostname and caplog.messages == []


@pytest.mark.parametrize(
    ("hostname", "host"),
    [("0.0.0.0", "localhost"), ("::", "localhost"), ("pod-1", "localhost"), ("10.0.0.7", "10.0.0.7"), ("::1", "[::1]")],
)
def test_a_server_is_reached_at_its_address_or_if_it_has_all_at_localhost(hostname: str, host: str) -> None:
    assert reachable(hostname) == host


def test_a_bound_port_refuses_connections_and_a_second_server() -> None:
    with bound_socket("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        bound.listen()
        with pytest.raises(OSError, match="in use"):
            bound_socket("127.0.0.1", port)
