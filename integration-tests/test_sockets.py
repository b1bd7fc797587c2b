"""Where our processes listen, and who may speak to the shards."""

import stat
from pathlib import Path

import processes
from scale import SHORT
from server_process import ServerProcess


def test_one_shard_listens_on_the_api_port_only(server: ServerProcess) -> None:
    assert processes.listening(processes.family(server.pid)) == {("127.0.0.1", server.port)}


def test_two_shards_listen_on_the_loopback_only() -> None:
    with SHORT.server(2) as server:
        api = ("127.0.0.1", server.port)
        shards = processes.shards(server.pid)
        others = [process for process in processes.family(server.pid) if process not in shards.values()]
        assert processes.listening(others) == {api}
        assert {address for address, _ in processes.listening(shards.values())} <= {"127.0.0.1"}
        assert api not in processes.listening(shards.values())
        assert_private(server, 2)


def test_the_shards_sockets_are_for_their_owner_alone(server: ServerProcess) -> None:
    assert_private(server, 1)


def assert_private(server: ServerProcess, num_shard: int) -> None:
    for rank in range(num_shard):
        status = Path(f"{server.uds_path}-{rank}").stat()
        assert stat.S_ISSOCK(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
