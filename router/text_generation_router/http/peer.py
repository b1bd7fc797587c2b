"""The address of a request's client, read from the forwarding headers of trusted proxies."""

import re
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING

from text_generation_router.errors import StartError

if TYPE_CHECKING:
    from starlette.requests import Request

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# Bits of an IPv6 address that count. One client usually has a whole network of this prefix length, so the network
# counts as one address.
IPV6_CLIENT_BITS = 64
# Number of entries of a forwarding header that are read, from the right. A longer chain of proxies is not trusted.
MAX_HOPS = 16
# The parameter `for` in one element of a `Forwarded` header (RFC 7239). Other parameters do not matter here.
FORWARDED_FOR = re.compile(r"(?:^|;)[ \t]*for[ \t]*=[ \t]*(\"[^\"\\]*\"|[^\s\";,]+)[ \t]*(?=;|$)", re.IGNORECASE)
# Both headers write addresses as `1.2.3.4`, `1.2.3.4:80`, `2001:db8::1`, `[2001:db8::1]` or `[2001:db8::1]:80`.
BRACKETED = re.compile(r"\[([^\[\]]*)\](?::[^:]*)?")


def networks_of(words: Iterable[str]) -> tuple[Network, ...]:
    """The networks that `--trusted-proxy` names. Raises StartError."""
    return tuple(map(_network, words))


def _network(word: str) -> Network:
    try:
        return ip_network(word)
    except ValueError as error:
        raise StartError(
            f"--trusted-proxy {word} is not an IP address or network: write 10.0.0.7, 10.0.0.0/8 or fd00::/8 ({error})"
        ) from None


def peer_of(request: "Request", trusted: Sequence[Network]) -> str:
    """The client's IPv4 address or IPv6 /64 network; "" if the connection has no address.

    The client's address is the connection's, unless that is a trusted proxy's address. Then the entries of `Forwarded`
    or `X-Forwarded-For` are followed from right to left (each proxy appends the address that it was called from), up to
    the first address that is not trusted. Three cases are not trusted: an entry that is not an address, a chain longer
    than MAX_HOPS, and two headers that disagree (a proxy writes one header, the client may have written the other). In
    these cases the client's address is the last address that was trusted.
    """
    connected = _address(request.client.host) if request.client is not None else None
    if connected is None:
        return ""
    if not trusted:
        return _group(connected)
    chains = [chain for chain in (_forwarded(request), _x_forwarded_for(request)) if chain]
    ends = {_group(_last_known(connected, chain, trusted)) for chain in chains}
    return ends.pop() if len(ends) == 1 else _group(connected)


def group_of(host: str) -> str:
    """The IPv4 address or IPv6 /64 network of a connection's address; "" if it is none, as with a unix socket."""
    address = _address(host)
    return "" if address is None else _group(address)


def _last_known(connected: Address, chain: Sequence[str], trusted: Sequence[Network]) -> Address:
    known = connected
    for hop, word in enumerate(reversed(chain)):
        if not _is_trusted(known, trusted):
            return known
        address = _address(word)
        if address is None or hop == MAX_HOPS:
            return known
        known = address
    return known


def _is_trusted(address: Address, trusted: Sequence[Network]) -> bool:
    return any(address in network for network in trusted)


def _x_forwarded_for(request: "Request") -> list[str]:
    return list(_last_entries(request.headers.getlist("x-forwarded-for")))


def _forwarded(request: "Request") -> list[str]:
    """The `for` of each element. An element without a readable `for` gives "", which is not an address."""
    elements = _last_entries(request.headers.getlist("forwarded"))
    matches = (FORWARDED_FOR.search(element) for element in elements)
    return [match[1].strip('"') if match else "" for match in matches]


def _last_entries(values: Sequence[str]) -> Iterator[str]:
    """The last MAX_HOPS + 1 entries, left to right, of a list header given in one or several lines."""
    entries = ",".join(values).rsplit(",", MAX_HOPS + 1) if values else []
    return (entry.strip(" \t") for entry in entries[-MAX_HOPS - 1 :])


def _address(word: str) -> Address | None:
    bracketed = BRACKETED.fullmatch(word)
    if bracketed is not None:
        word = bracketed[1]
    elif word.count(":") == 1:
        word = word.partition(":")[0]
    try:
        address = ip_address(word)
    except ValueError:
        return None
    # A socket for both protocols reports IPv4 clients as ::ffff:1.2.3.4.
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _group(address: Address) -> str:
    if isinstance(address, IPv4Address):
        return str(address)
    network = int(address) >> (128 - IPV6_CLIENT_BITS) << (128 - IPV6_CLIENT_BITS)
    return f"{IPv6Address(network)}/{IPV6_CLIENT_BITS}"
