"""Processes that are not our children: whether they are alive, and signals that reach no other process.

A process is known by its number and the time of its start, because the kernel gives numbers out again.
"""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    pid: int
    started_ticks: int  # clock ticks from the start of the machine to that of the process

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """None if there is no such process, or it has ended and only its parent has not noticed."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    @property
    def is_alive(self) -> bool:
        return ProcessIdentity.of(self.pid) == self

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process, and does nothing if it has ended."""
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            try:
                # The descriptor holds on to one process, so the number cannot be given to another after this check.
                if self.is_alive:
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)
