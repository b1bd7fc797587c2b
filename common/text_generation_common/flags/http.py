"""Flags of the HTTP server: where it listens, which callers it serves, and what connections may do."""

from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address
from typing import ClassVar

from text_generation_common.addresses import is_address
from text_generation_common.flags.declaration import flag
from text_generation_common.flags.kinds import Topic


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpFlags:
    TOPIC: ClassVar = Topic.HTTP
    hostname: str = flag(
        "0.0.0.0",
        "IP address to listen on, or a name of this machine. A name in the environment's HOSTNAME is every address.",
        is_address=True,
    )
    port: int = flag(3000, "Port to listen on.", short="-p", min=0, max=65535)
    cors_allow_origin: tuple[str, ...] = flag(
        (), "Origin whose web pages may call the server, may be repeated; any when not given.", not_empty=True
    )
    closed_routes: bool = flag(False, "Ask for the key at /metrics, /info, /docs and /v1/models as well.")
    no_page: bool = flag(False, "Serve no page for browsers at /, and nothing below /ui.")
    engine_view: bool = flag(
        False,
        "Show rows, queue and memory of the engine on the page, without a key, to users of this machine; for a server "
        "on a loopback address only. --admin-api-key shows them anywhere.",
    )
    tgi_dialect: bool = flag(
        False,
        "Answer on /v1 as TGI does: stop strings stay in the text, TGI's finish reasons, empty ids, the role in each "
        "delta, TGI's errors.",
    )
    tgi_buckets: bool = flag(
        False,
        "Give the histograms of /metrics all of TGI's buckets: 1,024 sizes of batches, and 100 lengths of texts.",
    )
    max_connections: int = flag(
        4096,
        "Most connections at a time. Beyond it, connections without a whole request make room for other addresses; all "
        "others get status 503, except at /live.",
        min=1,
        positive=True,
    )
    stream_write_timeout: float = flag(
        30, "Seconds after which a stream is cut that its client does not read.", min=1, positive=True
    )
    graceful_termination_timeout: float = flag(
        90, "Seconds that running requests get to end after the first signal.", short="-g", min=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessFlags:
    TOPIC: ClassVar = Topic.KEYS
    api_key: tuple[str, ...] = flag(
        (),
        "Key that clients must send as `Authorization: Bearer KEY`, may be repeated; in the environment, which `ps` "
        "does not show, several keys are separated by spaces.",
        secret=True,
        not_empty=True,
    )
    admin_api_key: str | None = flag(
        None,
        "Key for /admin/replicas and /engine, which do not exist without it; other keys do not open them, nor this one "
        "other routes. Better given in the environment, which `ps` does not show.",
        secret=True,
        not_empty=True,
    )
    api_key_file: str | None = flag(
        None, "File with the SHA-256 digest of one key in each line, and perhaps its name.", not_empty=True
    )
    trusted_proxy: tuple[str, ...] = flag(
        (), "Address or network of a proxy whose Forwarded or X-Forwarded-For is believed, may be repeated."
    )


def view_refusal(http: HttpFlags, trusted_proxy: Collection[object]) -> tuple[str, str] | None:
    """Why the engine may not be shown without a key, and what to do. None: it may be, or need not."""
    if not http.engine_view:
        return None
    if trusted_proxy:
        return (
            "--engine-view shows the engine without a key, and clients of a --trusted-proxy are not on this machine",
            "give --admin-api-key instead of --engine-view",
        )
    if not is_address(http.hostname) or not ip_address(http.hostname).is_loopback:
        return (
            f"--engine-view shows the engine without a key, and {http.hostname} is not a loopback address",
            "add --hostname 127.0.0.1, or give --admin-api-key instead of --engine-view",
        )
    return None
