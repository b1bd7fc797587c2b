"""One engine and two fronts on one port: each may be killed or replaced, and the others' streams go on."""

import asyncio
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import httpx
import processes
import psutil
import pytest
import reach
from asks import asks
from scale import SHORT, SLOW_STEPS
from server_process import ServerProcess, wait_until
from streams import StreamAnswer, answers_beside, answers_meanwhile, compare

from text_generation_benchmark.metrics import metric
from text_generation_common.tests.slowness import slowness
from text_generation_proto import engine_pb2 as pb
from text_generation_proto import engine_pb2_grpc as pb_grpc

FRONTS = 2
MAX_CONNECTIONS = 120
RESTART_LIMIT_S = 60
ROWS = "tgi_batch_current_size"
# Seconds in which an engine cancels the requests of a front that has died.
CANCEL_LIMIT_S = 1.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ("--api-workers", str(FRONTS), "--max-connections", str(MAX_CONNECTIONS), "--testing")
    with SHORT.server(1, *flags, environ={"FAILPOINTS": SLOW_STEPS}) as server:
        yield server


def test_fronts_and_engine_are_reached_by_the_api_port_and_sockets_of_their_owner_only(server) -> None:
    assert reach.addresses(server.pid) == {("127.0.0.1", server.port)}
    assert reach.open_to_others(server.pid) == []
    paths = reach.unix_sockets(processes.family(server.pid))
    assert len(paths) == 4, "a shard's two sockets, the engine's and the launcher's"


def status_from(address: str, server: ServerProcess, path: str) -> int:
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address)) as client:
        return client.get(server.url + path, timeout=60).status_code


