"""Templates: processes that have imported or loaded what others need, and fork them for the launcher. What both say to
each other, and how a template forks: see the shard's `template.py` and the router's.

While a template forks it has one thread: no other process could go on with the threads of a library.
"""

import ctypes
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from text_generation_common import faults

logger = logging.getLogger(__name__)

READY = b"ready\n"  # a shard's second line
MAX_MESSAGE_BYTES = 4096
KEEPS = "keeps"
# Exit status of a shard that ends itself without any cleanup, because its group, device or worker is broken. Its keys
# and values are as sound as those of a shard that was killed.
BROKEN_STATUS = os.EX_SOFTWARE
FORKED, REFUSED = 0, 1  # exit statuses of the process between a template and what it forks
TEMPLATE_NAME = "tgi-template"
PR_SET_PDEATHSIG = 1
LOOK_S = 0.0002
# How much sooner than other processes the kernel ends a template for lack of memory, which does not serve: always.
OOM_SCORE = "1000"
OOM_FILE = Path("/proc/self/oom_score_adj")
# Places in /proc/self/stat, behind the name, of the first and last address of the command line.
ARGUMENTS = slice(45, 47)


def fork_below(launcher: int, name: str, can_fork: bool = True) -> bool:
    """Returns True in this process, and False in a new one, called `name`, whose parent is the process `launcher`. The
    process between both ends at once: so the launcher becomes the parent, which learns how the new one ends, and with
    which it ends. A process that cannot fork, because it must not or the system refuses another process, takes the
    place of the new one. If the process between both is killed, there may be a new one or not, and this process ends:
    then there is one at most."""
    sys.stdout.flush()
    sys.stderr.flush()
    between = _forked() if can_fork else None
    if between:
        status = os.waitstatus_to_exitcode(os.waitpid(between, 0)[1])
        if status == FORKED:
            return True
        if status != REFUSED:
            os._exit(os.EX_OSERR)
    if between == 0:
        _fork_again(launcher)
    elif can_fork:
        logger.warning("the system refuses another process: the template becomes %s", name)
    name_process(name)
    return False


def _fork_again(launcher: int) -> None:
    """Returns in the new process."""
    between = os.getpid()
    faults.point("template.below")
    if (new := _forked()) != 0:
        os._exit(FORKED if new else REFUSED)
    os.setsid()
    while os.getppid() == between:
        time.sleep(LOOK_S)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:  # The launcher has ended.
        os._exit(1)


def _forked() -> int | None:
    """As os.fork, but None if the system refuses another process."""
    try:
        return os.fork()
    except OSError:
        return None


def name_process(name: str) -> None:
    """Names this process as `ps -o comm` shows it."""
    Path("/proc/self/comm").write_text(name)


def show_arguments(words: list[str]) -> None:
    """Shows `words` as this process's command line, cut where the one with which it was started ends."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[ARGUMENTS])
    if not start < end:  # The kernel does not say.
        return
    line = b"".join(os.fsencode(word) + b"\0" for word in words)
    ctypes.memmove(start, line[: end - start - 1].ljust(end - start, b"\0"), end - start)


def be_ended_first() -> str:
    """Has the kernel end this process first where memory is short. Returns the score from before."""
    try:
        before = OOM_FILE.read_text().strip()
    except OSError:
        return ""
    set_oom_score(OOM_SCORE)
    return before


def set_oom_score(score: str) -> None:
    with suppress(OSError, ValueError):
        if score:
            OOM_FILE.write_text(score)
