"""Who asks, and how long it will wait: what the connection and the headers of a generating request say."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from starlette.requests import Request

from text_generation_router.api.keys import name_of_key
from text_generation_router.api.peer import Network, peer_of
from text_generation_router.errors import ValidationError
from text_generation_router.scheduling.request import Namespace
from text_generation_router.scheduling.share import Share

TENANT = re.compile(r"[!-~]{0,128}")
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class CacheScope(StrEnum):
    """Among whose requests cached prefixes are shared."""

    ALL = "all"
    KEY = "key"  # everybody's, where the server has no keys
    TENANT = "tenant"  # the requests of one key with the same `X-Tenant`


@dataclass(frozen=True, slots=True)
class Caller:
    share: Share
    cache_domain: Namespace  # whose cached prefixes it shares
    timeout_s: float | None  # from the receipt of the request


class Callers:
    """Reads the caller out of a request. `has_keys`: every request that gets here carries one of the server's API keys.
    Without keys an `Authorization` header proves nothing (its client could send another one each time), so the owner
    is the peer address; `trusted_proxies` are those whose word about it is taken.

    An address bounds what one client can take, but it is not an identity: behind one address there may be many users,
    and one user may come from several. So it divides no cache: without keys prefixes are shared by all (who has secrets
    gives them a `cache_salt`)."""

    def __init__(self, has_keys: bool, trusted_proxies: Sequence[Network], cache_scope: CacheScope) -> None:
        self._has_keys = has_keys
        self._cache_scope = cache_scope
        self._trusted_proxies = trusted_proxies

    def caller_of(self, request: Request) -> Caller:
        """Raises ValidationError naming the header that is wrong."""
        tenant, timeout_s = _tenant(request), _timeout_s(request)
        share = Share(self.owner_of(request), tenant)
        return Caller(share, self._cache_domain(share), timeout_s)

    def _cache_domain(self, share: Share) -> Namespace:
        owner = share.owner if self._has_keys and self._cache_scope is not CacheScope.ALL else ""
        return owner, share.tenant if self._cache_scope is CacheScope.TENANT else ""

    def owner_of(self, request: Request) -> str:
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