# Half of a request is kept for 30 s, and a connection beyond the limit for a second.
@pytest.mark.parametrize("addresses", [("127.0.0.1",), ("127.0.0.1", "127.0.0.2")], ids=["one", "two"])
def test_half_requests_keep_no_other_address_out(server, addresses: tuple[str, ...]) -> None:
    wait_until_all_accept(server)  # a front has only connections of its own to end
    with ExitStack() as stack:

        def ask_half(source: str) -> None:
            half = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10, (source, 0)))
            half.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 30\r\n\r\n{")

        for number in range(MAX_CONNECTIONS):
            ask_half(addresses[number % len(addresses)])
        # A front may still have counted connections of an earlier test. Each front counts its own by address, so one of
        # two addresses may displace the other in a front.
        while len(addresses) == 1 and status_from(addresses[0], server, "/info") != 503:
            ask_half(addresses[0])
        for address in addresses:
            assert status_from(address, server, "/live") == 200
        for number in range(8):
            assert status_from(f"127.0.0.{3 + number}", server, "/info") == 200


def test_a_killed_engine_is_replaced_and_no_stream_notices(server, one_shard: list[StreamAnswer]) -> None:
    engine, shards, killed_s = processes.engine(server.pid), set(processes.shards(server.pid).values()), 0.0

    def kill() -> None:
        nonlocal killed_s
        with engine_of(server) as stub:
            wait_until(lambda: of_engine(stub, ROWS) > SHORT.num_streams / 2, RESTART_LIMIT_S, "most streams run")
        engine.kill()
        killed_s = time.time()

    answers = answers_meanwhile(server.url, SHORT.asks()[: SHORT.num_streams], kill, settled_s=0.2)
    assert compare([one_shard[answer.ask] for answer in answers], answers).failures() == []
    assert processes.engine(server.pid) != engine
    assert set(processes.shards(server.pid).values()) == shards
    [requests] = re.findall(r" tokens of (\d+) requests of an engine before", server.log())
    assert int(requests) > SHORT.num_streams / 2
    # The newest token that each client had received is computed again, and nothing before it.
    received = [(answer, sum(at_s < killed_s for at_s in answer.arrivals_s)) for answer in answers]
    kept = sorted(prompt_tokens(answer) + number - 1 for answer, number in received if 0 < number < SHORT.new_tokens)
    with engine_of(server) as stub:
        assert of_engine(stub, "tgi_prefix_hit_tokens") >= max(1, sum(kept[: int(requests)]))


def prompt_tokens(answer: StreamAnswer) -> int:
    return int(json.loads(answer.outcome[-1])[1]["input_length"])


@contextmanager
def engine_of(server: ServerProcess) -> Iterator[pb_grpc.EngineServiceStub]:
    [path] = [path for path in reach.unix_sockets(processes.family(server.pid)) if path.endswith("engine")]
    with grpc.insecure_channel(f"unix:{path}") as channel:
        yield pb_grpc.EngineServiceStub(channel)


def of_engine(engine: pb_grpc.EngineServiceStub, name: str) -> float:
    return metric(engine.Metrics(pb.MetricsRequest(), timeout=10).text.decode(), name)


def test_killed_shards_are_replaced_and_no_stream_notices(server, one_shard: list[StreamAnswer]) -> None:
    engine = processes.engine(server.pid)
    shard = processes.shards(server.pid)[0]
    assert SHORT.compared_beside(server.url, one_shard, shard.kill).failures() == []
    assert processes.engine(server.pid) == engine


def test_a_killed_front_costs_its_own_connections_only(server, one_shard: list[StreamAnswer]) -> None:
    before = processes.routers(server.pid)
    assert len(before) == FRONTS
    SHORT.assert_loses_connections_only(server.url, one_shard, before[0].kill)
    wait_until(lambda: len(processes.routers(server.pid)) == FRONTS, 30, "another front is started")
    assert before[1] in processes.routers(server.pid)


def test_requests_of_a_killed_front_leave_the_engine_at_once(server) -> None:
    asked, living = asks(16, 200), 0
    limit_s = CANCEL_LIMIT_S * slowness().clock
    wait_until_all_accept(server)

    def kill() -> None:
        nonlocal living
        victim, other = processes.routers(server.pid)
        living = len(clients_of(server, other))
        if not 0 < living < len(asked):
            return  # one front has taken all connections
        with engine_of(server) as stub:
            wait_until(lambda: of_engine(stub, ROWS) == len(asked), RESTART_LIMIT_S, "all requests run")
            victim.kill()
            took_s = wait_until(lambda: of_engine(stub, ROWS) == living, limit_s, "its requests are cancelled")
            print(f"the requests of a killed front were cancelled after {took_s} s")
            assert [of_engine(stub, ROWS) for _ in range(10)] == [living] * 10, "living requests were cancelled"

    for _ in range(5):
        answers, _ = answers_beside(server.url, asked, len(asked), 20 * len(asked), kill)
        if any(answer.error for answer in answers):
            break
    assert sum(not answer.error for answer in answers) == living < len(asked)


def wait_until_all_accept(server: ServerProcess) -> None:
    """Connects again and again, until every front has a connection."""
    routers = processes.routers(server.pid)
    assert len(routers) == FRONTS
    with ExitStack() as connections:

        def all_accept() -> bool:
            connections.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            return all(clients_of(server, router) for router in routers)

        wait_until(all_accept, RESTART_LIMIT_S, "every front accepts connections")


def clients_of(server: ServerProcess, front: psutil.Process) -> list[Any]:
    """The front's connections to clients that have not left."""
    ours = [each for each in front.net_connections("tcp") if each.laddr.port == server.port]
    return [each for each in ours if each.status == psutil.CONN_ESTABLISHED]


class Asking:
    """Clients that ask one short request after the other, with one kept connection each, or a new connection for each
    request. Any failure is raised."""

    def __init__(self, url: str) -> None:
        self.num_answered = 0
        self._url = url
        self._is_over = False

    def end(self) -> None:
        self._is_over = True

    async def kept(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=RESTART_LIMIT_S) as client:
            while not self._is_over:
                await self._ask(client)

    async def new(self) -> None:
        while not self._is_over:
            async with httpx.AsyncClient(base_url=self._url, timeout=RESTART_LIMIT_S) as client:
                await self._ask(client)

    async def _ask(self, client: httpx.AsyncClient) -> None:
        body = {"inputs": "A fox", "parameters": {"max_new_tokens": 2}}
        for answer in (await client.get("/info"), await client.post("/generate", json=body)):
            assert answer.status_code == 200, answer.text
            self.num_answered += 1


def test_a_restart_of_all_fronts_under_load_fails_no_request(server, one_shard: list[StreamAnswer]) -> None:
    before, template = processes.routers(server.pid), processes.router_template(server.pid)
    asking = Asking(server.url)

    def num_leaving() -> int:
        return len(set(processes.routers(server.pid)) & set(before))

    async def restart() -> None:
        async with asyncio.timeout(RESTART_LIMIT_S), asyncio.TaskGroup() as tasks:
            for ask in (asking.kept, asking.kept, asking.kept, asking.new):
                tasks.create_task(ask())
            os.kill(server.pid, signal.SIGUSR2)
            while "Restarted 2 webservers" not in server.log():
                await asyncio.sleep(0.1)
            answered = asking.num_answered
            while asking.num_answered < answered + 20:
                await asyncio.sleep(0.05)
            asking.end()

    assert SHORT.compared_beside(server.url, one_shard, restart).failures() == []
    wait_until(lambda: not num_leaving(), 30, "the old fronts end")
    assert len(processes.routers(server.pid)) == FRONTS
    assert processes.router_template(server.pid) != template, "the new fronts would have the code of before"


def test_a_front_that_is_ended_by_others_is_replaced_and_no_stream_notices(server, one_shard) -> None:
    before = processes.routers(server.pid)
    assert SHORT.compared_beside(server.url, one_shard, before[0].terminate).failures() == []
    wait_until(lambda: before[0] not in processes.routers(server.pid), 30, "the front has left")
    wait_until(lambda: len(processes.routers(server.pid)) == FRONTS, 30, "another front is there")


def test_metrics_of_any_front_tell_of_all_and_never_fall(server) -> None:
    before = value_of(server, "tgi_request_count"), value_of(server, "tgi_batch_next_size_count")
    assert min(before) > 0, "fronts count requests, the engine counts batches"
    processes.routers(server.pid)[0].kill()
    wait_until(lambda: len(processes.routers(server.pid)) == FRONTS, 30, "another front is started")
    for _ in range(8):  # new connections, so that both fronts answer
        assert value_of(server, "tgi_request_count") >= before[0]


def value_of(server: ServerProcess, name: str) -> float:
    """The sum of the metric's series."""
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[ {{]", line))


def test_sigterm_lets_all_streams_finish(server: ServerProcess, one_shard: list[StreamAnswer]) -> None:
    """The last test, because it ends the server."""
    wait_until_all_accept(server)
    answers, _ = SHORT.beside(server.url, psutil.Process(server.pid).terminate, early_only=True)
    assert compare(one_shard[: SHORT.num_streams], answers).failures() == []
    assert server.stop() == 0
