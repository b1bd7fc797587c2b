"""Who asks, and how long it will wait: what the connection and the headers of a generating request say."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from text_generation_router.api.keys import name_of_key
from text_generation_router.api.peer import Network, peer_of
from text_generation_router.errors import ValidationError
from text_generation_router.scheduling.share import Share

TENANT = re.compile(r"[!-~]{0,128}")
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclass(frozen=True, slots=True)
class Caller:
    share: Share
    timeout_s: float | None  # from the receipt of the request


class Callers:
    """Reads the caller out of a request. `has_keys`: every request that gets here carries one of the server's API keys.
    Without keys an `Authorization` header proves nothing (its client could send another one each time), so the owner
    is the peer address; `trusted_proxies` are those whose word about it is taken."""

    def __init__(self, has_keys: bool, trusted_proxies: Sequence[Network] = ()) -> None:
        self._has_keys = has_keys
        self._trusted_proxies = trusted_proxies

    def caller_of(self, request: Request) -> Caller:
        """Raises ValidationError naming the header that is wrong."""
        tenant, timeout_s = _tenant(request), _timeout_s(request)
        return Caller(Share(self._owner(request), tenant), timeout_s)

    def _owner(self, request: Request) -> str:
        if self._has_keys:
            return "key " + name_of_key(request.headers.get("authorization", "").encode("latin-1"))
        return "peer " + peer_of(request, self._trusted_proxies)


def _tenant(request: Request) -> str:
    """`X-Tenant`, which divides the owner's share. Whether clients may choose it is for the proxy in front to decide,
    which otherwise sets the header or takes it away."""
    name = _single(request, "X-Tenant")
    if TENANT.fullmatch(name) is None:
        raise ValidationError("`X-Tenant` must be at most 128 visible ASCII characters")
    return name


def _timeout_s(request: Request) -> float | None:
    text = _single(request, "X-Request-Timeout")
    if not text:
        return None
    seconds = float(text) if SECONDS.fullmatch(text) else 0.0
    if not seconds > 0:
        raise ValidationError("`X-Request-Timeout` must be seconds > 0 and < 1000000000, written as 30 or 0.5")
    return seconds


def _single(request: Request, name: str) -> str:
    """Empty if it is absent. Of two nobody could say which one the proxy has set."""
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise ValidationError(f"`{name}` must be given once")
    return values[0].strip(" \t") if values else ""
