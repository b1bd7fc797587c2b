"""A router, or an engine with its fronts, over a shard without a model; each process and port is known."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from text_generation_benchmark.process import ChildServer, ServerCommand
from text_generation_benchmark.router.speed import (
    ROUTER,
    START_S,
    on_core,
    router_arguments,
    running_on_first_core,
    running_shard,
    wait_for,
)

ENGINE = ROUTER.parent / "text-generation-engine"
# Requests at a time: the leases of all fronts together.
PERMITS = "512"


@dataclass(frozen=True, slots=True)
class Apart:
    """A server whose processes were started by hand. Every front has a port of its own, so a load can be divided."""

    fronts: list[ChildServer]
    engine: int | None  # process id; None: the only front is a router with an engine inside

    @property
    def ports(self) -> list[int]:
        return [front.port for front in self.fronts]

    @property
    def pids(self) -> list[int]:
        """The fronts, then the engine."""
        return [front.pid for front in self.fronts] + ([self.engine] if self.engine is not None else [])


@contextmanager
def running_apart(model: Path, folder: Path, num_fronts: int, step_s: float) -> Iterator[Apart]:
    """`num_fronts` 0: a router with the engine inside. All processes but the shard have the first core."""
    with running_shard(model, folder, step_s) as shard, ExitStack() as stack:
        if not num_fronts:
            arguments = [str(ROUTER), "--master-shard-uds-path", shard, *router_arguments(model)]
            yield Apart([stack.enter_context(running_on_first_core(arguments, folder / "router.log"))], None)
            return
        address = f"unix://{folder}/engine"
        engine = stack.enter_context(_running_engine(model, folder, address, shard))
        arguments = [str(ROUTER), "--engines", address, *router_arguments(model)]
        fronts = [
            stack.enter_context(running_on_first_core(arguments, folder / f"front{number}.log"))
            for number in range(num_fronts)
        ]
        yield Apart(fronts, engine.pid)


@contextmanager
def _running_engine(model: Path, folder: Path, address: str, shard: str) -> Iterator[ChildServer]:
    arguments = [str(ENGINE), "--tokenizer-name", str(model), "--address", address, "--master-shard-uds-path", shard]
    arguments += ["--max-concurrent-requests", PERMITS]
    engine = ChildServer(ServerCommand("the engine", arguments, 0, "", START_S), folder / "engine.log")
    with on_core(0):
        engine.start()
    try:
        wait_for(folder / "engine")
        yield engine
    finally:
        engine.stop()
