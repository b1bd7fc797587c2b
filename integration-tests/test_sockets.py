"""The addresses and sockets on which the server's processes listen, and the permissions of the shards' sockets."""

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import processes
import pytest
import reach
from calls import DEMO_MODEL
from server_process import ServerProcess, wait_until


def test_one_shard_listens_on_the_api_port_only(server: ServerProcess) -> None:
    assert reach.addresses(server.pid) == {("127.0.0.1", server.port)}


def assert_two_shards_listen_on_the_loopback_only(server: ServerProcess) -> None:
    """Called by a test that has a server with two shards (test_quantized_demo.py)."""
    api = ("127.0.0.1", server.port)
    shards = processes.shards(server.pid)
    others = [process for process in processes.family(server.pid) if process not in shards.values()]
    assert processes.listening(others) == {api}
    assert {address for address, _ in processes.listening(shards.values())} <= {"127.0.0.1"}
    assert api not in processes.listening(shards.values())
    assert reach.open_to_others(server.pid) == []
    assert_private(server, 2)


def test_sockets_are_for_their_owner_alone(server: ServerProcess) -> None:
    assert_private(server, 1)
    assert reach.open_to_others(server.pid) == []


def test_sockets_that_others_can_reach_are_found(tmp_path: Path) -> None:
    """The function above finds what it is to find: a socket open to all in an open folder, and an abstract one."""
    paths = [tmp_path / name for name in ("own", "open", "private/open")]
    paths[2].parent.mkdir(mode=0o700)
    tmp_path.chmod(0o755)
    with contextlib.ExitStack() as stack:
        for address, mode in (*zip(map(str, paths), (0o600, 0o666, 0o666), strict=True), ("\0tgi-test", None)):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen()
            if mode is not None:
                os.chmod(address, mode)
        assert reach.open_to_others(os.getpid()) == [str(paths[1]), "@tgi-test"]


def test_a_server_has_a_folder_of_its_port_where_others_find_its_shards_and_sigterm_ends_all_in_order() -> None:
    """Cleaners of /tmp may delete it: the next shard has it again. The server listens at `localhost` alone."""
    with tempfile.TemporaryDirectory(prefix="run-") as name:
        runtime_dir = Path(name)
        flags = ("--max-total-tokens", "64", "--hostname", "localhost")
        with ServerProcess(*flags, runtime_dir=runtime_dir, by_command=True) as server:
            wait_until(lambda: "Serving demo" in server.log(), 60, "the last line of the start")
            lines, url = server.log().splitlines(), server.url
            assert len(lines) <= 25 and any("Connected" in line for line in lines), "\n".join(lines)
            assert lines[-1].endswith(f"Serving demo api={url} docs={url}/docs metrics={url}/metrics"), lines[-1]
            assert reach.addresses(server.pid) == {("127.0.0.1", server.port)}
            assert_private(server, 1)
            assert stat.S_IMODE((runtime_dir / "tgi-py" / str(server.port)).stat().st_mode) == 0o700
            measured = subprocess.run(
                [
                    *(str(Path(sys.executable).parent / "text-generation-benchmark"), "--port", str(server.port)),
                    *("--tokenizer-name", str(DEMO_MODEL), "-b", "1", "-s", "4", "-d", "4", "-r", "1"),
                ],
                env=os.environ | {"XDG_RUNTIME_DIR": name},
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert measured.returncode == 0 and "| Batch Size" in measured.stdout, measured.stdout + measured.stderr
            shutil.rmtree(runtime_dir / "tgi-py")
            [shard] = processes.shards(server.pid).values()
            shard.kill()
            body = {"inputs": "Once", "parameters": {"max_new_tokens": 2}}
            assert httpx.post(f"{server.url}/generate", json=body, timeout=120).status_code == 200
            assert_private(server, 1)
            assert stat.S_IMODE((runtime_dir / "tgi-py" / str(server.port)).stat().st_mode) == 0o700
            assert server.stop() == 0 and "Traceback" not in server.log()
            assert os.listdir(runtime_dir) == []
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{server.url}/health")


def assert_private(server: ServerProcess, num_shard: int) -> None:
    for rank in range(num_shard):
        for end in ("", ".steps"):
            status = Path(f"{server.uds_path}-{rank}{end}").stat()
            assert stat.S_ISSOCK(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
