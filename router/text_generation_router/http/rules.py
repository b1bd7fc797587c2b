"""Additional rules for requests, besides the parser's. They make sure that a proxy in front cannot read the same bytes
as a different request.
"""

from collections.abc import Sequence


def problem_of(version: str, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Why the request is refused, or None (RFC 9112, sections 3.2 and 6.1). Header names are in lower case."""
    if version not in ("1.0", "1.1"):
        return f"HTTP/{version} is not supported, use HTTP/1.1"
    names = [name for name, _ in headers]
    hosts = names.count(b"host")
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return f"`Host` must be given once. Given: {hosts} times"
    if version == "1.0" and b"transfer-encoding" in names:
        return "`Transfer-Encoding` must not be given with HTTP/1.0"
    return None
