"""A template: a process that has imported what a router and an engine import, serves nothing, and forks both for the
launcher, so that a dead one is replaced without a second of imports. They have the modules in the same memory.

The launcher asks with a message on a socket, whose descriptors are: the output and the report of the new process, a
file with the order in JSON (`argv`, `env`, `pass_fds`), and those that get the numbers `pass_fds`. The report has one
line, the process's id. It ends without a line if there is no process.
"""

import fcntl
import gc
import json
import os
import socket
import sys
from pathlib import Path

from text_generation_common import faults
from text_generation_common.forked import (
    MAX_MESSAGE_BYTES,
    TEMPLATE_NAME,
    be_ended_first,
    fork_below,
    name_process,
    set_oom_score,
    show_arguments,
)

MAX_FDS = 16
CANNOT_FORK = os.EX_OSERR  # exit status of a template that has several threads, or that the system refuses a process


def become(control_fd: int) -> dict[str, str]:
    """To be called when the modules have been imported. Forks a process for each message on `control_fd` until the
    launcher ends. Returns the environment of its order in each of these, which has the order's arguments and
    descriptors."""
    launcher, template, control = os.getppid(), os.getpid(), socket.socket(fileno=control_fd)
    if len(os.listdir("/proc/self/task")) > 1:
        os._exit(CANNOT_FORK)
    gc.freeze()
    score = be_ended_first()
    name_process(TEMPLATE_NAME)
    while True:
        message, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, MAX_FDS)
        if not message:
            os._exit(0)  # The launcher has ended.
        output_fd, report_fd, order_fd, *passed = fds
        with open(order_fd) as file:
            order = json.loads(file.read())
        faults.setup_command(order["env"].get("FAILPOINTS", ""), "--testing" in order["argv"], forks="webservers")
        if not fork_below(launcher, Path(order["argv"][0]).name.replace("text-generation", "tgi")):
            break
        for fd in (output_fd, report_fd, *passed):
            os.close(fd)
    if os.getpid() == template:
        os._exit(CANNOT_FORK)
    set_oom_score(score)
    control.close()
    os.write(report_fd, f"{os.getpid()}\n".encode())
    os.close(report_fd)
    _place([output_fd, output_fd, *passed], [1, 2, *order["pass_fds"]])
    sys.argv = order["argv"]
    show_arguments([sys.executable, *sys.argv])
    return dict[str, str](order["env"])


def _place(fds: list[int], numbers: list[int]) -> None:
    """Gives each descriptor its number, which another of them may have."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(fds + numbers) + 1) for fd in fds]
    for fd in set(fds):
        os.close(fd)
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number, inheritable=number <= 2)
        os.close(fd)
