"""Owner and tenant of a request. They say to which share of the server the request is charged."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Owner and tenant of a request. Shares of the server are equal first between owners, then between the tenants of
    one owner. Must not be logged: both fields may be a person's name or address.
    """

    owner: str = ""  # name of the client's API key, or its peer address
    tenant: str = ""  # value of the `X-Tenant` header
