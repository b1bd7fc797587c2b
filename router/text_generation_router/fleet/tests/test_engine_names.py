"""Engines behind a DNS name."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

from text_generation_common.cluster.endpoints import TcpEndpoint
from text_generation_common.tasks import cancelled
from text_generation_router.fleet import engine_file as engine_names
from text_generation_router.fleet.engine_file import FollowedName

NAME = TcpEndpoint("engines.svc", 9000)
LIMIT_S = 30.0


class Dns:
    """A DNS server that answers with `addresses`; None: it does not answer."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: tuple[str, ...] | None = addresses
        self.num_asked = 0
        self.connected: set[str] = set()
        self.told: list[list[TcpEndpoint]] = []

    async def resolve(self, name: str) -> Collection[str]:
        assert name == NAME.host
        self.num_asked += 1
        if self.addresses is None:
            raise OSError("no such name")
        return self.addresses

    async def connect(self, endpoints: Collection[TcpEndpoint]) -> None:
        self.told.append(list(endpoints))

    @property
    def hosts(self) -> list[str]:
        return [endpoint.host for endpoint in self.told[-1]] if self.told else []


def follow(monkeypatch, dns: Dns, scenario: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]) -> None:
    monkeypatch.setattr(engine_names, "ASK_S", 0.0)

    async def run() -> None:
        following = FollowedName(NAME, dns.connect, lambda endpoint: endpoint.host in dns.connected, dns.resolve)
        task = asyncio.create_task(following.run())

        async def asked_again() -> None:
            before = dns.num_asked
            async with asyncio.timeout(LIMIT_S):
                while dns.num_asked < before + 2:
                    await asyncio.sleep(0)

        try:
            await asked_again()
            await scenario(asked_again)
        finally:
            await cancelled(task)

    asyncio.run(run())


def test_addresses_are_followed_and_each_is_asked_for_the_name_in_its_certificate(monkeypatch):
    dns = Dns("10.0.0.2", "10.0.0.1")

    async def scenario(asked_again: Callable[[], Awaitable[None]]) -> None:
        assert dns.told == [[TcpEndpoint(f"10.0.0.{n}", 9000, NAME.host) for n in (1, 2)]]
        await asked_again()
        assert len(dns.told) == 1, "nothing has changed"
        dns.addresses = ("10.0.0.1", "fd00::3")
        await asked_again()
        assert dns.hosts == ["10.0.0.1", "fd00::3"]

    follow(monkeypatch, dns, scenario)


def test_an_engine_that_lost_its_name_is_kept_until_its_connection_ends(monkeypatch):
    dns = Dns("10.0.0.1", "10.0.0.2")

    async def scenario(asked_again: Callable[[], Awaitable[None]]) -> None:
        dns.connected, dns.addresses = {"10.0.0.1", "10.0.0.2"}, ("10.0.0.1",)
        await asked_again()
        assert dns.hosts == ["10.0.0.1", "10.0.0.2"]
        dns.connected = {"10.0.0.1"}
        await asked_again()
        assert dns.hosts == ["10.0.0.1"]

    follow(monkeypatch, dns, scenario)


def test_without_an_answer_of_dns_the_known_engines_stay(monkeypatch, caplog):
    dns = Dns("10.0.0.1")

    async def scenario(asked_again: Callable[[], Awaitable[None]]) -> None:
        dns.addresses = None
        await asked_again()
        await asked_again()
        assert dns.hosts == ["10.0.0.1"]
        warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
        assert warnings == ["engines.svc has no address: no such name"]
        dns.addresses = ("10.0.0.9",)
        await asked_again()
        assert dns.hosts == ["10.0.0.9"]

    follow(monkeypatch, dns, scenario)
