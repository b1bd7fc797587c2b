"""Follows a file with the addresses of engines, or a folder of such files."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from text_generation_common.cluster.endpoints import Endpoint, parse_endpoint
from text_generation_common.errors import ArgumentValidation

logger = logging.getLogger("text_generation_router")

# Seconds between two looks at the file.
LOOK_S = 1.0
# Ends of the names of files that are being written: --engine-address-file first writes into a file `….partial`.
UNFINISHED = (".partial", ".tmp", "~")


def endpoints_in(text: str) -> tuple[Endpoint, ...]:
    """The addresses in a file, one in each line or with commas between. ArgumentValidation for any other text, and for
    none: an empty file is one that is being written."""
    words = tuple(word.strip() for word in text.replace("\n", ",").split(","))
    found = tuple(parse_endpoint(word) for word in dict.fromkeys(filter(None, words)))
    if not found:
        raise ArgumentValidation("there is no address in it")
    return found


def text_at(path: Path) -> str:
    """The text of the file `path`, or of all files in the folder `path`, one after another. OSError or
    UnicodeDecodeError if it cannot be read."""
    if not path.is_dir():
        return path.read_text()
    return "\n".join(map(_text_of_one, sorted(filter(_is_finished, path.iterdir()))))


def _is_finished(path: Path) -> bool:
    return not path.name.startswith(".") and not path.name.endswith(UNFINISHED) and not path.is_dir()


def _text_of_one(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:  # an engine that ends removes its file, maybe after the folder was listed
        return ""


class FollowedFile:
    """`run` is to be started as a task. It reads `path`, a file or a folder of files, again and again, and gives the
    addresses to `connect`. While `path` is missing, has no address or cannot be understood, the engines that are
    known stay."""

    def __init__(self, path: Path, connect: Callable[[Collection[Endpoint]], Awaitable[None]]) -> None:
        self._path = path
        self._connect = connect
        self._known: frozenset[Endpoint] = frozenset()
        self._problem = ""

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        try:
            found = endpoints_in(text_at(self._path))
        except (OSError, UnicodeDecodeError) as error:
            return self._complain(error.strerror if isinstance(error, OSError) and error.strerror else str(error))
        except ArgumentValidation as error:
            return self._complain(error.reason)
        self._problem = ""
        if (wanted := frozenset(found)) != self._known:
            self._known = wanted
            logger.info("Engines in %s: %s", self._path, ", ".join(endpoint.target for endpoint in found))
            await self._connect(found)

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            logger.warning("--engines-file %s: %s; the engines that are known stay", self._path, problem)
        self._problem = problem
