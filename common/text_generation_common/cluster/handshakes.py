"""gRPC's words for a connection that was not made, changed into words that say what to mend. No input or output."""

import re

# Part of gRPC's text, and what it means. The certificate's fault is named by BoringSSL.
_MEANINGS = (
    (re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)"), r"the peer's certificate is refused: \1"),
    (re.compile(r"PEER_DID_NOT_RETURN_A_CERTIFICATE"), "the peer shows no certificate"),
    (re.compile(r"WRONG_VERSION_NUMBER|:HTTP_REQUEST:|:UNEXPECTED_RECORD:"), "the peer does not speak TLS"),
    (
        re.compile(r"No match found for server name: (\S+?)\.?$"),
        r"the peer's certificate is refused: it does not have the name \1",
    ),
    (
        re.compile(r"Hostname Verification Check failed"),
        "the peer's certificate is refused: it is for another address, role or deployment",
    ),
)
_LAST_ERROR = re.compile(r"^.*last error: (?:[A-Z_]+: )?(?:(?:ipv[46]|unix):\S+: )?")
_HANDSHAKE = re.compile(r"Handshake failed with error \w+: (?:error:[^:]*:)?(?:SSL routines:\w+:)?(.*)")


def meaning(text: str) -> str | None:
    """What gRPC's `text` says of the peer; None for a text about anything else than a TLS handshake."""
    for pattern, words in _MEANINGS:
        if found := pattern.search(text):
            return found.expand(words)
    found = _HANDSHAKE.search(text)
    return None if found is None else f"the TLS handshake failed: {found[1]}"


def problem(details: str) -> str:
    """Why a channel is not connected, from the details of a failed call."""
    return meaning(details) or _LAST_ERROR.sub("", details)
