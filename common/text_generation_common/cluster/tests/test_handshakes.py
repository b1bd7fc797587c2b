import pytest

from text_generation_common.cluster.handshakes import meaning, problem

# gRPC's own words (grpcio 1.85), in the log of a server and in the details of a client's failed call.
FAILED = "Handshake failed with error SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:"
VERIFY = "CERTIFICATE_VERIFY_FAILED: certificate has expired"
CLIENT = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:371: "


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FAILED + VERIFY, "the peer's certificate is refused: certificate has expired"),
        (
            f"{CLIENT}Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1:{VERIFY}: OK",
            "the peer's certificate is refused: certificate has expired",
        ),
        (f"{FAILED}PEER_DID_NOT_RETURN_A_CERTIFICATE: Invalid context", "the peer shows no certificate"),
        (f"{FAILED}HTTP_REQUEST: Invalid context", "the peer does not speak TLS"),
        (f"{FAILED}WRONG_VERSION_NUMBER: Invalid context", "the peer does not speak TLS"),
        (f"{FAILED}NO_SHARED_CIPHER", "the TLS handshake failed: NO_SHARED_CIPHER"),
        (
            "No match found for server name: 10.0.0.3.engine.tgi",
            "the peer's certificate is refused: it does not have the name 10.0.0.3.engine.tgi",
        ),
        (
            f"{CLIENT}Custom verification check failed with error: UNAUTHENTICATED: Hostname Verification Check failed",
            "the peer's certificate is refused: it is for another address, role or deployment",
        ),
        ("Fork support is only compatible with the epoll1 and poll polling strategies", None),
    ],
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
