"""Launchers of tests without the second that their imports take: a process that has imported a launcher's modules forks
them. Another process answers Health for all pretended shards, so that these import no gRPC."""

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import IO

# Each order is a datagram: the launcher's code, arguments and environment, with descriptors for its output, its errors
# and what becomes of it: first its process id, later its exit status. A process between the two waits for that.
FORKER = """
import json, os, signal, socket, struct, sys
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # as the launcher's own code has it, which is read by the import
import grpc, text_generation_launcher.preflight, text_generation_launcher.supervisor
from text_generation_proto import generate_pb2, generate_pb2_grpc

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends pytest, which ends its launchers

def bury(options):
    try:
        while os.waitpid(-1, options)[0]:
            pass
    except ChildProcessError:
        pass

control = socket.socket(fileno=int(sys.argv[1]))
while True:
    order, fds, _, _ = socket.recv_fds(control, 2**20, 3)
    if not order:
        signal.alarm(5)  # a launcher that a test has left behind is not waited for
        bury(0)
        sys.exit()
    if os.fork() == 0:
        break
    for fd in fds:
        os.close(fd)
    bury(os.WNOHANG)
control.close()
output, errors, state = fds
if launcher := os.fork():
    os.close(output)
    os.close(errors)
    os.write(state, struct.pack("i", launcher))
    status = os.waitpid(launcher, 0)[1]
    os.write(state, struct.pack("i", os.waitstatus_to_exitcode(status)))
    os._exit(0)
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in signal.SIGTERM, signal.SIGHUP:  # pytest may ignore one, as under nohup
    signal.signal(number, signal.SIG_DFL)
os.dup2(output, 1)
os.dup2(errors, 2)
os.closerange(3, 2**16)
order = json.loads(order)
os.environ.clear()
os.environ.update(order["environ"])
sys.argv = ["-c", *order["arguments"]]
sys.stdout = open(1, "w", closefd=False)
sys.stderr = open(2, "w", buffering=1, closefd=False)
exec(order["code"])
"""
HEALTH = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from text_generation_proto import generate_pb2 as pb, generate_pb2_grpc

class Servicer(generate_pb2_grpc.TextGenerationServiceServicer):
    def __init__(self, phase):
        self.phase = phase

    def Health(self, request, context):
        return pb.HealthResponse(phase=self.phase)

servers = [grpc.server(ThreadPoolExecutor(4)) for _ in ("load", "ready")]
for phase, server in zip(("load", "ready"), servers):
    generate_pb2_grpc.add_TextGenerationServiceServicer_to_server(Servicer(phase), server)
    server.add_insecure_port(f"unix:{sys.argv[1]}/{phase}")
    server.start()
print("listening", flush=True)
sys.stdin.read()
os._exit(0)
"""


class ForkedLauncher:
    """A launcher's process, with what tests use of subprocess.Popen. `state`: where its id and its status come."""

    def __init__(self, state: int) -> None:
        self._state = state
        self._reading = Lock()
        self.pid = self._next()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        if (status := self._wait(timeout)) is None:
            raise subprocess.TimeoutExpired("the launcher", timeout or 0)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # the launcher has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._state], [], [], timeout)[0]:
            with self._reading:
                if self.returncode is None:
                    self.returncode = self._next()
                    os.close(self._state)
        return self.returncode

    def _next(self) -> int:
        (number,) = struct.unpack("i", os.read(self._state, 4))
        return int(number)


class Launchers:
    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def fork(
        self, code: str, arguments: Sequence[str], environ: Mapping[str, str], output: IO[bytes], errors: IO[bytes]
    ) -> ForkedLauncher:
        state, its_end = os.pipe()
        order = json.dumps({"code": code, "arguments": arguments, "environ": dict(environ)}).encode()
        socket.send_fds(self._control, [order], [output.fileno(), errors.fileno(), its_end])
        os.close(its_end)
        return ForkedLauncher(state)


@contextmanager
def launchers(environ: Mapping[str, str]) -> Iterator[Launchers]:
    """`environ`: with what the launchers' modules are imported."""
    control, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", FORKER, str(its_end.fileno())]
    with its_end:
        forker = subprocess.Popen(command, env=environ, pass_fds=[its_end.fileno()])
    try:
        yield Launchers(control)
    finally:
        control.close()
        forker.wait()


@contextmanager
def health(environ: Mapping[str, str]) -> Iterator[str]:
    """The folder with the sockets at which Health is answered, by phase."""
    with tempfile.TemporaryDirectory(prefix="health-") as folder:
        command = [sys.executable, "-c", HEALTH, folder]
        with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as answering:
            assert answering.stdout is not None and answering.stdout.readline() == b"listening\n"
            yield folder
