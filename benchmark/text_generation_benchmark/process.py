"""A server as a child process: its port, its log, whether it answers yet, and its end."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

STOP_S = 60
POLL_S = 0.1
PROBE_S = 5
ANSWER_S = 300
LOG_LINES = 20
LOCAL_PORTS = 32768  # the first port that kernels give to connections, by default


@dataclass(frozen=True, slots=True)
class ServerCommand:
    name: str
    arguments: Sequence[str]
    port: int
    ready: str  # a path that answers with status 200 once the server takes requests
    start_s: float  # how long the server may take to become ready, compilation included
    # environment variables of the child, in addition to those of this process
    environment: Mapping[str, str] = field(default_factory=dict)


class ChildServer:
    """A server in a child process. It starts with `start`. The caller must call `stop`, also after an error."""

    def __init__(self, command: ServerCommand, log_file: Path) -> None:
        self.command = command
        self.log_file = log_file
        self.port = command.port
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server in a process group of its own, so that `stop` can kill all its processes."""
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                self.command.arguments,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self.command.environment,
                start_new_session=True,
            )

    @property
    def running(self) -> "subprocess.Popen[bytes]":
        assert self.process is not None, "start() comes first"
        return self.process

    @property
    def pid(self) -> int:
        return self.running.pid

    def is_ready(self) -> bool:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            request(self.port, self.command.ready, None, PROBE_S)
            return True
        return False

    def wait_until_ready(self) -> None:
        """Waits until the server is ready. RuntimeError with the last lines of the log if the server ends, or is not
        ready in time.
        """
        deadline = time.monotonic() + self.command.start_s
        while time.monotonic() < deadline:
            if (status := self.running.poll()) is not None:
                raise RuntimeError(f"{self.command.name} ended with status {status}; its last lines:\n{self._tail()}")
            if self.is_ready():
                return
            time.sleep(POLL_S)
        waited = f"{self.command.start_s:.0f} s"
        raise RuntimeError(f"{self.command.name} was not ready after {waited}; its last lines:\n{self._tail()}")

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @contextlib.contextmanager
    def started(self, core: int | None = None) -> Iterator["ChildServer"]:
        """Starts it, on one core if that is given, and kills it at the end; does not wait until it is ready."""
        with on_core(core):
            self.start()
        try:
            yield self
        finally:
            self._kill()

    def stop(self, limit_s: float = STOP_S) -> int:
        """Sends SIGTERM and returns the exit status. TimeoutExpired if the server did not end within `limit_s` seconds
        and was killed. Any other processes of its group are killed in any case.
        """
        if self.running.poll() is None:
            self.running.send_signal(signal.SIGTERM)
        try:
            return self.running.wait(timeout=limit_s)
        finally:
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.running.wait()

    def _tail(self) -> str:
        return "\n".join(self.log().splitlines()[-LOG_LINES:])


@contextlib.contextmanager
def running(command: ServerCommand, log_file: Path, stop_s: float = STOP_S) -> Iterator[None]:
    """Runs the server; it answers requests inside the context. RuntimeError if it does not become ready. A server that
    does not stop within `stop_s` seconds is killed.
    """
    server = ChildServer(command, log_file)
    server.start()
    try:
        server.wait_until_ready()
        yield
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.stop(stop_s)


@cache
def _all_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@contextlib.contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Inside this context new processes run on one core, if one is given and the machine has several."""
    cores, before = _all_cores(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if core is None else {cores[core % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def wait_for(path: Path, limit_s: float) -> None:
    """Waits until the file or socket exists. RuntimeError if it does not within `limit_s` seconds."""
    until_s = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > until_s:
            raise RuntimeError(f"{path} is not there after {limit_s:.0f} s")
        time.sleep(POLL_S / 2)


def free_port() -> int:
    """A port on which nothing listens. The kernel gives ports of its own range to connections: such a port could be in
    use by the time a server listens on it. So the port lies below that range."""
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux
        lowest = LOCAL_PORTS
    while True:
        port = secrets.randbelow(lowest // 2) + lowest // 2
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def exit_on_sigterm() -> None:
    """SIGTERM ends this process by SystemExit from now on, so that `finally` blocks stop its servers."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def get(port: int, path: str) -> str:
    return request(port, path, None)


def request(port: int, path: str, body: bytes | None, timeout_s: float = ANSWER_S) -> str:
    """The body of the answer to a GET, or to a POST if there is a body to send. URLError for a status of 400 or
    more.
    """
    url = f"http://127.0.0.1:{port}{path}"
    asked = urllib.request.Request(url, data=body, headers={"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=timeout_s) as response:
        content: bytes = response.read()
    return content.decode()
