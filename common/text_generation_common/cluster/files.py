"""Reads the files of a folder of certificates, and refuses keys that other users can read."""

import os
import stat
from pathlib import Path

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
    """A key is this user's with mode 600, or root's with mode 640, as Kubernetes mounts secrets for a group."""
    if found.st_uid not in (0, os.geteuid()):
        raise CredentialsError(f"{path} belongs to another user (uid {found.st_uid}): make it yours, with mode 600")
    allowed = 0o740 if found.st_uid == 0 else 0o700
    if (mode := stat.S_IMODE(found.st_mode)) & ~allowed:
        raise CredentialsError(f"{path} is open to other users (mode {mode:o}): run chmod 600 {path}")
