"""Whole servers on real Ray clusters, with Ray's token and TLS and our own certificates: on one node, which has room
for two replicas, and on two machines."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import processes
import psutil
import pytest
import reach
from asks import asks
from calls import read_metric
from machines import WITHOUT, Network, can_be_made
from ray_nodes import RayNodes, local_ray
from server_process import LAUNCHER, free_port, wait_until
from streams import StreamAnswer, StreamClients, compare, run_streams

import text_generation_server
from text_generation_common.flags.cluster import RAY_METRICS_PORTS

LIMIT_S = 180.0
ADMIN = "an-administrator"
FLAGS = ("--dtype", "float32", "--max-total-tokens", "512")
ASKED, EARLY = asks(20, 48), 16
DRIVER = "text_generation_launcher.ray.driver"
PROBE = """
import json, sys, ray
from ray.util import list_named_actors, placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
groups = [group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
print(json.dumps([list_named_actors(all_namespaces=True), groups]))
"""

pytestmark = pytest.mark.ray


class RayServer:
    """A launcher with --ray, and what it has brought about elsewhere. `environment`: what Ray needs."""

    def __init__(self, folder: Path, address: str, environment: Mapping[str, str], host: str = "127.0.0.1") -> None:
        self.log = folder / "server.log"
        self.port = free_port()
        self.url = f"http://{host}:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self._address = address
        self._environment = os.environ | environment | {"ADMIN_API_KEY": ADMIN}
        self._tls = folder / "tls"
        self._folder = folder

    def command(self, *flags: str) -> list[str]:
        where = ("--port", str(self.port), "--ray", self._address, "--tls-dir", "tls")
        return [str(LAUNCHER), *where, *FLAGS, *flags]

    def certify(self, *hosts: str) -> None:
        subprocess.run([str(LAUNCHER), "certs", str(self._tls), *hosts], check=True, capture_output=True)

    def start(self, *flags: str) -> None:
        # The relative path of the certificates has to hold for actors too.
        with self.log.open("ab") as log:
            command = self.command("--hostname", "127.0.0.1", *flags)
            self.process = subprocess.Popen(command, env=self._environment, cwd=self._folder, stdout=log, stderr=log)

    def is_healthy(self, url: str = "") -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"the server has ended: {self.log.read_text()[-3000:]}")
        try:
            return httpx.get(f"{url or self.url}/health", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    def replicas(self) -> list[str]:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        answer = httpx.get(f"{self.url}/admin/replicas", headers=headers, timeout=30).json()
        return sorted(replica["state"] for replica in answer["replicas"])

    def end(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)

    def launchers(self, word: str = "") -> list[psutil.Process]:
        """The launchers that actors have started, those with `word` on their command line."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or ()
            ours = "text_generation_launcher.cli" in words and any(str(self._folder) in each for each in words)
            if ours and word in (*words, "") and not is_janitor(process):
                found.append(process)
        return found

    def restart_fronts(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGUSR2)

    def fronts_log(self) -> str:
        """What the launcher of the fronts on another machine has logged."""
        [fronts] = self.launchers("--engines-file")
        words = fronts.cmdline()
        return (Path(words[words.index("--engines-file") + 1]).parent / "log").read_text()

    def on_ray(self) -> Any:
        """The actors and the placement groups that Ray has."""
        probe = [sys.executable, "-c", PROBE, self._address]
        done = subprocess.run(probe, env=self._environment, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        return json.loads(done.stdout)

    def assert_nothing_is_left(self) -> None:
        assert (self.launchers(), self.on_ray()) == ([], [[], []])
        assert "*** SIGTERM" not in self.log.read_text(), "Ray's stack trace"


def is_janitor(process: psutil.Process) -> bool:
    """Whether the process is the one that a launcher has forked, with the launcher's command line."""
    with suppress(psutil.Error):
        parent = process.parent()
        return parent is not None and parent.cmdline() == process.cmdline()
    return True  # The process has just ended.


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    # A short path: sockets of Ray lie in it.
    with tempfile.TemporaryDirectory(prefix="tgi", dir="/tmp") as name, pytest.MonkeyPatch.context() as patch:
        runtime = Path(name) / "run"
        runtime.mkdir(mode=0o700)
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        yield Path(name)


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[tuple[str, dict[str, str]]]:
    with local_ray(place, cpus=2) as found:
        yield found


@pytest.fixture
def server(place: Path, cluster: tuple[str, dict[str, str]]) -> Iterator[RayServer]:
    server = RayServer(place, *cluster)
    server.certify(cluster[0].rpartition(":")[0])
    yield server
    if server.process is not None:
        # A launcher that is killed leaves its actors to the next test, which then has no room.
        with suppress(subprocess.TimeoutExpired):
            server.end()
        server.process.kill()
    for process in server.launchers():
        process.kill()


def is_pending(pages: list[str]) -> bool:
    """Whether the newest of these pages of metrics, which may be some seconds old, tells of a replica without room."""
    return bool(pages) and read_metric(pages[-1], 'tgi_replicas{state="pending"}') == 1


def test_the_number_of_replicas_follows_the_load_and_one_without_room_is_pending(server: RayServer) -> None:
    server.start("--min-replicas", "1", "--max-replicas", "3", "--replica-cores", "1", "--max-batch-size", "2")
    wait_until(server.is_healthy, LIMIT_S, "the server is healthy")
    wait_until(lambda: server.replicas() == ["ready"], LIMIT_S, "the replica is ready")
    many = asks(150, 100)
    seen: set[tuple[str, ...]] = set()
    pages: list[str] = []

    async def look(clients: StreamClients) -> None:
        """Looks while the load lasts: without it, the replicas become fewer again."""
        async with asyncio.timeout(LIMIT_S):
            while not is_pending(pages) and clients.num_tokens < 150 * 100:
                seen.add(tuple(await asyncio.to_thread(server.replicas)))
                if ("pending", "ready", "ready") in seen:
                    pages.append((await asyncio.to_thread(httpx.get, f"{server.url}/metrics", timeout=30)).text)
                await asyncio.sleep(0.1)

    answers, _ = run_streams(server.url, many, 100, look)
    assert ("pending", "ready", "ready") in seen, seen
    assert [answer.error for answer in answers if answer.error or len(answer.ids) != 100] == []
    assert is_pending(pages)
    assert server.end() == 0
    server.assert_nothing_is_left()


def engine_pages(host: str, first: int) -> list[str]:
    """The metrics of the engines of one machine, on the ports that they share out."""
    pages = []
    for port in range(first, first + RAY_METRICS_PORTS):
        with suppress(httpx.HTTPError):
            pages.append(httpx.get(f"http://{host}:{port}/metrics", timeout=10).text)
    return pages


def assert_no_port_is_open_beside_ray_s(server: RayServer, host: str, first_metrics_port: int) -> None:
    """But the API's, and two for each engine on its machine's address: for fronts, and for metrics."""
    assert server.process is not None
    driver = [each for each in processes.family(server.process.pid) if DRIVER in each.cmdline()]
    assert driver
    of_ray = {(address.removeprefix("::ffff:"), port) for address, port in processes.listening(driver)}
    assert reach.addresses(server.process.pid) - of_ray == {("127.0.0.1", server.port)}
    metrics = range(first_metrics_port, first_metrics_port + RAY_METRICS_PORTS)
    for launcher in server.launchers("--engine-only"):
        found = reach.addresses(launcher.pid)
        assert [address for address, _ in found] == [host, host]
        assert len([port for _, port in found if port in metrics]) == 1


def test_engines_of_one_machine_share_out_the_ports_of_their_metrics(
    server: RayServer, cluster: tuple[str, dict[str, str]]
) -> None:
    first = free_port()
    server.start("--replicas", "2", "--replica-cores", "0.5", "--engine-metrics-port", str(first))
    wait_until(server.is_healthy, LIMIT_S, "the server is healthy")
    wait_until(lambda: server.replicas() == ["ready", "ready"], LIMIT_S, "both replicas are ready")
    pages = engine_pages(cluster[0].rpartition(":")[0], first)
    assert ["\ntgi_queue_size " in page for page in pages] == [True, True]
    assert_no_port_is_open_beside_ray_s(server, cluster[0].rpartition(":")[0], first)
    assert server.end() == 0
    server.assert_nothing_is_left()


def test_a_server_that_is_ended_during_its_start_leaves_nothing(server: RayServer) -> None:
    server.start("--replicas", "2", "--replica-cores", "0.5")
    wait_until(server.launchers, LIMIT_S, "an engine starts")
    assert server.end() == 0
    server.assert_nothing_is_left()


def test_a_start_that_fails_leaves_nothing(server: RayServer, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(Path(text_generation_server.__file__).parent / "demo_model", model)
    (model / "tokenizer.json").write_text("{}")
    server.start("--replicas", "2", "--replica-cores", "0.5", "--model-id", str(model))
    assert server.process is not None and server.process.wait(LIMIT_S) == 1
    assert "cannot be read as a tokenizer" in server.log.read_text()
    server.assert_nothing_is_left()


@pytest.mark.skipif(not can_be_made(), reason=WITHOUT)
def test_fronts_run_on_every_machine_follow_the_engines_and_drain_with_the_command(place: Path) -> None:
    folder = place / "two"
    folder.mkdir()
    with Network(2) as network:
        here, there = network.machines
        cluster = RayNodes(folder, network, cpus=1)
        cluster.start_head(0)
        cluster.start_node(1)
        server = RayServer(folder, cluster.address, cluster.environment(here), here.address)
        server.certify(here.address, there.address)
        command = server.command("--replicas", "2", "--replica-cores", "0.5", "--fronts-on-every-node")
        server.process = here.start(
            ["env", "-C", str(folder), *command], server.log, cluster.environment(here) | {"ADMIN_API_KEY": ADMIN}
        )
        other = f"http://{there.address}:{server.port}"
        try:
            wait_until(lambda: server.is_healthy() and server.is_healthy(other), LIMIT_S, "both machines serve")
            wait_until(lambda: server.replicas() == ["ready", "ready"], LIMIT_S, "both replicas serve")
            walk_through(server, other)
        finally:
            print(server.log.read_text()[-20_000:])
            for file in place.glob("run/tgi-py/ray-fronts-*/*/log"):
                print(file, file.read_text()[-5000:])


def walk_through(server: RayServer, other: str) -> None:
    expected, _ = run_streams(server.url, ASKED, EARLY)

    def assert_equal(answers: list[StreamAnswer], what: str) -> None:
        assert (what, compare(expected, answers).failures()) == (what, [])

    async def kill_an_engine(clients: StreamClients) -> None:
        await clients.wait_for_tokens(200)
        server.launchers("--engine-only")[0].kill()

    def kill_an_actor(title: str) -> Callable[[StreamClients], Awaitable[None]]:
        async def kill(clients: StreamClients) -> None:
            await clients.wait_for_tokens(200)
            every = psutil.process_iter(["cmdline"])
            hosts = [each for each in every if "".join(each.info["cmdline"] or ()).startswith(title)]
            actors = [each for each in hosts if str(server.log.parent) in str((each.parent() or each).cmdline())]
            actors[0].kill()

        return kill

    async def scale(clients: StreamClients) -> None:
        await clients.wait_for_tokens(200)
        headers = {"Authorization": f"Bearer {ADMIN}"}
        async with httpx.AsyncClient(headers=headers, timeout=30) as client:
            answer = await client.post(f"{server.url}/admin/replicas", json={"replicas": 1})
        assert answer.status_code == 200

    async def restart_fronts(clients: StreamClients) -> None:
        await clients.wait_for_tokens(200)
        server.restart_fronts()

    async def end(clients: StreamClients) -> None:
        await clients.wait_for_tokens(200)
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)

    assert_equal(run_streams(other, ASKED, EARLY)[0], "undisturbed")
    assert_equal(run_streams(other, ASKED, EARLY, kill_an_engine)[0], "an engine was killed")
    wait_until(lambda: server.replicas() == ["ready", "ready"], LIMIT_S, "the engine is replaced")
    fronts = [process.pid for process in server.launchers("--engines-file")]
    assert len(fronts) == 1
    assert_equal(run_streams(other, ASKED, EARLY, kill_an_actor("ray::ReplicaHost"))[0], "an engine's actor was killed")
    wait_until(lambda: server.replicas() == ["ready", "ready"], LIMIT_S, "the actor is replaced, and its engine")
    assert "The next start loads the model again" in server.log.read_text()
    answers, _ = run_streams(other, ASKED[:EARLY], EARLY, kill_an_actor("ray::FrontHost"))
    assert_equal([*answers, *expected[EARLY:]], "the fronts' actor was killed")
    wait_until(lambda: server.is_healthy(other), LIMIT_S, "other fronts take the place of those that have ended")
    assert fronts not in ([], [process.pid for process in server.launchers("--engines-file")])
    assert_equal(run_streams(other, ASKED, EARLY, restart_fronts)[0], "fronts were replaced")
    wait_until(lambda: "Restarted 1 webservers" in server.fronts_log(), LIMIT_S, "the other machine's are replaced")
    assert_equal(run_streams(other, ASKED, EARLY, scale)[0], "a replica was taken away")
    wait_until(lambda: server.replicas() == ["ready"], LIMIT_S, "one replica is left")
    answers, _ = run_streams(other, ASKED[:EARLY], EARLY, end)
    assert_equal([*answers, *expected[EARLY:]], "the command was asked to end")
    assert server.process is not None and server.process.wait(LIMIT_S) == 0
    assert server.launchers() == []
