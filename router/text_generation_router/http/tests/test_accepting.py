"""Several servers that accept from one socket: how connections are shared out, and what the limit counts."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from text_generation_common.connection_counts import ConnectionCounts, make_file
from text_generation_router.http.accepting import SharedListener, SharedPlace, takes_next

LIMIT_S = 30


@pytest.mark.parametrize(
    ("own", "others", "takes"),
    [
        (9, [], True),
        (0, [0], True),
        (1, [0, 5], False),
        (7, [7], True),
        (8, [7, 9], False),
        (9, [8], True),
        (10, [8], False),
        (18, [16], True),
    ],
)
def test_a_front_with_more_connections_than_another_waits(own: int, others: list[int], takes: bool) -> None:
    assert takes_next(own, others) is takes


class Sites:
    """Listeners of one socket within one process, each with a copy as fronts in several processes have it."""

    def __init__(self, number: int) -> None:
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.file = make_file()
        self.counts = ConnectionCounts(self.file)
        self.open: list[list[asyncio.Transport]] = [[] for _ in range(number)]
        self.listeners = [self._listener(place) for place in range(number)]

    def _listener(self, place: int) -> SharedListener:
        transports = self.open[place]

        class Connected(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                assert isinstance(transport, asyncio.Transport)
                transports.append(transport)

        shared = SharedPlace(ConnectionCounts(self.file), place)
        return SharedListener(self.socket.dup(), Connected, lambda: len(transports), shared)

    @property
    def shares(self) -> list[int]:
        return [len(transports) for transports in self.open]

    async def until_open(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while sum(self.shares) < count:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def sites(number: int) -> AsyncIterator[Sites]:
    made = Sites(number)
    try:
        for listener in made.listeners:
            listener.listen(128)
        yield made
    finally:
        for listener in made.listeners:
            listener.close()
            await listener.wait_closed()
        for transport in (transport for transports in made.open for transport in transports):
            transport.abort()
        made.socket.close()
        os.close(made.file)


def connect(address: tuple[str, int], count: int) -> list[socket.socket]:
    return [socket.create_connection(address) for _ in range(count)]


async def test_connections_that_come_at_once_are_shared_out() -> None:
    async with sites(4) as made:
        clients = connect(made.socket.getsockname(), 64)
        await made.until_open(64)
        assert max(made.shares) - min(made.shares) <= 4, made.shares
        for client in clients:
            client.close()


async def test_a_front_that_does_not_accept_delays_the_others_for_moments_only() -> None:
    async with sites(2) as made:
        made.counts.set(9, 0)  # a front that is stopped
        clients = connect(made.socket.getsockname(), 16)
        await made.until_open(16)
        for client in clients:
            client.close()


async def test_after_one_has_closed_the_others_take_its_connections() -> None:
    async with sites(2) as made:
        made.listeners[0].close()
        assert not made.listeners[0].is_serving() and made.listeners[1].is_serving()
        clients = connect(made.socket.getsockname(), 8)
        await made.until_open(8)
        assert made.shares == [0, 8]
        made.listeners[0].note()
        assert made.counts.elsewhere(1) == [], "a closed listener has left its place"
        for client in clients:
            client.close()


def test_connections_elsewhere_are_those_of_all_other_fronts() -> None:
    file = make_file()
    first, second = (SharedPlace(ConnectionCounts(file), place) for place in (0, 1))
    first.note(3)
    second.note(4)
    assert (first.num_elsewhere(), second.num_elsewhere(), first.others()) == (4, 3, [4])
    second.leave()
    assert first.num_elsewhere() == 0
    os.close(file)


def test_another_file_is_refused() -> None:
    reading, writing = os.pipe()
    with pytest.raises((OSError, ValueError)):
        ConnectionCounts(reading)
    os.close(reading)
    os.close(writing)
