"""Access to the engine view: by the administrators' key, or, with --engine-view, from this machine itself.

Any page that a browser on this machine has open can send requests to a loopback address, and a name of its own can be
made to lead there (DNS rebinding). So a request without a key has to name this server as it is: `Host` is a loopback
name with the port, `Origin` and `Sec-Fetch-Site` are those of this server's own page, and no proxy has passed it on.
"""

from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from text_generation_router.errors import UnauthorizedError
from text_generation_router.http.keys import allowed_digest, authorization_of

HOSTS = ("localhost", "127.0.0.1", "[::1]")
HTTP_PORT = 80  # browsers leave it out
# Headers that proxies add. A proxy on this machine would let all its clients in.
OF_PROXIES = (
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-port",
    "x-forwarded-proto",
    "x-forwarded-server",
    "x-real-ip",
)


class ViewAccess:
    def __init__(self, admin_digest: bytes | None, is_open_here: bool) -> None:
        """`admin_digest`: digest of the administrators' key, if there is one. `is_open_here`: the server was started
        with --engine-view."""
        self._digests = () if admin_digest is None else (admin_digest,)
        self._is_open_here = is_open_here

    @property
    def exists(self) -> bool:
        return bool(self._digests) or self._is_open_here

    def check(self, request: Request) -> None:
        """Raises UnauthorizedError, always the same, if the request may see nothing."""
        if allowed_digest(authorization_of(request.scope), self._digests) is not None:
            return
        if not (self._is_open_here and is_own(request.scope)):
            raise UnauthorizedError


def is_own(scope: Scope) -> bool:
    """Whether the request came to a loopback address of this machine, from a program or from this server's own page."""
    headers, server = Headers(scope=scope), scope.get("server")
    if server is None or not _is_loopback(server[0]) or any(name in headers for name in OF_PROXIES):
        return False
    hosts = {f"{name}:{server[1]}" for name in HOSTS} | (set(HOSTS) if server[1] == HTTP_PORT else set())
    host = _single(headers, "host")
    return (
        host in hosts
        and _single(headers, "origin", f"http://{host}") == f"http://{host}"
        and _single(headers, "sec-fetch-site", "same-origin") == "same-origin"
    )


def _single(headers: Headers, name: str, default: str = "") -> str:
    """The header's value; `default` if it is absent, and "" if it is there twice."""
    values = headers.getlist(name) or [default]
    return values[0] if len(values) == 1 else ""


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
