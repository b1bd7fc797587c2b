"""Whose share of the server a request counts to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Shares of the server are equal first between owners, then between the tenants of one owner. Not for logs: both
    may be a person's name or address."""

    owner: str = ""  # who the server knows the client to be: an API key's name, or a peer address
    tenant: str = ""  # what the client says in `X-Tenant`
