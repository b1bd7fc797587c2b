"""Chooses and binds the address on which a server listens."""

import logging
import re
import socket
from collections.abc import Iterable, Mapping
from ipaddress import ip_address

EVERY_ADDRESS = "0.0.0.0"
LOCALHOST = "localhost"


def is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def resolved(name: str) -> str:
    """The IP address that `name`, an address or a name, stands for on this machine; an IPv4 address if it has one.
    ValueError if there is none: a server that was to listen there must not listen elsewhere."""
    try:
        return str(ip_address(name))
    except ValueError:
        pass
    try:
        found = {family: address[0] for family, *_, address in socket.getaddrinfo(name or " ", None)}
    except (OSError, UnicodeError):
        raise ValueError(f"{name!r} is neither an IP address nor a name of this machine: give an IP address") from None
    return str(found.get(socket.AF_INET) or found[socket.AF_INET6])


def address_of(hostname: str, logger: logging.Logger) -> str:
    """The IP address `hostname` in its usual form. A name comes from the environment only, because the command line's
    names are resolved: shells and containers export HOSTNAME. It is replaced by 0.0.0.0, with a warning to
    `logger`."""
    try:
        return str(ip_address(hostname))
    except ValueError:
        logger.warning(
            "HOSTNAME in the environment is not an IP address, and has no effect; --hostname chooses an address"
        )
        return EVERY_ADDRESS


# Kubernetes gives each pod NAME_PORT with such an address, for every Service NAME of its namespace.
_SERVICE_LINK = re.compile(r"(?:tcp|udp|sctp)://\S*")


def is_service_link(variable: str, environ: Mapping[str, str]) -> bool:
    """Whether the variable of a flag is set to the address of a Service, which means nothing to the flag."""
    return f"_{variable}".endswith("_PORT") and _SERVICE_LINK.fullmatch(environ.get(variable, "")) is not None


def without_service_links(
    variables: Iterable[str | None], environ: Mapping[str, str], logger: logging.Logger
) -> Mapping[str, str]:
    """The environment without those of the flags' variables that are service links. `logger` gets a warning about
    each."""
    links = [each for each in variables if each and is_service_link(each, environ)]
    for variable in links:
        logger.warning(
            "%s in the environment is the address of a Service, as Kubernetes sets it, and has no effect; the pod's"
            " `enableServiceLinks: false` leaves it out",
            variable,
        )
    return {name: value for name, value in environ.items() if name not in links}


def mention_openness(hostname: str, port: int, logger: logging.Logger) -> None:
    """Logs that other machines reach a port on every address, which users of one machine may not want."""
    if ip_address(hostname).is_unspecified:
        logger.info("Port %d is open to other machines; --hostname 127.0.0.1 closes it", port)


def reachable(hostname: str) -> str:
    """The host for addresses of this server, as its own machine reaches it: a server on every address is there too."""
    try:
        address = ip_address(hostname)
    except ValueError:
        return LOCALHOST
    if address.is_unspecified:
        return LOCALHOST
    return f"[{address}]" if address.version == 6 else str(address)


def bound_socket(address: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so connections are refused. OSError if the port is in use or the address
    does not belong to this machine.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # A restart must not wait for the connections that the last server left in TIME_WAIT.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
    except OSError:
        bound.close()
        raise
    return bound
