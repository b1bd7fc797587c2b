"""Templates: processes that have loaded a rank's model and fork the shards of that rank (the shard's `template.py`), so
that a dead shard is replaced at once. The launcher is the parent of forked shards, too.
"""

import asyncio
import ctypes
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from text_generation_common.forked import BROKEN_STATUS, KEEPS, MAX_MESSAGE_BYTES, READY
from text_generation_launcher.commands import Command
from text_generation_launcher.process import Child, LineReader, read_pipe, relayed_output

logger = logging.getLogger("text_generation_launcher")

# Variables of a shard: the number of its epoch, that of the shards on this machine if there are several replicas, and
# the socket on which it is a template.
EPOCH, MACHINE_SHARDS, FD = "TGI_EPOCH", "MACHINE_SHARDS", "TEMPLATE_FD"
# How a shard may end so that its keys and values are taken over. After other ends, such as SIGSEGV, it may have written
# anywhere before.
SOUND_ENDS = (-signal.SIGKILL, BROKEN_STATUS)
PR_SET_CHILD_SUBREAPER = 36
# Seconds that a template gets to fork a shard, and to end when it could not.
FORK_S, END_S = 5.0, 5.0
# Seconds without a sign of life after which a template that loads counts as hung.
STILL_S = 300.0


class ForkedProcess(asyncio.Protocol):
    """A process that `template` forks, as the process's report tells of it. Implements AnyProcess. `on_forked` gets its
    id."""

    def __init__(self, template: Child, on_forked: Callable[[int], None]) -> None:
        self.template, self.on_forked = template, on_forked
        self.returncode: int | None = None
        self.is_ready = asyncio.Event()
        self.forked: asyncio.Future[int | None] = (
            asyncio.get_running_loop().create_future()
        )  # process id; None: there is none
        self._rest = b""

    @property
    def pid(self) -> int:
        """That of the template while there is no process."""
        return (self.forked.result() if self.forked.done() else None) or self.template.pid

    def data_received(self, data: bytes) -> None:
        self._rest += data
        if not self.forked.done() and b"\n" in self._rest:
            line, _, self._rest = self._rest.partition(b"\n")
            self.forked.set_result(int(line))
        if self._rest == READY:
            self.is_ready.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.forked.done():
            self.forked.set_result(None)

    async def wait(self) -> int:
        pid = await asyncio.shield(self.forked)
        if pid is None:
            await asyncio.wait([self.template.exited], timeout=END_S)
            self.template.send(signal.SIGKILL)
        if pid is None or pid == self.template.pid:
            status = await asyncio.shield(self.template.exited)
        else:
            await _end_of(pid)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.returncode = status
        return status


class ForkedChild(Child):
    """A shard or a router that a template forks. Until then, what happens to the template happens to it."""

    def __init__(self, command: Command, process: ForkedProcess, output: LineReader) -> None:
        super().__init__(command, process, output)
        self.process, self.is_ready = process, process.is_ready
        self.begun.clear()
        self._signal: signal.Signals | None = None
        self.process.forked.add_done_callback(self._on_forked)

    @classmethod
    async def order(
        cls, command: Command, process: ForkedProcess, control: socket.socket, order: str, fds: Sequence[int] = ()
    ) -> "ForkedChild":
        """Asks a template for `process` on its socket. The order has the descriptors of its output and its report, and
        `fds`. OSError if the system gives no pipe: then no task and no open file is left of it."""
        report_end = await read_pipe(process)
        try:
            output, output_end = await relayed_output(command)
            with suppress(OSError):  # The template has ended, and so does the report.
                socket.send_fds(control, [order.encode()], [output_end, report_end, *fds])
            os.close(output_end)
        finally:
            os.close(report_end)
        return cls(command, process, output)

    @property
    def last_lines(self) -> str:
        return super().last_lines if self.begun.is_set() else self.process.template.last_lines

    @property
    def error(self) -> str:
        return super().error if self.begun.is_set() else self.process.template.error

    def send(self, number: signal.Signals) -> None:
        self._signal = number
        if self.begun.is_set():
            super().send(number)
        else:
            self.is_ending = True
            self.process.template.send(number)

    def _on_forked(self, forked: "asyncio.Future[int | None]") -> None:
        if (pid := forked.result()) is None:
            return
        self.begun.set()
        self.process.on_forked(pid)
        if self._signal is not None:  # sent while the template forked
            super().send(self._signal)


