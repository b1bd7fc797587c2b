"""The pool's end of one child process."""

import asyncio
import os
import sys
from contextlib import suppress

from text_generation_router.offload.errors import JobFailedError, JobLostError
from text_generation_router.offload.frames import ANSWER_HEAD, Outcome, frame

CHILD = "text_generation_router.offload.child"
# For a child to import what its handlers need, on a machine that is busy.
READY_S = 60.0
# For a killed process to be gone; one that hangs in the kernel is not waited for.
GONE_S = 5.0


class ChildProcess:
    """Made by `start`. Whoever has it calls `end`, whatever happened."""

    def __init__(self, process: asyncio.subprocess.Process, max_answer_bytes: int) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._jobs = process.stdin
        self._answers = process.stdout
        self._max_answer_bytes = max_answer_bytes
        self._is_lost = False  # it ends after its last answer, or an exchange was broken off

    @classmethod
    async def start(cls, entry: str, memory_bytes: int, max_answer_bytes: int) -> "ChildProcess":
        """Raises OSError if no process can be made."""
        # Spawned, not forked: nothing of this process's memory, sockets and threads is in it.
        # -P: the working directory is not a place to import from.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", CHILD, str(os.getpid()), str(memory_bytes), entry),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return cls(process, max_answer_bytes)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        return not self._is_lost and self._process.returncode is None

    async def set_up(self, setup: bytes) -> None:
        """Returns when it is ready. Raises JobLostError, and TimeoutError."""
        async with asyncio.timeout(READY_S):
            await self._exchange(frame(setup))

    async def ask(self, name: str, content: bytes) -> bytes:
        """The handler's answer. Raises JobFailedError; any other exception makes the child unusable."""
        return await self._exchange(frame(name.encode()), frame(content))

    async def _exchange(self, *frames: bytes) -> bytes:
        self._is_lost = True  # unless it comes to its end
        try:
            for one in frames:
                self._jobs.write(one)
            await self._jobs.drain()
            head = await self._answers.readexactly(ANSWER_HEAD.size)
            outcome, ends_now, length = ANSWER_HEAD.unpack(head)
            if length > self._max_answer_bytes:
                raise JobLostError
            answer = await self._answers.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise JobLostError from error
        self._is_lost = bool(ends_now)
        if outcome == Outcome.FAILED:
            raise JobFailedError(answer.decode())
        return answer

    async def end(self) -> None:
        """Kills it, if it has not ended yet."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._jobs.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(GONE_S):
                await self._process.wait()
