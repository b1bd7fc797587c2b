"""Additional rules for requests, besides the parser's. They make sure that a proxy in front cannot read the same bytes
as a different request.
"""

import re
from collections.abc import Sequence

from text_generation_router.errors import CodingError, EncodedBodyError, InferenceError, InvalidRequestError

UPGRADE = re.compile(rb"(?i)(?<=\n)upgrade(?=[ \t]*:)")


def without_upgrade(data: bytes) -> bytes:
    """Bytes that begin with a request, whose header `Upgrade` has another name then: a server may ignore the header
    (RFC 9110, section 7.8), but the parser would pass over the body. Java's client sends it with the first request of
    each connection."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return UPGRADE.sub(b"ignored", head) + end + rest


def problem_of(version: str, headers: Sequence[tuple[bytes, bytes]]) -> InferenceError | None:
    """Why the request is refused, or None (RFC 9112, sections 3.2 and 6.1). Header names are in lower case."""
    if version not in ("1.0", "1.1"):
        return InvalidRequestError(f"HTTP/{version} is not supported, use HTTP/1.1")
    names = [name for name, _ in headers]
    hosts = names.count(b"host")
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return InvalidRequestError(f"`Host` must be given once. Given: {hosts} times")
    if version == "1.0" and b"transfer-encoding" in names:
        return InvalidRequestError("`Transfer-Encoding` must not be given with HTTP/1.0")
    if b"transfer-encoding" in names and (codings := codings_of(b"transfer-encoding", headers)) != ["chunked"]:
        return CodingError(", ".join(codings))
    if b"content-encoding" in names and set(codings := codings_of(b"content-encoding", headers)) - {"identity"}:
        return EncodedBodyError(", ".join(codings))
    return None


def codings_of(name: bytes, headers: Sequence[tuple[bytes, bytes]]) -> list[str]:
    """The words of a list header, in lower case; empty words do not count."""
    words = b",".join(value for known, value in headers if known == name).decode("latin-1").lower().split(",")
    return [word.strip(" \t") for word in words if word.strip(" \t")]
