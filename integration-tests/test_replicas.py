"""Three replicas and two fronts on one machine: replicas are killed, taken away and added, and no stream notices."""

import asyncio
import statistics
import subprocess
from collections.abc import Awaitable, Callable, Iterator

import httpx
import processes
import pytest
import reach
from calls import metric
from scale import SHORT
from server_process import LAUNCHER, ServerProcess, wait_until
from streams import StreamAnswer, StreamClients, compare, run_streams
from tenants import greedy_answers_meanwhile

REPLICAS, FRONTS, ROWS = 3, 2, 24  # rows of each replica
LIMIT_S = 120
ADMIN = {"Authorization": "Bearer an-administrator"}
QUARTER = SHORT.num_streams * SHORT.new_tokens // 4
Disturb = Callable[[StreamClients], Awaitable[None]]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    environ = {"ADMIN_API_KEY": ADMIN["Authorization"].removeprefix("Bearer ")}
    flags = ("--replicas", str(REPLICAS), "--api-workers", str(FRONTS), "--max-batch-size", str(ROWS))
    with SHORT.server(1, *flags, environ=environ) as server:
        wait_until(lambda: states(server) == ["ready"] * REPLICAS, LIMIT_S, "all replicas are ready")
        yield server


def states(server: ServerProcess) -> list[str]:
    """The states of the replicas, by the front that answers."""
    answer = httpx.get(f"{server.url}/admin/replicas", headers=ADMIN, timeout=30)
    return sorted(replica["state"] for replica in answer.json()["replicas"])


async def until(server: ServerProcess, expected: list[str]) -> None:
    await asyncio.to_thread(wait_until, lambda: states(server) == expected, LIMIT_S, f"replicas are {expected}")


def assert_equal_beside(server: ServerProcess, expected: list[StreamAnswer], disturb: Disturb) -> None:
    """Every stream ends with its text while `disturb` runs."""
    answers, _ = run_streams(server.url, SHORT.asks(), SHORT.num_streams, disturb)
    assert str(compare(expected, answers)) == str(compare(expected, expected))


def test_the_api_s_port_alone_is_open_and_no_socket_is_for_other_users(server) -> None:
    assert reach.addresses(server.pid) == {("127.0.0.1", server.port)}
    assert reach.open_to_others(server.pid) == []
    paths = reach.unix_sockets(processes.family(server.pid))
    assert len([path for path in paths if path.endswith("-engine")]) == REPLICAS


def test_replicas_are_taken_away_and_added_under_load_and_no_stream_notices(server, one_shard) -> None:
    engines = processes.engines(server.pid)
    assert engines.keys() == processes.shards_of_replicas(server.pid).keys() == set(range(REPLICAS))

    async def scale(clients: StreamClients) -> None:
        await clients.wait_for_tokens(QUARTER)
        async with httpx.AsyncClient(headers=ADMIN, timeout=30) as client:
            answer = await client.post(f"{server.url}/admin/replicas", json={"replicas": 1})
        assert (answer.status_code, answer.json()["wanted"]) == (200, 1)
        await until(server, ["ready"])
        command = [str(LAUNCHER), "scale", "3", "--shard-uds-path", server.uds_path]
        told = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert told.stdout.startswith("3 wanted"), told.stderr
        await until(server, ["ready"] * REPLICAS)

    assert_equal_beside(server, one_shard, scale)
    assert processes.engines(server.pid)[0] == engines[0]


def test_a_client_with_many_requests_at_all_replicas_does_not_crowd_out_another(server) -> None:
    """Each engine counts what the others have served to a client: also where the greedy client has few requests, the
    modest one goes first."""
    num_queued = 150

    def is_crowded() -> bool:
        return metric(server.url, "tgi_queue_size") >= num_queued * 3 / 4

    counts = asyncio.run(greedy_answers_meanwhile(server.url, REPLICAS * ROWS + num_queued, is_crowded))
    print(f"answers to the greedy client while the modest one waits: {counts}")
    assert statistics.median(counts) < num_queued / 5


def test_a_killed_engine_and_a_killed_shard_of_other_replicas_cost_no_stream(server, one_shard) -> None:
    async def kill(clients: StreamClients) -> None:
        await clients.wait_for_tokens(QUARTER)
        processes.engines(server.pid)[0].kill()
        processes.shards_of_replicas(server.pid)[1].kill()

    assert_equal_beside(server, one_shard, kill)
    wait_until(lambda: states(server) == ["ready"] * REPLICAS, LIMIT_S, "both are replaced")


def test_a_killed_front_costs_its_own_connections_only(server, one_shard: list[StreamAnswer]) -> None:
    engines = processes.engines(server.pid)
    victim, other = processes.routers(server.pid)

    async def kill(clients: StreamClients) -> None:
        await clients.wait_for_tokens(QUARTER)
        victim.kill()

    answers, _ = run_streams(server.url, SHORT.asks(), SHORT.num_streams, kill)
    ended = [(expected, got) for expected, got in zip(one_shard, answers, strict=True) if not got.error]
    assert compare([expected for expected, _ in ended], [got for _, got in ended]).is_equal
    assert ended, "the living front had no stream"
    wait_until(lambda: len(processes.routers(server.pid)) == FRONTS, LIMIT_S, "another front is started")
    assert other in processes.routers(server.pid)
    assert processes.engines(server.pid) == engines
