"""Reports to the service manager that has started the launcher, such as systemd: ready, alive, stopping.

The protocol is that of sd_notify(3): datagrams with lines NAME=VALUE, to the unix socket that NOTIFY_SOCKET names.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from text_generation_common.errors import ArgumentValidation
from text_generation_common.flags.declaration import VariableError, flag, from_environment

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
# Seconds between two looks whether the server is ready.
POLL_S = 0.1
# Reports in the time after which the manager takes a silent launcher for hung: one that is late or lost does no harm.
REPORTS_PER_TIMEOUT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerFlags:
    """Variables that a service manager sets for the process that it starts."""

    notify_socket: str = flag("", "Unix socket that takes the reports; @NAME is an abstract one.", hidden=True)
    watchdog_usec: int = flag(0, "Microseconds of silence after which the launcher counts as hung; 0: never.", min=0)
    watchdog_pid: int | None = flag(None, "The process that reports; the one that was started when not given.")


class ServiceManager:
    """The process that waits for the reports. Without NOTIFY_SOCKET there is none, and nothing is sent."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Raises ArgumentValidation for a variable that is not usable."""
        try:
            flags = from_environment(ManagerFlags, environ, {})
        except VariableError as error:
            raise ArgumentValidation(str(error), "unset it, or let the service manager set it") from None
        self._address = flags.notify_socket
        is_asked = flags.watchdog_pid in (None, os.getpid())
        self._alive_every_s = flags.watchdog_usec / 1e6 / REPORTS_PER_TIMEOUT if is_asked else 0.0

    async def report(self, is_ready: Callable[[], bool]) -> None:
        """Reports once that the server is ready, and then that this event loop is alive. Returns when no more reports
        are due."""
        if not self._address:
            return
        while not (is_ready() and self.send("READY=1")):
            await asyncio.sleep(POLL_S)
        while self._alive_every_s:
            self.send("WATCHDOG=1")
            await asyncio.sleep(self._alive_every_s)

    def send(self, line: str) -> bool:
        """Sends a line without waiting. Returns whether it was sent: the socket may be gone, or its queue full."""
        if not self._address:
            return False
        name = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as end:
                end.sendto(line.encode(), name)
        except OSError:
            return False
        return True
