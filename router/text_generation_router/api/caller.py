"""Who asks, and how long it will wait: what the headers of a generating request say."""

import re
from dataclasses import dataclass

from starlette.requests import Request

from text_generation_router.api.keys import name_of_key
from text_generation_router.errors import ValidationError

TENANT = re.compile(r"[!-~]{0,128}")
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str  # not for logs: it may be a person's name
    timeout_s: float | None  # from the receipt of the request


def caller_of(request: Request) -> Caller:
    """Raises ValidationError naming the header that is wrong."""
    return Caller(_tenant(request), _timeout_s(request))


def _tenant(request: Request) -> str:
    """`X-Tenant`, else a name of the API key: the two are never equal, as the header has no space. Whether clients may
    choose the header is for the proxy in front to decide, which else sets it or takes it away."""
    name = _single(request, "X-Tenant")
    if TENANT.fullmatch(name) is None:
        raise ValidationError("`X-Tenant` must be at most 128 visible ASCII characters")
    key = name_of_key(request.headers.get("authorization", "").encode("latin-1"))
    return name or (key and f"key {key}")


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
