"""A whole server as its users start it: `text-generation-launcher` in a process of its own."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx

START_LIMIT_S = 120
LAUNCHER = Path(sys.executable).parent / "text-generation-launcher"


def wait_until(condition: Callable[[], object], limit_s: float, what: str) -> float:
    """Seconds until `condition` held, looked at often. RuntimeError, naming `what`, when it did not in time."""
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() - started_s > limit_s:
            raise RuntimeError(f"{what}: not within {limit_s} s")
        time.sleep(0.02)
    return time.monotonic() - started_s


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """Use as a context manager: inside, the server answers."""

    def __init__(
        self,
        *arguments: str,
        port: int | None = None,
        uds_path: str | None = None,
        runtime_dir: Path | None = None,  # instead of a path for sockets: where the server makes its own folder
        environ: Mapping[str, str] | None = None,
        launcher: Path = LAUNCHER,
    ) -> None:
        self.port = port or free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="tgi-"))
        self.uds_path = uds_path or str(self._folder / "shard")
        sockets = ["--shard-uds-path", self.uds_path]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = self._folder / "log"
        self._environ = dict(os.environ) | dict(environ or {})
        if runtime_dir is not None:
            self._environ["XDG_RUNTIME_DIR"] = str(runtime_dir)
            self.uds_path, sockets = f"{runtime_dir}/tgi-py/{self.port}/shard", []
        self.command = [
            str(launcher if launcher.exists() else launcher.name),
            *("--hostname", "127.0.0.1", "--port", str(self.port), *sockets, *arguments),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT, env=self._environ)

    @property
    def pid(self) -> int:
        """The launcher's."""
        assert self.process is not None
        return self.process.pid

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def wait_until_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log()}")
            if self.is_ready():
                return
            time.sleep(0.1)
        raise RuntimeError(f"the server is not ready after {START_LIMIT_S} s:\n{self.log()}")

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def stop(self, limit_s: float = 60) -> int:
        """SIGTERM, as an operator would; the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

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
