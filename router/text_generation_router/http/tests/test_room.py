"""Which connections are admitted, compared with a plain count of all, for random arrivals, requests and departures."""

import random
from collections import Counter

import pytest

from text_generation_router.http.room import MAX_BEYOND, ConnectionRoom

PLACES, ELSEWHERE = 12, 4


class Client:
    """A connection that leaves when it is told to make room."""

    def __init__(self, crowd: "Crowd", address: str) -> None:
        self.crowd, self.address = crowd, address
        self.has_request = self.is_admitted = False

    def make_room(self) -> None:
        self.crowd.ended.append(self)


class Crowd:
    def __init__(self) -> None:
        self.room = ConnectionRoom(PLACES + ELSEWHERE, lambda: ELSEWHERE)
        self.open: list[Client] = []
        self.ended: list[Client] = []

    def waiting(self) -> Counter[str]:
        return Counter(client.address for client in self.open if client.is_admitted and not client.has_request)

    def come(self, address: str) -> None:
        newcomer, before = Client(self, address), self.waiting()
        num_admitted = sum(client.is_admitted for client in self.open)
        newcomer.is_admitted = self.room.admits(newcomer, address)
        self.open.append(newcomer)
        largest = max(before.values(), default=0)
        assert newcomer.is_admitted is (num_admitted < PLACES or largest > before[address])
        for client in self.ended:
            self.open.remove(client)
            assert not (client.is_admitted and client.has_request)
            assert not client.is_admitted or before[client.address] == largest
        assert len(self.ended) <= 1 and (num_admitted == PLACES or not self.ended)
        self.ended.clear()


@pytest.mark.parametrize("seed", range(5))
def test_the_address_with_most_connections_that_wait_makes_room_and_no_request_is_lost(seed: int) -> None:
    crowd, drawn = Crowd(), random.Random(seed)
    for _ in range(4000):
        action = drawn.choice(("come", "come", "ask", "answer", "leave"))
        client = drawn.choice(crowd.open) if crowd.open else None
        if action == "come" or client is None:
            crowd.come(drawn.choice(("a", "a", "a", "b", "c", "d")))
        elif action == "leave":
            crowd.open.remove(client)
            crowd.room.leave(client)
        else:
            client.has_request = action == "ask"
            (crowd.room.work if client.has_request else crowd.room.wait)(client)
        admitted = [client for client in crowd.open if client.is_admitted]
        assert len(admitted) <= PLACES and len(crowd.open) - len(admitted) <= MAX_BEYOND


def test_the_oldest_connection_beyond_the_limit_ends_when_there_are_too_many() -> None:
    crowd = Crowd()
    for _ in range(PLACES + MAX_BEYOND):
        crowd.come("a")
    first = crowd.open[PLACES]
    crowd.come("a")
    assert first not in crowd.open and len(crowd.open) == PLACES + MAX_BEYOND
