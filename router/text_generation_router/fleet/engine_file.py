"""Follows a file with the addresses of engines, or a folder of such files."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path

from text_generation_common.cluster.endpoints import Endpoint, TcpEndpoint, parse_endpoint
from text_generation_common.errors import ArgumentValidation

# Follows the IP addresses of a DNS name that stands for engines.

# Seconds between two DNS lookups, and until a lookup counts as unanswered.
ASK_S, ANSWER_S = 5.0, 4.0

Resolve = Callable[[str], Awaitable[Iterable[str]]]


async def addresses_of(name: str) -> list[str]:
    """The IP addresses of a DNS name. OSError if it has none, or no DNS server answers."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


class FollowedName:
    """`run` is to be started as a task. `run` looks up the addresses of `name` again and again, and gives the addresses
    to `connect`.

    An address that the name no longer has is kept while its engine is connected: Kubernetes takes the name from an
    engine as soon as it is to end, and the engine's streams go on until it has drained.
    """

    def __init__(
        self,
        name: TcpEndpoint,
        connect: Callable[[Collection[TcpEndpoint]], Awaitable[None]],
        is_connected: Callable[[TcpEndpoint], bool],
        resolve: Resolve = addresses_of,
    ) -> None:
        """`name`: its host is a DNS name."""
        self._name = name
        self._connect = connect
        self._is_connected = is_connected
        self._resolve = resolve
        self._known: set[TcpEndpoint] = set()
        self._has_failed = False

    async def run(self) -> None:
        while True:
            await self._ask()
            await asyncio.sleep(ASK_S)

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await self._resolve(self._name.host)
        except (OSError, TimeoutError) as error:
            # Known engines stay connected: engines may well run while DNS fails.
            if not self._has_failed:
                logger.warning("%s has no address: %s", self._name.host, str(error) or "no answer in time")
            self._has_failed = True
            return
        self._has_failed = False
        listed = {replace(self._name, host=host, name=self._name.host) for host in found}
        wanted = listed | {endpoint for endpoint in self._known - listed if self._is_connected(endpoint)}
        if wanted == self._known:
            return
        names = ", ".join(sorted(endpoint.target for endpoint in listed))
        logger.info("Engines of %s: %s", self._name.host, names)
        self._known = wanted
        await self._connect(sorted(wanted, key=lambda endpoint: endpoint.target))


logger = logging.getLogger("text_generation_router")

# Seconds between two reads of the file.
LOOK_S = 1.0
# Ends of the names of files that are being written: --engine-address-file first writes into a file `….partial`.
UNFINISHED = (".partial", ".tmp", "~")


def endpoints_in(text: str) -> tuple[Endpoint, ...]:
    """The addresses in a file, one in each line or with commas between. ArgumentValidation for any other text, and for
    an empty file, which is still being written."""
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
    """`run` is to be started as a task. `run` reads `path`, a file or a folder of files, again and again, and gives the
    addresses to `connect`. While `path` is missing, has no address or cannot be understood, the engines that are known
    stay."""

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
