import logging
import socket

import pytest

from text_generation_common.addresses import address_of, bound_socket, reachable

logger = logging.getLogger(__name__)


@pytest.mark.parametrize("hostname", ["localhost", "3f2a", ""])
def test_a_name_becomes_every_address_with_a_warning(hostname: str, caplog: pytest.LogCaptureFixture) -> None:
    assert address_of(hostname, logger) == "0.0.0.0"
    assert caplog.messages == ["Invalid hostname, defaulting to 0.0.0.0"]


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
