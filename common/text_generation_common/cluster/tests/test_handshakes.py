import json
from pathlib import Path

import pytest

from text_generation_common.cluster.handshakes import meaning, problem

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

# gRPC's own words (grpcio 1.85), in the log of a server and in the details of a client's failed call.
FAILED = "Handshake failed with error SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:"
VERIFY = "CERTIFICATE_VERIFY_FAILED: certificate has expired"
CLIENT = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:371: "


@pytest.mark.parametrize(
    ("text", "words"),
    [*TABLES["failures"], (FAILED + VERIFY, "the peer's certificate is refused: certificate has expired")],
)
def test_a_refused_connection_is_told_by_what_is_wrong_with_the_peer(text, words):
    assert meaning(text) == words


@pytest.mark.parametrize(
    ("details", "words"),
    [
        (f"{CLIENT}Failed to connect to remote host: Connection refused", "Connection refused"),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv6:%5B::1%5D:7: Socket closed",
            "Socket closed",
        ),
        ("Deadline Exceeded", "Deadline Exceeded"),
    ],
)
def test_other_problems_are_told_without_grpc_s_frame(details, words):
    assert words in problem(details) and "last error" not in problem(details)
    assert "ipv" not in problem(details)
