"""Three replicas and two fronts on one machine: replicas are killed, taken away and added, and no stream notices."""

import asyncio
import statistics
import subprocess
from collections.abc import Iterator

import httpx
import processes
import pytest
import reach
from calls import metric
from scale import SHORT
from server_process import LAUNCHER, ServerProcess, wait_until
from streams import StreamAnswer
from tenants import greedy_answers_meanwhile

REPLICAS, FRONTS, ROWS = 3, 2, 24  # rows of each replica
LIMIT_S = 120
ADMIN = {"Authorization": "Bearer an-administrator"}


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


def test_the_api_s_port_alone_is_open_and_no_socket_is_for_other_users(server) -> None:
    assert reach.addresses(server.pid) == {("127.0.0.1", server.port)}
    assert reach.open_to_others(server.pid) == []
    paths = reach.unix_sockets(processes.family(server.pid))
    assert len([path for path in paths if path.endswith("-engine")]) == REPLICAS


def test_replicas_are_taken_away_and_added_under_load_and_no_stream_notices(server, one_shard) -> None:
    engines = processes.engines(server.pid)
    assert engines.keys() == processes.shards_of_replicas(server.pid).keys() == set(range(REPLICAS))

    async def scale() -> None:
        async with httpx.AsyncClient(headers=ADMIN, timeout=30) as client:
            answer = await client.post(f"{server.url}/admin/replicas", json={"replicas": 1})
        assert (answer.status_code, answer.json()["wanted"]) == (200, 1)
        await until(server, ["ready"])
        command = [str(LAUNCHER), "scale", "3", "--shard-uds-path", server.uds_path]
        told = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert told.stdout.startswith("3 wanted"), told.stderr
        await until(server, ["ready"] * REPLICAS)

    assert SHORT.compared_beside(server.url, one_shard, scale).failures() == []
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
    victims = processes.engines(server.pid)[0], processes.shards_of_replicas(server.pid)[1]

    def kill() -> None:
        for victim in victims:
            victim.kill()

    def are_replaced() -> bool:
        engine, shard = processes.engines(server.pid).get(0), processes.shards_of_replicas(server.pid).get(1)
        return None not in (engine, shard) and not {engine, shard} & {*victims}

    assert SHORT.compared_beside(server.url, one_shard, kill).failures() == []
    wait_until(are_replaced, LIMIT_S, "both are replaced")
    wait_until(lambda: states(server) == ["ready"] * REPLICAS, LIMIT_S, "all replicas are ready")


def test_a_killed_front_costs_its_own_connections_only(server, one_shard: list[StreamAnswer]) -> None:
    engines = processes.engines(server.pid)
    victim, other = processes.routers(server.pid)
    SHORT.assert_loses_connections_only(server.url, one_shard, victim.kill)
    wait_until(lambda: len(processes.routers(server.pid)) == FRONTS, LIMIT_S, "another front is started")
    assert other in processes.routers(server.pid)
    assert processes.engines(server.pid) == engines