class Template:
    """One template. `child` is its process, `control` the launcher's end of its socket, `command` what starts one of
    its shards without a template."""

    def __init__(self, child: Child, control: socket.socket, command: Command) -> None:
        self.child = child
        self._command = command
        self.has_forked = False
        self._last: ForkedChild | None = None
        self._control = control
        self._alive_s = time.monotonic()
        loop = asyncio.get_running_loop()
        loop.add_reader(control, self._on_sign)
        self._check = loop.call_later(STILL_S, self._check_life)
        child.exited.add_done_callback(self._on_end)

    @property
    def stands_by(self) -> bool:
        return self.has_forked and not self.child.is_ending and not self.child.exited.done()

    def note_forked(self, pid: int) -> None:
        """`pid`: of the shard. The template's own if it could not fork."""
        self._check.cancel()
        self.has_forked = pid != self.child.pid

    def fits(self, command: Command) -> bool:
        """Whether `command` starts what was loaded. What an order says may be different."""
        return _as_loaded(command) == _as_loaded(self._command)

    async def fork(self, command: Command, on_forked: Callable[[int], None]) -> ForkedChild:
        """Asks for a shard, which has `begun` once the template has forked it."""

        def note(pid: int) -> None:
            self.note_forked(pid)
            on_forked(pid)

        keeps = self._last is not None and self._last.process.returncode in SOUND_ENDS
        order = [command.env[EPOCH], command.env.get(MACHINE_SHARDS) or "0", *([KEEPS] if keeps else [])]
        process = ForkedProcess(self.child, note)
        self._last = await ForkedChild.order(command, process, self._control, " ".join(order))
        return self._last

    def _on_sign(self) -> None:
        self._alive_s = time.monotonic()
        with suppress(BlockingIOError, ConnectionResetError):
            if not self._control.recv(MAX_MESSAGE_BYTES):
                asyncio.get_running_loop().remove_reader(self._control)

    def _check_life(self) -> None:
        left_s = self._alive_s + STILL_S - time.monotonic()
        if left_s > 0:
            self._check = asyncio.get_running_loop().call_later(left_s, self._check_life)
            return
        logger.error("Phase load stands still for %.0f s", STILL_S)
        self.child.send(signal.SIGKILL)

    def _on_end(self, _: object) -> None:
        self._check.cancel()
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        if self.has_forked and not self.child.is_ending:
            rank = self.child.command.log_fields["rank"]
            how = self.child.how_it_ended
            logger.warning("The template of shard %s %s: the shard's next loss costs a start", rank, how)


class Templates:
    """The templates of a launcher, one for each rank of each replica. `start` starts a child. `add` is called with each
    shard before it is forked, and `on_forked` with the id of its process."""

    def __init__(
        self,
        start: Callable[[Command], Awaitable[Child]],
        add: Callable[[Child], Child],
        on_forked: Callable[[int], None],
    ) -> None:
        self._start = start
        self._add = add
        self._on_forked = on_forked
        self._templates: dict[tuple[int, int], Template] = {}

    def stand_by(self, replica: int, ranks: int) -> bool:
        """Whether each rank would be replaced at once."""
        found = [self._templates.get((replica, rank)) for rank in range(ranks)]
        return all(template is not None and template.stands_by for template in found)

    async def start_shard(self, command: Command, replica: int, rank: int) -> Child:
        """Has the rank's template fork a shard. Without one that can, another one is started, which loads first."""
        template = self._templates.get((replica, rank))
        if template is not None and not template.child.exited.done():
            if template.stands_by and template.fits(command):
                shard = await template.fork(command, self._on_forked)
                self._add(shard)
                await asyncio.wait([shard.process.forked], timeout=FORK_S)
                if shard.begun.is_set():
                    return shard
                logger.warning("The template of shard %d did not fork a shard: another one is started", rank)
                shard.send(signal.SIGKILL)
            template.child.send(signal.SIGKILL)
        template = self._templates[replica, rank] = await self._start_template(command)
        return self._add(await template.fork(command, self._on_forked))

    async def _start_template(self, command: Command) -> Template:
        adopt_orphans()
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setblocking(False)
        # numpy would start threads as it is imported, for work that shards do not have.
        env = {**command.env, FD: str(its.fileno()), "OPENBLAS_NUM_THREADS": "1"}
        try:
            child = await self._start(replace(command, name="template", env=env, pass_fds=(its.fileno(),)))
        except BaseException:
            own.close()
            raise
        finally:
            its.close()
        return Template(child, own, command)


def _as_loaded(command: Command) -> Command:
    """The command without what an order to the template says."""
    env = {name: value for name, value in command.env.items() if name not in (EPOCH, MACHINE_SHARDS)}
    return replace(command, env=env)


async def _end_of(pid: int) -> None:
    """Waits for the end of a child of this process."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    process_fd = os.pidfd_open(pid)
    loop.add_reader(process_fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(process_fd)
        os.close(process_fd)


def adopt_orphans() -> None:
    """Makes this process the parent of processes whose parent has ended, below it: so of forked shards. All others are
    only waited for when they end."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, _bury_orphans)


def _bury_orphans() -> None:
    """Reads the status of ended orphans. Each child that the launcher waits for leads a session of its own."""
    with suppress(OSError):
        for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
            with suppress(OSError):
                if os.getsid(pid) != pid:
                    os.waitpid(pid, os.WNOHANG)
