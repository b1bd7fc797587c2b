"""One child process, as the pool sees it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

from text_generation_common.secret_values import inherited_environment
from text_generation_router.offload.child import ANSWER_HEAD, LENGTH, JobOutcome
from text_generation_router.offload.errors import JobFailedError, JobLostError

CHILD = "text_generation_router.offload.child"
# These signals reach the whole process group. A child has them blocked from its first instruction on, because the
# router first finishes its requests and needs its children.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds for a child to import the modules of its handlers, on a busy machine.
READY_S = 60.0
# Seconds for a killed process to end, and seconds between two checks. A process that hangs in the kernel is abandoned.
GONE_S, POLL_S = 5.0, 0.005
# Seconds for a killed process to end when the wait blocks the event loop.
CANCELLED_S = 0.1


class ChildProcess:
    """A child process, made by `start`. Its owner must always call `end`."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        answers: asyncio.StreamReader,
        jobs: asyncio.StreamWriter,
        max_answer_bytes: int,
    ) -> None:
        self._process = process
        self._answers = answers
        self._jobs = jobs
        self._max_answer_bytes = max_answer_bytes
        # Whether the child is unusable: it ends after its last answer, or an exchange was interrupted.
        self._is_lost = False

    @classmethod
    async def start(cls, entry: str, memory_bytes: int, cpu_s: float, max_answer_bytes: int) -> "ChildProcess":
        """Starts a child. Raises OSError if no process can be made."""
        ours, theirs = socket.socketpair()
        process = None
        try:
            with theirs:
                # Spawned, not forked: the child has none of this process's memory, sockets and threads.
                # Not by the event loop: uvloop forks, which blocks for 100 ms if this process has 200 MiB.
                # -P: the child must not import from the working directory.
                before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
                try:
                    process = subprocess.Popen(
                        (sys.executable, "-P", "-m", CHILD, str(os.getpid()), str(memory_bytes), str(cpu_s), entry),
                        stdin=theirs.fileno(),
                        stdout=theirs.fileno(),
                        env=inherited_environment(),
                    )
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
            answers, jobs = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            if process is not None:
                process.kill()
                process.wait()
            raise
        return cls(process, answers, jobs, max_answer_bytes)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        return not self._is_lost and self._process.poll() is None

    async def set_up(self, setup: bytes) -> None:
        """Sends the setup bytes and waits until the child is ready. Raises JobLostError or TimeoutError."""
        async with asyncio.timeout(READY_S):
            await self._exchange(setup)

    async def ask(self, name: str, content: bytes) -> bytes:
        """Sends a job and returns the handler's answer. Raises JobFailedError; after any other exception the child is
        unusable.
        """
        return await self._exchange(name.encode(), content)

    async def _exchange(self, *frames: bytes) -> bytes:
        self._is_lost = True  # True until the exchange is complete, so that an interrupted exchange leaves it True
        try:
            for frame in frames:
                self._jobs.write(LENGTH.pack(len(frame)))
                self._jobs.write(frame)
            await self._jobs.drain()
            head = await self._answers.readexactly(ANSWER_HEAD.size)
            outcome, ends_now, length = ANSWER_HEAD.unpack(head)
            if length > self._max_answer_bytes:
                raise JobLostError
            answer = await self._answers.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            await self._wait_for_end()
            raise JobLostError(self._process.returncode) from error
        self._is_lost = bool(ends_now)
        if outcome == JobOutcome.FAILED:
            raise JobFailedError(answer.decode())
        return answer

    async def end(self) -> None:
        """Kills the child, if it has not ended yet."""
        self._process.kill()
        self._jobs.close()
        try:
            await self._wait_for_end()
        except asyncio.CancelledError:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CANCELLED_S)  # waits here, because no later call waits for this child
            raise

    async def _wait_for_end(self) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + GONE_S
        while self._process.poll() is None and clock() < until:
            await asyncio.sleep(POLL_S)
