"""Processes of a server without a model: pretended shards, engines, and routers."""

import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from text_generation_benchmark.process import ChildServer, ServerCommand, exit_on_sigterm, free_port, wait_for
from text_generation_common.cluster.block_key import VARIABLE

COMMANDS = Path(sys.executable).parent
START_S = 300.0
ROUTER_CORE, OTHER_CORE = 0, 1


class LiveProcesses:
    """The processes end with the context. `are_apart`: routers, fronts and engines share the first core, shards have
    the second one; otherwise all have all cores."""

    def __init__(self, model: Path, are_apart: bool) -> None:
        self._model, self._are_apart = model, are_apart
        # The key of the hashes that fronts and engines exchange. A shard without a model needs no threads.
        self._environment = {VARIABLE: secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
        self._stack = ExitStack()

    def __enter__(self) -> "LiveProcesses":
        exit_on_sigterm()
        self.folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="tgi-bench-")))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def shard(self, step: str) -> str:
        """A shard without a model, and the path of its socket. `step`: seconds of a step, or a file with its cost."""
        path = self.folder / f"shard{free_port()}"
        module = "text_generation_benchmark.live.shard"
        self._start("a shard", [sys.executable, "-m", module, str(self._model), str(path), step], core=OTHER_CORE)
        wait_for(Path(f"{path}-0"), START_S)
        return f"{path}-0"

    def engine(self, shard: str, *more: str) -> tuple[str, ChildServer]:
        """An engine over a shard's socket, which may not serve yet; and its address."""
        socket = self.folder / f"engine{free_port()}"
        arguments = ["--address", f"unix://{socket}", "--master-shard-uds-path", shard, *more]
        return f"unix://{socket}", self._start("an engine", self._command("engine", arguments))

    def engines(self, count: int, step: str, *more: str) -> list[str]:
        """The addresses of engines that serve, each over a shard of its own."""
        more = ("--max-concurrent-requests", "1024", *more)
        addresses = [self.engine(self.shard(step), *more)[0] for _ in range(count)]
        for address in addresses:
            wait_for(Path(address.removeprefix("unix://")), START_S)
        return addresses

    def router(self, *more: str) -> ChildServer:
        """A router with an engine inside or, with `--engines`, a front. It serves."""
        port = free_port()
        arguments = ["--hostname", "127.0.0.1", "--port", str(port), *more]
        server = self._start("a router", self._command("router", arguments), port)
        server.wait_until_ready()
        return server

    @contextmanager
    def fronts(self, count: int, engines: Sequence[str], *more: str) -> Iterator[list[ChildServer]]:
        """`count` fronts that serve, each on a port of its own, and end with this inner context."""
        more = (*more, *(argument for engine in engines for argument in ("--engines", engine)))
        outer, self._stack = self._stack, ExitStack()
        try:
            with self._stack:
                yield [self.router(*more) for _ in range(count)]
        finally:
            self._stack = outer

    def _command(self, name: str, arguments: Sequence[str]) -> list[str]:
        return [str(COMMANDS / f"text-generation-{name}"), "--tokenizer-name", str(self._model), *arguments]

    def _start(self, name: str, arguments: Sequence[str], port: int = 0, core: int = ROUTER_CORE) -> ChildServer:
        command = ServerCommand(name, arguments, port, "/health", START_S, environment=self._environment)
        server = ChildServer(command, self.folder / f"{name.split()[-1]}{free_port()}.log")
        return self._stack.enter_context(server.started(core if self._are_apart else None))
