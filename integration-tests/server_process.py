"""Starts a whole server as its users do: `text-generation-launcher` in a process of its own. Most servers of pytest's
tests have a launcher that is forked by one that has its modules, which saves most of a second."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from text_generation_benchmark import process
from text_generation_benchmark.ours import LAUNCHER
from text_generation_benchmark.process import ChildServer, ServerCommand
from text_generation_launcher.tests.forked_launchers import Launchers

START_LIMIT_S = 120
# What a forked launcher does in the place of its command.
FORKED = "import os; os.setsid(); from text_generation_launcher.entry import main; main()"
# Number and count of the processes in which pytest-xdist runs tests.
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
NUM_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

__all__ = ["LAUNCHER", "ServerProcess", "free_port", "wait_until"]


def free_port() -> int:
    """A port that no test of another process gets before the server listens on it. The kernel prefers odd numbers."""
    while (port := process.free_port()) // 2 % NUM_WORKERS != WORKER:
        pass
    return port


def wait_until(condition: Callable[[], object], limit_s: float, what: str) -> float:
    """Waits for `condition` and returns the seconds it took. Raises RuntimeError, naming `what`, after `limit_s`."""
    started_s = time.monotonic()
    while True:
        asked_s = time.monotonic()
        is_met, now_s = condition(), time.monotonic()
        if is_met:
            return now_s - started_s
        if now_s - started_s > limit_s:
            raise RuntimeError(f"{what}: not within {limit_s} s")
        # A wait takes a fifth of a processor at most, and of the server that it asks.
        time.sleep(min(0.2, max(0.02, 4 * (now_s - asked_s))))


class LaunchedServer(ChildServer):
    """A server whose command is a launcher's. `launchers` fork those of this build, if pytest has some."""

    launchers: Launchers | None = None

    def start(self) -> None:
        program, *arguments = self.command.arguments
        if self.launchers is None or program != str(LAUNCHER):
            super().start()
            return
        with self.log_file.open("wb") as log:
            self.process = self.launchers.fork(FORKED, arguments, os.environ | self.command.environment, log, log)


class ServerProcess(LaunchedServer):
    """A server that runs while the context is open. `pid` is the launcher's. `by_command`: it is not forked."""

    def __init__(
        self,
        *arguments: str,
        port: int | None = None,
        uds_path: str | None = None,
        # the folder in which the server makes its own socket folder; only without `uds_path`
        runtime_dir: Path | None = None,
        environ: Mapping[str, str] | None = None,
        launcher: Path = LAUNCHER,
        by_command: bool = False,
    ) -> None:
        if by_command:
            self.launchers = None
        port = port or free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="tgi-"))
        self.uds_path = uds_path or str(self._folder / "shard")
        sockets = ["--shard-uds-path", self.uds_path]
        self.url = f"http://127.0.0.1:{port}"
        environment = dict(environ or {})
        if runtime_dir is not None:
            environment["XDG_RUNTIME_DIR"] = str(runtime_dir)
            self.uds_path, sockets = f"{runtime_dir}/tgi-py/{port}/shard", []
        command = [
            str(launcher if launcher.exists() else launcher.name),
            *("--hostname", "127.0.0.1", "--port", str(port), *sockets, *arguments),
        ]
        super().__init__(
            ServerCommand("the server", command, port, "/health", START_LIMIT_S, environment), self._folder / "log"
        )

    def __enter__(self) -> "ServerProcess":
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
