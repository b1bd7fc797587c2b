"""Live replicas without a model, for measurements: pretended shards with an engine each, and fronts beside them."""

import contextlib
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from text_generation_benchmark.process import ChildServer, ServerCommand, exit_on_sigterm, free_port
from text_generation_benchmark.router.speed import ROUTER, START_S, wait_for
from text_generation_common.cluster.block_key import VARIABLE
from text_generation_router.fleet.policies import PlacementPolicy

ENGINE = Path(sys.executable).parent / "text-generation-engine"
START_ALL_S = 300.0


@dataclass(frozen=True, slots=True)
class LiveReplicas:
    """Engines that serve; each has a pretended shard."""

    model: Path
    folder: Path
    addresses: Sequence[str]
    environment: dict[str, str]

    @contextlib.contextmanager
    def fronts(
        self, count: int, policy: PlacementPolicy = PlacementPolicy.SCORE, engines: int | None = None
    ) -> Iterator[list[ChildServer]]:
        """`count` fronts that serve, each on a port of its own, with the first `engines` engines."""
        with contextlib.ExitStack() as stack:
            started = [
                stack.enter_context(_running(self._front(policy, engines), self.folder / f"front-{free_port()}.log"))
                for _ in range(count)
            ]
            for front in started:
                front.wait_until_ready()
            yield started

    def _front(self, policy: PlacementPolicy, engines: int | None) -> ServerCommand:
        port = free_port()
        arguments = [str(ROUTER), "--tokenizer-name", str(self.model), "--port", str(port), "--hostname", "127.0.0.1"]
        arguments += ["--placement", policy.value]
        for address in self.addresses[:engines]:
            arguments += ["--engines", address]
        return ServerCommand("a front", arguments, port, "/health", START_S, self.environment)


@contextlib.contextmanager
def live_replicas(
    model: Path, folder: Path, count: int, step: str, engine_arguments: Sequence[str] = ()
) -> Iterator[LiveReplicas]:
    """`step`: seconds of a step, or a file with its cost (`router/shard.py`). SIGTERM ends this process and them."""
    exit_on_sigterm()
    environment = {VARIABLE: secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
    addresses = []
    with contextlib.ExitStack() as stack:
        for number in range(count):
            uds_path, socket = f"{folder}/shard{number}", folder / f"engine{number}"
            shard = [sys.executable, "-m", "text_generation_benchmark.router.shard", str(model), uds_path, step]
            engine = [str(ENGINE), "--tokenizer-name", str(model), "--address", f"unix://{socket}"]
            engine += ["--master-shard-uds-path", f"{uds_path}-0", "--max-concurrent-requests", "1024"]
            engine += engine_arguments
            for name, arguments in (("shard", shard), ("engine", engine)):
                command = ServerCommand(f"{name} {number}", arguments, 0, "", START_S, environment)
                stack.enter_context(_running(command, folder / f"{name}{number}.log"))
                if name == "shard":
                    wait_for(Path(f"{uds_path}-0"))
            addresses.append(f"unix://{socket}")
        until_s = time.monotonic() + START_ALL_S
        for number in range(count):
            while not (folder / f"engine{number}").exists():
                if time.monotonic() > until_s:
                    raise RuntimeError(f"engine {number} is not there: {(folder / f'engine{number}.log').read_text()}")
                time.sleep(0.05)
        yield LiveReplicas(model, folder, addresses, environment)


@contextlib.contextmanager
def _running(command: ServerCommand, log: Path) -> Iterator[ChildServer]:
    """Starts it, and ends it with the context; does not wait until it serves."""
    child = ChildServer(command, log)
    child.start()
    try:
        yield child
    finally:
        child.running.kill()
        child.running.wait()
