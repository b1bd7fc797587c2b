"""The caller of a request, from its connection and headers: owner and tenant, cache domain, timeout."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from text_generation_common.flags.kinds import CacheScope
from text_generation_router.errors import ValidationError
from text_generation_router.http.keys import authorization_of, name_of_key
from text_generation_router.http.peer import Network, peer_of
from text_generation_router.scheduling.request import Namespace, Share

TENANT = re.compile(r"[!-~]{0,128}")
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclass(frozen=True, slots=True)
class Caller:
    share: Share
    cache_domain: Namespace  # requests with equal domains share cached prefixes
    timeout_s: float | None  # seconds from the receipt of the request; None: no limit
    # Is told the name of each part of the request that has no effect.
    note: Callable[[str], None] = field(default=lambda _: None, compare=False)


class Callers:
    """Reads the caller from a request. `has_keys`: every request that arrives here carries one of the server's API
    keys, and the key is the owner. Without keys an `Authorization` header proves nothing (a client could send a new
    header each time), so the owner is the client's address; `trusted_proxies` may say which address that is.

    An address limits what one client can take, but does not identify a user: many users may share an address, and a
    user may have several addresses. So addresses do not divide the cache: without keys all requests share cached
    prefixes, and a client with secrets sends a `cache_salt`."""

    def __init__(self, has_keys: bool, trusted_proxies: Sequence[Network], cache_scope: CacheScope) -> None:
        self._has_keys = has_keys
        self._cache_scope = cache_scope
        self._trusted_proxies = trusted_proxies

    def caller_of(self, request: Request) -> Caller:
        """The caller of a request. Raises ValidationError that names the header that is wrong."""
        tenant, timeout_s = _tenant(request), _timeout_s(request)
        share = Share(self.owner_of(request), tenant)
        return Caller(share, self._cache_domain(share), timeout_s)

    def _cache_domain(self, share: Share) -> Namespace:
        owner = share.owner if self._has_keys and self._cache_scope is not CacheScope.ALL else ""
        return owner, share.tenant if self._cache_scope is CacheScope.TENANT else ""

    def owner_of(self, request: Request) -> str:
        if self._has_keys:
            return "key " + name_of_key(authorization_of(request.scope))
        return "peer " + peer_of(request, self._trusted_proxies)


# Errors of headers name no field of the body.
def _tenant(request: Request) -> str:
    """`X-Tenant`, which divides the owner's share. If clients may not choose their tenant, the proxy in front of the
    server sets or removes the header."""
    name = _single(request, "X-Tenant")
    if TENANT.fullmatch(name) is None:
        raise ValidationError("`X-Tenant` must be at most 128 visible ASCII characters", None)
    return name


def _timeout_s(request: Request) -> float | None:
    text = _single(request, "X-Request-Timeout")
    if not text:
        return None
    seconds = float(text) if SECONDS.fullmatch(text) else 0.0
    if not seconds > 0:
        raise ValidationError(
            "`X-Request-Timeout` must be a number of seconds > 0 and < 1000000000, such as 30 or 0.5", None
        )
    return seconds


def _single(request: Request, name: str) -> str:
    """The header's value; "" if the header is absent. A header that occurs twice is refused: either value could be the
    proxy's.
    """
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise ValidationError(f"`{name}` must be given at most once", None)
    return values[0].strip(" \t") if values else ""
