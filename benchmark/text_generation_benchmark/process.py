"""A server as a child process: its port, its log, until it answers, and until nothing of it is left."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STOP_S = 60
LOG_LINES = 20


@dataclass(frozen=True, slots=True)
class ServerCommand:
    name: str
    arguments: Sequence[str]
    port: int
    ready: str  # a path that answers once requests can be served
    start_s: float  # compiling counts
    environment: Mapping[str, str] = field(default_factory=dict)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def running(command: ServerCommand, log: Path) -> Iterator[None]:
    """RuntimeError with the log's last lines if it ends or is not ready in time. Its children go with it."""
    environment = os.environ | command.environment
    with log.open("wb") as out:
        server = subprocess.Popen(
            command.arguments, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        _wait_until_ready(server, command, log)
        yield
    finally:
        _stop(server)


def _wait_until_ready(server: "subprocess.Popen[bytes]", command: ServerCommand, log: Path) -> None:
    deadline = time.monotonic() + command.start_s
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"{command.name} ended with status {server.returncode}; its last lines:\n{_tail(log)}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            get(command.port, command.ready)
            return
        time.sleep(0.2)
    raise RuntimeError(f"{command.name} was not ready after {command.start_s:.0f} s; its last lines:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def _stop(server: "subprocess.Popen[bytes]") -> None:
    """Asks first; the session's other processes do not outlive it."""
    server.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(timeout=STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def get(port: int, path: str) -> str:
    return request(port, path, None)


def request(port: int, path: str, body: bytes | None) -> str:
    """The body of the answer; a POST if there is a body to send."""
    url = f"http://127.0.0.1:{port}{path}"
    asked = urllib.request.Request(url, data=body, headers={"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=300) as response:
        content: bytes = response.read()
    return content.decode()
