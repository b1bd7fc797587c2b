"""The share of the server that a request is charged to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Shares of the server are equal first between owners, then between the tenants of one owner. Not for logs: both
    may be a person's name or address."""

    owner: str = ""  # name of the client's API key, or its peer address
    tenant: str = ""  # value of the `X-Tenant` header
