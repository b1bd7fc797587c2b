"""One child process: starts it in its own session, relays its output lines and keeps the last ones, and stops it."""

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from text_generation_launcher.commands import Command
from text_generation_launcher.relay import Relay

logger = logging.getLogger("text_generation_launcher")

NUM_LAST_LINES = 20
SEE_LOG = "look at its last lines in the log above"  # the hint where a child has ended without an error of its own
MAX_LINE_BYTES = 256 * 1024
# Seconds to wait for the end of a dead child's output: a grandchild may hold the pipe open.
DRAIN_S = 1.0
# A child's last line, if it begins so, is the error that ends the child. It is shown once, by the launcher's report.
ERROR = "Error: "
# Seconds after which such a line of a child that has not ended is passed on like any other. It stays the child's error,
# because a slow machine may take longer to end the child.
HELD_S = 5.0
# Seconds to wait for the end of a process after SIGKILL.
KILL_S = 30.0
PR_SET_PDEATHSIG = 1
# The kernel's signal to a launcher whose parent has ended, which then ends in order. It comes once for each thread of a
# parent that is killed, so it is none of those of which the second ends everything at once.
PARENT_ENDED = signal.SIGUSR1


class AnyProcess(Protocol):
    """The members of `asyncio.subprocess.Process` that a Child uses."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...


class Child:
    """A child process, made by `Child.start`. The result of `exited` is the exit status; `exited` is done when the
    process has ended and its output has been read. `begun` is set while it has a process of its own, and `is_ready`
    when it has told the launcher that it serves, which only forked shards do."""

    def __init__(self, command: Command, process: AnyProcess, output: "LineReader") -> None:
        self.command = command
        self.begun = asyncio.Event()
        self.begun.set()
        self.is_ready = asyncio.Event()
        self.is_ending = False  # whether it was sent a signal
        self.exited = asyncio.create_task(self._wait())
        self._process = process
        self._output = output

    @classmethod
    async def start(
        cls, command: Command, takes: Callable[[logging.LogRecord], bool] = lambda record: False
    ) -> "Child":
        """Starts a child. Its log records are logged, except those that `takes` accepts. Raises OSError when the
        program cannot be run."""
        # Nothing may be awaited after the spawn: cancelling the start would leave a child that is never stopped.
        output, write_end = await relayed_output(command, takes)
        try:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                env=command.env,
                pass_fds=command.pass_fds,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,  # Ctrl-C in a terminal must reach the launcher only.
                preexec_fn=die_with_parent(),
            )
        except BaseException:
            output.close()
            raise
        finally:
            os.close(write_end)
        return cls(command, process, output)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_lines(self) -> str:
        return "\n".join(self._output.last_lines)

    @property
    def error(self) -> str:
        """The error with which the child has ended, if its last line says one; otherwise "". No log line shows it, if
        the child ended within HELD_S."""
        return self._output.error

    @property
    def how_it_ended(self) -> str:
        """How the child ended, such as "exited with status 3". Only for a child that has ended."""
        status = self.exited.result()
        return f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the whole process group. Does nothing when the child has ended."""
        self.is_ending = True
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def stop(self, timeout_s: float) -> bool:
        """Sends SIGTERM, and SIGKILL after `timeout_s`. True when the child ended after SIGTERM."""
        self.send(signal.SIGTERM)
        done, _ = await asyncio.wait([self.exited], timeout=timeout_s)
        if done:
            return True
        self.send(signal.SIGKILL)
        # A process that hangs in the kernel, for example in a driver, does not end. The launcher goes on without it.
        await asyncio.wait([self.exited], timeout=KILL_S)
        return False

    async def _wait(self) -> int:
        status = await self._process.wait()
        await asyncio.wait([self._output.closed], timeout=DRAIN_S)
        self._output.close()
        return status


class LineReader(asyncio.Protocol):
    """Splits a pipe's bytes into lines, passes each line on at once, and keeps the last NUM_LAST_LINES lines for error
    messages. A last line that is an error is not passed on: see ERROR.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_line = on_line
        self._error = ""
        self._is_held = False
        self._release: asyncio.TimerHandle | None = None
        self._rest = b""
        self._transport: asyncio.BaseTransport | None = None

    @property
    def error(self) -> str:
        return self._error.removeprefix(ERROR)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._emit(line)

    def connection_lost(self, exc: Exception | None) -> None:
        self._emit(self._rest)
        self._cancel_release()
        if not self.closed.done():
            self.closed.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _emit(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if not text:
            return
        self._pass_on_held()
        self.last_lines.append(text)
        self._error, self._is_held = (text, True) if text.startswith(ERROR) else ("", False)
        if self._is_held:
            self._release = asyncio.get_running_loop().call_later(HELD_S, self._pass_on_held)
        else:
            self._on_line(text)

    def _pass_on_held(self) -> None:
        self._cancel_release()
        if self._is_held:
            self._on_line(self._error)
        self._is_held = False

    def _cancel_release(self) -> None:
        if self._release is not None:
            self._release.cancel()


async def relayed_output(
    command: Command, takes: Callable[[logging.LogRecord], bool] = lambda record: False
) -> tuple[LineReader, int]:
    """A reader of a child's output, and the descriptor to which the child writes; the caller closes its copy. A pipe of
    our own: whether asyncio's `wait` also waits for the end of asyncio's pipe differs between versions of Python."""
    output = LineReader(Relay(command.name, command.log_fields, takes).line)
    return output, await read_pipe(output)


async def read_pipe(reader: asyncio.Protocol) -> int:
    """Has `reader` read a new pipe. Returns the pipe's other end."""
    read_end, write_end = os.pipe()
    try:
        await asyncio.get_running_loop().connect_read_pipe(lambda: reader, os.fdopen(read_end, "rb", buffering=0))
    except BaseException:
        os.close(write_end)
        raise
    return write_end


def log_last_lines(what: str, child: Child) -> None:
    """Logs `what` happened, and the last lines that the child has written: they nearly always show the cause."""
    logger.error("%s; its last lines:\n%s", what, child.last_lines)


def die_with_parent(last_signal: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """A function for the child to run before its program, on Linux: the kernel then sends `last_signal` to the child
    when its parent ends, however it ends."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # Loaded here, because loading a library between fork and exec is not safe.
    parent = os.getpid()

    def ask_kernel() -> None:
        prctl(PR_SET_PDEATHSIG, int(last_signal), 0, 0, 0)
        if os.getppid() != parent:  # The parent ended before prctl was called.
            os._exit(1)

    return ask_kernel
