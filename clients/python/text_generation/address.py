"""The URL of a server: checked when a client is made, and shown without its user, password and query."""

import re
from urllib.parse import SplitResult, urlsplit

from text_generation.errors import ValidationError

_EXPECTED = "a URL with the scheme http or https and a host, such as 'http://127.0.0.1:3000'"


def checked_url(base_url: str) -> str:
    """Returns `base_url` as given. Raises ValidationError if no request could be sent to it."""
    if not isinstance(base_url, str):
        raise ValidationError(f"`base_url` must be {_EXPECTED}. Given: {type(base_url).__name__}")
    if not _is_usable(base_url):
        raise ValidationError(f"`base_url` must be {_EXPECTED}. Given: {_masked(base_url)!r}{_meant(base_url)}")
    return base_url


def shown_url(url: str) -> str:
    """The URL without user, password, query and fragment, which may be secrets."""
    return f"{shown_host(url)}{urlsplit(url).path}"


def shown_host(url: str) -> str:
    """Scheme, host and port of the URL."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _is_usable(url: str) -> bool:
    parts = _split(url)
    return (
        parts is not None
        and parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and url.isprintable()
        and " " not in url
    )


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError unless it is a number from 0 to 65535
    except ValueError:
        return None
    return parts


def _meant(url: str) -> str:
    """A URL without a scheme is the most frequent mistake."""
    with_scheme = f"http://{url}"
    lacks_scheme = ":/" not in url and _is_usable(with_scheme)
    return f"; did you mean {_masked(with_scheme)!r}?" if lacks_scheme else ""


def _masked(url: str) -> str:
    return re.sub(r"[^/@]*@", "***@", re.split(r"[?#]", url)[0])
