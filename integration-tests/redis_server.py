"""A Redis without files on a machine of `machines.py`: where the head of a Ray cluster keeps its state."""

import secrets
import shutil
import socket
from pathlib import Path

from machines import Machine
from server_process import wait_until

PORT = 6380
START_LIMIT_S = 30.0
WITHOUT = "needs redis-server (the package redis-server of Debian)"


def is_installed() -> bool:
    return shutil.which("redis-server") is not None


class Redis:
    """Ends with its machine. `folder` gets its settings and its log."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self._machine = machine
        self._folder = folder
        self.address = f"{machine.address}:{PORT}"
        self.password = secrets.token_hex(16)

    def start(self) -> None:
        settings = self._folder / "redis.conf"
        settings.touch(mode=0o600)
        lines = [f"bind {self._machine.address}", f"port {PORT}", f"requirepass {self.password}", 'save ""']
        settings.write_text("\n".join([*lines, ""]))
        self._machine.start(["redis-server", str(settings)], self._folder / "redis.log")
        wait_until(self._answers, START_LIMIT_S, f"redis-server starts on {self.address}")

    def _answers(self) -> bool:
        try:
            socket.create_connection((self._machine.address, PORT), timeout=1.0).close()
        except OSError:
            return False
        return True
