"""Keeps keys and tokens from processes that do not need them: out of their environment and off their command line."""

import ctypes
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

# How the names of variables with secrets end: API_KEY, ADMIN_API_KEY, HF_TOKEN and the hub's older names for it,
# BLOCK_HASH_KEY, AWS_SECRET_ACCESS_KEY, OTEL_EXPORTER_OTLP_HEADERS.
_ENDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIALS", "HEADERS")
# Places in /proc/self/stat, behind the program's name, of the borders of the memory with arguments and environment.
_ARGUMENTS, _ENVIRONMENT = slice(45, 47), slice(47, 49)


def is_secret(variable: str) -> bool:
    return variable.upper().endswith(_ENDS)


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child that reads strangers' input, or has no use for secrets."""
    return {name: value for name, value in environ.items() if not is_secret(name)}


def inherited_environment() -> dict[str, str]:
    """The environment of this process, for such a child."""
    return without_secrets(os.environ)


def hide_arguments(secrets: Collection[str]) -> bool:
    """Overwrites `secrets` on the command line that other users can read in /proc. Returns whether one was there."""
    return _hide(_ARGUMENTS, [secret for secret in secrets if secret])


def hide_environment(environ: Mapping[str, str]) -> None:
    """Overwrites the secrets of `environ` where /proc shows this process's environment. The process must not need them
    any more."""
    _hide(_ENVIRONMENT, [value for name, value in environ.items() if value and is_secret(name)])


def _hide(borders: slice, secrets: Collection[str]) -> bool:
    if sys.platform != "linux" or not secrets:
        return False
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[borders])
    hidden = content = b"\0" + ctypes.string_at(start, end - start)
    for secret in secrets:
        value = secret.encode(errors="surrogateescape")
        for before in (b"\0", b"="):
            hidden = hidden.replace(before + value + b"\0", before + b"*" * len(value) + b"\0")
    ctypes.memmove(start, hidden[1:], end - start)
    return hidden != content
