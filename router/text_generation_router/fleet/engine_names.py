"""Follows the addresses of a DNS name, at which there are engines."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace

from text_generation_common.cluster.endpoints import TcpEndpoint

logger = logging.getLogger("text_generation_router")

# Seconds between two questions, and until one counts as unanswered.
ASK_S, ANSWER_S = 5.0, 4.0

Resolve = Callable[[str], Awaitable[Iterable[str]]]


async def addresses_of(name: str) -> list[str]:
    """The IP addresses of a DNS name. OSError if it has none, or no DNS server answers."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


class FollowedName:
    """`run` is to be started as a task. It asks for the addresses of `name` again and again, and gives them to
    `connect`.

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
        """`name`: the host is a DNS name."""
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
            # The engines that are known go on: they may well live while DNS does not.
            if not self._has_failed:
                logger.warning("%s has no address: %s", self._name.host, str(error) or "no answer in time")
            self._has_failed = True
            return
        self._has_failed = False
        told = {replace(self._name, host=host, name=self._name.host) for host in found}
        wanted = told | {endpoint for endpoint in self._known - told if self._is_connected(endpoint)}
        if wanted == self._known:
            return
        names = ", ".join(sorted(endpoint.target for endpoint in told))
        logger.info("Engines of %s: %s", self._name.host, names)
        self._known = wanted
        await self._connect(sorted(wanted, key=lambda endpoint: endpoint.target))
