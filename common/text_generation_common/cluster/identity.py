"""What a certificate stands for: a role of a deployment, and the names by which a server of that role is called."""

import re
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address

# A DNS name has at most 253 characters, and a label, the part between two dots, at most 63.
MAX_NAME_CHARACTERS = 253
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
# Certificates also have a deployment within a common name, which has at most 64 characters.
_DEPLOYMENT = re.compile(r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?")
_URI = re.compile(r"spiffe://([^/?#]+)/([^/?#]+)")


class Role(StrEnum):
    """What a process does in a deployment."""

    FRONT = "front"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Identity:
    """A role of a deployment."""

    deployment: str
    role: Role

    @classmethod
    def from_uri(cls, uri: str) -> "Identity":
        """ValueError, with the reason in one line, for a URI that is not `Identity.uri` of any identity."""
        found = _URI.fullmatch(uri)
        if found is None or found[2] not in tuple(Role):
            raise ValueError(f"{uri!r} is not spiffe://DEPLOYMENT/ROLE with one of the roles {', '.join(Role)}")
        return cls(deployment_name(found[1]), Role(found[2]))

    @property
    def uri(self) -> str:
        """The identity as a certificate has it, in the form of SPIFFE ids (spiffe.io, "SPIFFE Identity")."""
        return f"spiffe://{self.deployment}/{self.role}"

    def server_name(self, host: str) -> str:
        """The DNS name, in a certificate, of this role's server on `host`.

        gRPC lets a client check one name of its server and nothing else. So this name has host, role and deployment: a
        front's certificate for the same host does not have it, and a front that serves as an engine is refused.
        """
        return f"{host.replace(':', '-')}{self.server_suffix}"

    @property
    def server_suffix(self) -> str:
        return f".{self.role}.{self.deployment}"


def deployment_name(text: str) -> str:
    """`text` if it can name a deployment; otherwise ValueError."""
    if not _DEPLOYMENT.fullmatch(text):
        raise ValueError(
            f"{text!r} cannot name a deployment: use at most 50 lower-case letters, digits and inner hyphens"
        )
    return text


def host_name(text: str, wildcard: bool = False) -> str:
    """An IP address or DNS name in its usual form. ValueError for other texts, for 0.0.0.0 and ::, which are every
    address of a machine, and for `*.NAME` without `wildcard`."""
    try:
        address = ip_address(text)
    except ValueError:
        return _dns_name(text.lower(), wildcard)
    if address.is_unspecified:
        raise ValueError(f"{text} stands for every network of the machine: give the address that others connect to")
    if "%" in text:
        raise ValueError(f"{text} has a zone, which other machines cannot use: give an address without %")
    return str(address)


def _dns_name(text: str, wildcard: bool) -> str:
    name = text.removeprefix("*.") if wildcard else text
    labels = name.split(".")
    # A last label of digits only is an IP address with a mistake in it, such as 10.0.0.
    is_valid = all(map(_LABEL.fullmatch, labels)) and not labels[-1].isdigit() and len(text) <= MAX_NAME_CHARACTERS
    if not is_valid:
        raise ValueError(f"{text!r} is neither an IP address nor a DNS name")
    return text
