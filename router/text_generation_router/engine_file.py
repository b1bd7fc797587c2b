"""Follows a file with the addresses of engines."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from text_generation_common.cluster.endpoints import Endpoint, parse_endpoint
from text_generation_common.errors import ArgumentValidation

logger = logging.getLogger("text_generation_router")

# Seconds between two looks at the file.
LOOK_S = 1.0


def endpoints_in(text: str) -> tuple[Endpoint, ...]:
    """The addresses in a file, one in each line or with commas between. ArgumentValidation for any other text, and for
    none: an empty file is one that is being written."""
    words = tuple(word.strip() for word in text.replace("\n", ",").split(","))
    found = tuple(parse_endpoint(word) for word in dict.fromkeys(filter(None, words)))
    if not found:
        raise ArgumentValidation("the file has no address")
    return found


class FollowedFile:
    """`run` is to be started as a task. It reads `path` again and again, and gives the addresses to `connect`. While
    the file is missing or cannot be understood, the engines that are known stay."""

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
            found = endpoints_in(self._path.read_text())
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
