"""A second process that outlives the launcher and cleans up when that was killed. Forked before threads and loops.

The kernel kills the children of a killed launcher (see `process.py`), but leaves their children, their socket files and
the lock. The janitor waits for the end of a pipe whose other end only the launcher holds. It inherits the lock as well,
so that no other launcher takes the socket paths before they are clean.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from text_generation_launcher.places import Place

ORDERLY_END = "end"
# How long killed processes may take to be gone.
GONE_S, POLL_S = 1.0, 0.01


class Janitor:
    """The launcher's side."""

    def __init__(self, write_end: int) -> None:
        self._write_end = write_end

    def watch(self, pid: int) -> None:
        """`pid` leads a process group that is to die with the launcher."""
        self._tell(f"+{pid}")

    def forget(self, pid: int) -> None:
        self._tell(f"-{pid}")

    def _tell(self, line: str) -> None:
        # Somebody may have killed the janitor; the server works without, and the kernel's half of the work is done.
        with suppress(BrokenPipeError):
            os.write(self._write_end, f"{line}\n".encode())

    def dismiss(self) -> None:
        """The launcher has cleaned up by itself."""
        self._tell(ORDERLY_END)
        os.close(self._write_end)


@contextmanager
def employ(place: Place, lock: int) -> Iterator[Janitor]:
    """`lock` is the descriptor that `claim_sockets` yields. Must not be called once there are threads."""
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            _live(read_end, lock, place)
        finally:
            os._exit(0)
    os.close(read_end)
    janitor = Janitor(write_end)
    try:
        yield janitor
    finally:
        janitor.dismiss()
        os.waitpid(pid, 0)


def _live(read_end: int, lock: int, place: Place) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _keep_open(read_end, lock)
    groups = _groups_left(read_end)
    if groups is None:
        return
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    # One that is still in the kernel could make its socket after we have removed it.
    deadline_s = time.monotonic() + GONE_S
    while not all(map(_is_gone, groups)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    place.leave()


def _keep_open(*kept: int) -> None:
    """Closes everything else: nobody's pipe, port or terminal is held up by a janitor."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    for name in os.listdir("/dev/fd"):
        if int(name) not in (0, 1, 2, *kept):
            with suppress(OSError):  # the listing's own is closed already
                os.close(int(name))


def _groups_left(read_end: int) -> set[int] | None:
    """Blocks until the launcher has ended: the groups that are left, or None after an orderly end."""
    groups: set[int] = set()
    with os.fdopen(read_end) as lines:
        for line in lines:
            word = line.strip()
            if word == ORDERLY_END:
                return None
            (groups.add if word[0] == "+" else groups.discard)(int(word[1:]))
    return groups


def _is_gone(pid: int) -> bool:
    """Also who only waits for a parent to ask how it ended. Without /proc nobody is waited for."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"
