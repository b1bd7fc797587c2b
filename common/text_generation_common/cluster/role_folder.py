"""Finds a role's certificate in what --tls-dir names: the folder of one certificate, or the tree of a deployment.

The tree is DIR/ROLE/HOST, as `text-generation-launcher certs` makes it.
"""

import socket
from collections.abc import Iterator
from pathlib import Path

from text_generation_common.cluster.identity import Role
from text_generation_common.errors import CredentialsError

CERTIFICATE = "tls.crt"


def folder_name(host: str) -> str:
    """The name of the folder for `host`: a name that needs no quotes in a shell, and can be a file's everywhere."""
    return host.replace("*", "_").replace(":", "-")


def role_folder(tls_dir: Path, role: Role, host: str | None = None) -> Path:
    """The folder with the certificate of `role` for `host`: for a role that others connect to, the host of its address.
    Without `host`, that of this machine's name, or else the first: a certificate that is only shown to servers may be
    that of any host. CredentialsError if there is none."""
    if (tls_dir / CERTIFICATE).exists():
        return tls_dir
    found = [folder for folder in sorted((tls_dir / role).glob("*/")) if (folder / CERTIFICATE).exists()]
    wanted = [folder_name(name) for name in ([host, *_wildcards(host)] if host is not None else _own_names())]
    for name in wanted:
        for folder in found:
            if folder.name == name:
                return folder
    if found and host is None:
        return found[0]
    where = f" for {host}" if host is not None else ""
    raise CredentialsError(
        f"{tls_dir} has neither {CERTIFICATE} nor a certificate of the role {role}{where}: make one with"
        " `text-generation-launcher certs`"
    )


def _wildcards(host: str) -> Iterator[str]:
    """The name with a wildcard that stands for `host`."""
    _, dot, rest = host.partition(".")
    if dot:
        yield f"*.{rest}"


def _own_names() -> list[str]:
    return [socket.gethostname().lower(), socket.getfqdn().lower()]
