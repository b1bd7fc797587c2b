"""The key of the block hashes, which all fronts and engines of a deployment have (router `fleet/cache_news.py`).

With the key, guesses of what is cached can be tested against the hashes. Fronts and engines with different keys
serve all requests, but no front finds what an engine has cached.
"""

import re
import secrets
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from text_generation_common.cluster.files import read_file
from text_generation_common.errors import CredentialsError

VARIABLE = "BLOCK_HASH_KEY"
FILE = "cluster.key"
KEY_BYTES = 32
_HEX = re.compile(f"[0-9a-fA-F]{{{2 * KEY_BYTES}}}")
_NEEDED = f"{2 * KEY_BYTES} hexadecimal digits"
# Deployments without certificates, and without a key, have this one on all machines. It is not a secret.
_KNOWN_TO_ALL = blake2b(b"tgi insecure cluster", digest_size=KEY_BYTES).hexdigest()


def new_key() -> str:
    return secrets.token_hex(KEY_BYTES)


def parse_key(text: str) -> bytes | None:
    """The key of the environment variable; None if it is empty. ValueError: it is not a key."""
    if not text:
        return None
    if _HEX.fullmatch(text) is None:
        raise ValueError(f"{VARIABLE} in the environment is not a key: give {_NEEDED}, as `openssl rand -hex 32` does")
    return bytes.fromhex(text)


def read_key(folder: Path) -> str | None:
    """The key in a folder of certificates; None: there is none, as in those that cert-manager makes. CredentialsError:
    it is not a key, or other users can read it."""
    path = folder / FILE
    if not path.exists():
        return None
    text = read_file(path, is_key=True).decode("ascii", "replace").strip()
    if _HEX.fullmatch(text) is None:
        raise CredentialsError(
            f"{path} is not a key of {_NEEDED}: copy it from another folder of the deployment, or delete it there and"
            " run `text-generation-launcher certs DIR HOST…` again"
        )
    return text


def with_key(environ: Mapping[str, str], tls_dir: Path | None, is_insecure: bool) -> dict[str, str]:
    """The environment for a server's fronts and engines: with the key that is given there, or that of `tls_dir`. A
    server without other machines has a key of its own. Without any key engines do not tell their caches.
    CredentialsError as of `read_key`, or if the given key is not one."""
    if environ.get(VARIABLE):
        try:
            parse_key(environ[VARIABLE])
        except ValueError as error:
            raise CredentialsError(str(error)) from None
        return dict(environ)
    if tls_dir is None:
        return {**environ, VARIABLE: _KNOWN_TO_ALL if is_insecure else new_key()}
    key = read_key(tls_dir)
    return {**environ, VARIABLE: key} if key is not None else dict(environ)
