"""What `families` compares with. A file of its own: `--help` names it, and needs nothing that measures."""

from enum import StrEnum


class Against(StrEnum):
    """What the server is measured beside."""

    llama = "llama"
    peers = "peers"
