"""A second process, the janitor, which outlives the launcher and cleans up when the launcher was killed.

The kernel kills the children of a killed launcher (see `process.py`), but not the children's children, and leaves
socket files and the lock. The janitor reads a pipe whose write end only the launcher holds: the pipe ends when the
launcher does. The janitor inherits the lock as well, so that no other launcher takes the socket paths before they are
clean. It is forked before the launcher has threads or an event loop.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from text_generation_common.places import ServerPlace
from text_generation_common.secret_values import hide_environment

ORDERLY_END = "end"
# Seconds that killed processes get to disappear, and seconds between two checks of them.
GONE_S, POLL_S = 1.0, 0.01


class Janitor:
    """The launcher's side: tells the janitor, through the pipe, which processes to kill."""

    def __init__(self, write_end: int) -> None:
        self._write_end = write_end

    def add(self, pid: int) -> None:
        """Adds the process group that `pid` leads: the janitor kills it if the launcher is killed."""
        self._write(f"+{pid}")

    def remove(self, pid: int) -> None:
        self._write(f"-{pid}")

    def _write(self, line: str) -> None:
        # A user may have killed the janitor. The server works without it, and the kernel still kills the children.
        with suppress(BrokenPipeError):
            os.write(self._write_end, f"{line}\n".encode())

    def end(self) -> None:
        """Ends the janitor. To be called when the launcher has cleaned up by itself."""
        self._write(ORDERLY_END)
        os.close(self._write_end)


@contextmanager
def fork_janitor(place: ServerPlace, lock: int) -> Iterator[Janitor]:
    """Forks the janitor. `lock` is the descriptor that `claim_sockets` yields. Must be called before threads exist."""
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            hide_environment(os.environ)
            _clean_up_after_launcher(read_end, lock, place)
        finally:
            os._exit(0)
    os.close(read_end)
    janitor = Janitor(write_end)
    try:
        yield janitor
    finally:
        janitor.end()
        os.waitpid(pid, 0)


def _clean_up_after_launcher(read_end: int, lock: int, place: ServerPlace) -> None:
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
    # A killed process that is still inside a system call could make its socket again after we have removed it.
    deadline_s = time.monotonic() + GONE_S
    while not all(map(_is_gone, groups)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    place.leave()


def _keep_open(*kept: int) -> None:
    """Closes all descriptors but `kept`, so that the janitor holds no pipe, port or terminal open."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    for name in os.listdir("/dev/fd"):
        if int(name) not in (0, 1, 2, *kept):
            with suppress(OSError):  # The descriptor that listed the folder is closed already.
                os.close(int(name))


def _groups_left(read_end: int) -> set[int] | None:
    """Waits until the launcher has ended. Returns the process groups that are left, or None after an orderly end."""
    groups: set[int] = set()
    with os.fdopen(read_end) as lines:
        for line in lines:
            word = line.strip()
            if word == ORDERLY_END:
                return None
            (groups.add if word[0] == "+" else groups.discard)(int(word[1:]))
    return groups


def _is_gone(pid: int) -> bool:
    """Whether the process has ended. Zombies have ended; without /proc every process counts as ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"
