"""One child process: started in its own session, its lines relayed and the last of them kept, stopped in two steps."""

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from text_generation_launcher.commands import Command
from text_generation_launcher.relay import relay

logger = logging.getLogger("text_generation_launcher")

NUM_LAST_LINES = 20
MAX_LINE_BYTES = 256 * 1024
# A grandchild may hold the pipe open after its parent has ended.
DRAIN_S = 1.0
KILL_S = 30.0
PR_SET_PDEATHSIG = 1


class Child:
    """Made by `Child.start`. `exited` is done, with the exit status, once the process is gone and its output read."""

    def __init__(self, command: Command, process: asyncio.subprocess.Process, output: "LineReader") -> None:
        self.command = command
        self.exited = asyncio.create_task(self._wait())
        self._process = process
        self._output = output

    @classmethod
    async def start(cls, command: Command) -> "Child":
        """Raises OSError when the program cannot be run."""
        loop = asyncio.get_running_loop()
        # Not asyncio's own pipe: whether its `wait` also waits for the pipe's end differs between Python versions.
        read_end, write_end = os.pipe()
        output = LineReader(lambda line: relay(line, command.name, command.log_fields))
        # Nothing may be awaited after the spawn: a cancelled start would leave a child that nobody knows.
        try:
            await loop.connect_read_pipe(lambda: output, os.fdopen(read_end, "rb", buffering=0))
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                env=command.env,
                pass_fds=command.pass_fds,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,  # Ctrl-C in a terminal reaches the launcher alone
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
    def how_it_ended(self) -> str:
        """For after its end: "exited with status 3"."""
        status = self.exited.result()
        return f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"

    def send(self, number: signal.Signals) -> None:
        """To the whole process group, and to nobody when the child has ended."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def stop(self, timeout_s: float) -> bool:
        """True when the child ended by itself after SIGTERM, False when it had to be killed."""
        self.send(signal.SIGTERM)
        done, _ = await asyncio.wait([self.exited], timeout=timeout_s)
        if done:
            return True
        self.send(signal.SIGKILL)
        # One that hangs in the kernel, in a driver say, does not end: the launcher does all the same.
        await asyncio.wait([self.exited], timeout=KILL_S)
        return False

    async def _wait(self) -> int:
        status = await self._process.wait()
        await asyncio.wait([self._output.closed], timeout=DRAIN_S)
        self._output.close()
        return status


class LineReader(asyncio.Protocol):
    """Splits a pipe's bytes into lines, hands each on at once and keeps the last ones."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_line = on_line
        self._rest = b""
        self._transport: asyncio.BaseTransport | None = None

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
        self._rest = b""
        if not self.closed.done():
            self.closed.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _emit(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self.last_lines.append(text)
            self._on_line(text)


def log_last_lines(what: str, child: Child) -> None:
    """The cause is nearly always among them."""
    logger.error("%s; its last lines:\n%s", what, child.last_lines)


def die_with_parent() -> Callable[[], None] | None:
    """For the child to run before its program: a launcher that is killed leaves no children. Linux only."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # loaded here: little is safe between fork and exec
    parent = os.getpid()

    def ask_kernel() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(1)

    return ask_kernel
