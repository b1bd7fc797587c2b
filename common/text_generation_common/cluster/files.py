"""Finds and reads the files of certificates, and refuses keys that other users can read. Standard library only.

--tls-dir names the folder of one certificate, or the tree of a deployment: DIR/ROLE/HOST, as
`text-generation-launcher certs` makes it.
"""

import os
import socket
import stat
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from text_generation_common.cluster.identity import Role
from text_generation_common.errors import CredentialsError

MAKE = "make it with `text-generation-launcher certs`"


def read_file(path: Path, is_key: bool) -> bytes:
    """The file's bytes. CredentialsError if it cannot be read, or if other users can read the key in it."""
    try:
        with path.open("rb") as file:
            if is_key:
                _check_private(path, os.fstat(file.fileno()))
            return file.read()
    except FileNotFoundError:
        raise CredentialsError(f"{path} does not exist: {MAKE}") from None
    except OSError as error:
        raise CredentialsError(f"cannot read {path}: {error.strerror}") from None


def _check_private(path: Path, found: os.stat_result) -> None:
    """Raises CredentialsError if any other user has rights to the file of a key. If root owns the file, the file's
    group may read it, because Kubernetes mounts secrets for a group."""
    if found.st_uid not in (0, os.geteuid()):
        raise CredentialsError(f"{path} belongs to another user (uid {found.st_uid}): make it yours, with mode 600")
    allowed = 0o740 if found.st_uid == 0 else 0o700
    if (mode := stat.S_IMODE(found.st_mode)) & ~allowed:
        raise CredentialsError(f"{path} is open to other users (mode {mode:o}): run chmod 600 {path}")


def require_cryptography() -> None:
    """CredentialsError if the package that reads and makes certificates is not installed. Called before the modules
    `certificates.py` and `issuing.py` are imported, because only they need the package."""
    if find_spec("cryptography") is None:
        raise CredentialsError(
            "certificates need the package cryptography, which is not installed: pip install 'tgi-py[cluster]'"
        )


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
