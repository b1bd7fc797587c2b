"""Whether the packages of tgi-py[cluster] are installed."""

from importlib.util import find_spec

from text_generation_common.errors import CredentialsError


def require_cryptography() -> None:
    """CredentialsError if the package that reads and makes certificates is not installed. Called before the modules
    `certificates.py` and `issuing.py` are imported, because only they need the package."""
    if find_spec("cryptography") is None:
        raise CredentialsError(
            "certificates need the package cryptography, which is not installed: pip install 'tgi-py[cluster]'"
        )
