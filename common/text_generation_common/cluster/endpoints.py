"""Addresses of ports between processes of a deployment: `unix://PATH` or `HOST:PORT`."""

import os
from dataclasses import dataclass

from text_generation_common.cluster.identity import host_name
from text_generation_common.errors import ArgumentValidation
from text_generation_common.places import MAX_SOCKET_PATH_BYTES

_UNIX = "unix://"
_FORM = "give unix:///PATH or HOST:PORT, with an IPv6 address in brackets"


@dataclass(frozen=True, slots=True)
class UnixEndpoint:
    """A unix socket. The rights of its folder decide which users can connect."""

    path: str  # absolute

    @property
    def target(self) -> str:
        """The address as gRPC takes it."""
        return f"{_UNIX}{self.path}"


@dataclass(frozen=True, slots=True)
class TcpEndpoint:
    host: str  # IP address or DNS name
    port: int
    name: str | None = None  # the DNS name by which `host`, an address, was found

    @property
    def target(self) -> str:
        """The address as gRPC takes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


Endpoint = UnixEndpoint | TcpEndpoint


def parse_endpoint(text: str, *, listens: bool = False) -> Endpoint:
    """The address that `text` gives. With `listens`, port 0 lets the kernel choose a port. ArgumentValidation, in one
    line, for other texts, and for addresses that are every network of the machine."""
    try:
        if text.startswith("unix:"):
            return _unix(text)
        return _tcp(text, listens)
    except ValueError as error:
        raise ArgumentValidation(f"address {text!r}: {error}") from None


def _unix(text: str) -> UnixEndpoint:
    path = text.removeprefix(_UNIX)
    if path == text or not os.path.isabs(path) or "\0" in path:
        raise ValueError(f"a socket's path must be absolute: {_FORM}")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"the socket's path has more than {MAX_SOCKET_PATH_BYTES} bytes: choose a shorter one")
    return UnixEndpoint(path)


def _tcp(text: str, listens: bool) -> TcpEndpoint:
    host, colon, port = text.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    if not (colon and host and port.isascii() and port.isdigit()) or (":" in host and not in_brackets):
        raise ValueError(f"not an address: {_FORM}")
    least = 0 if listens else 1
    if len(port) > 5 or not least <= int(port) <= 65535:
        raise ValueError(f"port {port} is not in {least} … 65535")
    return TcpEndpoint(host_name(host[1:-1] if in_brackets else host), int(port))
