"""The name and the version of the installed distribution."""

import importlib.metadata

NAME = "tgi-py"


def own_version() -> str:
    """0.0.0 in a checkout that is not installed."""
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0"
