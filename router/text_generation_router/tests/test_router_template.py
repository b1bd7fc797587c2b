"""The process that forks routers and engines."""

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from text_generation_router.template import _place

PROGRAM = str(Path(sys.executable).with_name("text-generation-router"))
END_S = 300.0
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(scope="module")
def control() -> Iterator[socket.socket]:
    """The launcher's end of the line to a template, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = os.environ | {"ROUTER_TEMPLATE_FD": str(theirs.fileno()), "OPENBLAS_NUM_THREADS": "1"}
    command = [PROGRAM, "template".ljust(1000)]
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        with subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()]) as template:
            theirs.close()
            with ours:
                yield ours
            assert template.wait(END_S) == 0
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def forked(control: socket.socket, *argv: str) -> tuple[int, str]:
    """The id of a new process, which is a child of this one, and what it has printed when it has ended."""
    output, output_end = os.pipe()
    report, report_end = os.pipe()
    order = os.memfd_create("order")
    os.write(order, json.dumps({"argv": argv, "env": {"PATH": "/bin"}, "pass_fds": []}).encode())
    os.lseek(order, 0, os.SEEK_SET)
    socket.send_fds(control, [b"fork"], [output_end, report_end, order])
    for fd in (order, output_end, report_end):
        os.close(fd)
    with open(report) as told, open(output) as printed:
        pid, text = int(told.read()), printed.read()
    assert os.waitpid(pid, 0) == (pid, 0)
    return pid, text


def test_each_order_is_a_process_with_its_program_and_arguments(control: socket.socket) -> None:
    adopted = [forked(control, PROGRAM.replace("router", name), "--help") for name in ("router", "engine", "router")]
    pids, texts = zip(*adopted, strict=True)
    assert len(set(pids)) == 3 and texts[0] == texts[2] != texts[1]
    assert "Serve text generation over HTTP" in texts[0] and "Own the queue and the token slots" in texts[1]


def test_descriptors_get_their_numbers_though_others_have_them() -> None:
    pipes = [os.pipe() for _ in range(3)]
    ends = [write for _, write in pipes]
    _place(ends, [ends[1], ends[2], ends[0]])
    for number, (read, _) in enumerate(pipes):
        os.write(ends[(number + 1) % 3], b"%d" % number)
        assert os.read(read, 9) == b"%d" % number
    for fd in (fd for pipe in pipes for fd in pipe):
        with suppress(OSError):
            os.close(fd)
