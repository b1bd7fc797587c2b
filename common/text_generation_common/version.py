"""The name and the version of the installed distribution, which is all that Hugging Face's libraries may tell their hub
about this program.
"""

import importlib.metadata
from collections.abc import MutableMapping
from typing import TypedDict

NAME = "tgi-py"


def own_version() -> str:
    """0.0.0 in a checkout that is not installed."""
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0"


# Hugging Face's libraries read these variables when they are imported. Without them they ask the hub for a list of
# programs that may run them, and name installed packages in each request.
OFF = {"HF_HUB_DISABLE_TELEMETRY": "1"}


class Named(TypedDict):
    library_name: str
    library_version: str


def turn_reports_off(environ: MutableMapping[str, str]) -> None:
    """To be called before such a library is imported, with this process's environment, which its children inherit."""
    environ.update(OFF)


def named() -> Named:
    """Arguments of the libraries' functions: requests are sent in the name of this program."""
    return Named(library_name=NAME, library_version=own_version())
