"""The template of routers, fronts and engines: a process that has imported their modules and forks them (the router's
`template.py`), so that a dead one is replaced without a second of imports.
"""

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace

from text_generation_launcher.commands import KEYS, Command
from text_generation_launcher.process import Child
from text_generation_launcher.standby import FORK_S, ForkedChild, ForkedProcess, adopt_orphans

logger = logging.getLogger("text_generation_launcher")

FD = "ROUTER_TEMPLATE_FD"
# Bytes of the template's command line, behind the program: the forked processes show theirs in its place.
ROOM = 8192


class RouterTemplate:
    """`start` starts the template's process. `add` is called with each child before it is forked, and `on_forked` with
    the id of its process."""

    def __init__(
        self,
        start: Callable[[Command], Awaitable[Child]],
        add: Callable[[Child], Child],
        on_forked: Callable[[int], None],
    ) -> None:
        self._start = start
        self._add = add
        self._on_forked = on_forked
        self._child: Child | None = None
        self._control: socket.socket | None = None
        self._has_forked = False
        self._starting = asyncio.Lock()

    @property
    def stands_by(self) -> bool:
        """Whether the next child starts at once."""
        return self._has_forked and self._child is not None and not self._child.exited.done()

    def renew(self) -> None:
        """The next child has the code as it is on disk then: a new template imports it."""
        if self._child is not None:
            self._child.send(signal.SIGKILL)
            self._child = None

    async def start_child(self, command: Command, program: str) -> Child:
        """`program`: what the template runs. Where it cannot fork, the child is started without it."""
        async with self._starting:
            limit_s = FORK_S if self.stands_by else None  # the first child waits for the imports
            if self._child is None or self._child.exited.done():
                self._child, self._control = await self._start_template(command, program)
            child = await self._fork(command, self._child)
        await asyncio.wait([child.process.forked], timeout=limit_s)
        if child.begun.is_set() or child.is_ending:
            return child
        child.send(signal.SIGKILL)  # and with it the template, from which others may be waiting for theirs
        await asyncio.wait([child.exited])
        logger.warning("The template of webservers did not fork: this one imports its modules itself")
        return await self._start(command)

    async def _fork(self, command: Command, template: Child) -> ForkedChild:
        process = ForkedProcess(template, self._note_forked)
        order = json.dumps({"argv": command.argv, "env": dict(command.env), "pass_fds": command.pass_fds})
        with os.fdopen(os.memfd_create("order"), "w") as file:
            file.write(order)
            file.flush()
            file.seek(0)
            assert self._control is not None
            fds = [file.fileno(), *command.pass_fds]
            child = await ForkedChild.order(command, process, self._control, "fork", fds)
        self._add(child)
        return child

    def _note_forked(self, pid: int) -> None:
        self._has_forked = True
        self._on_forked(pid)

    async def _start_template(self, command: Command, program: str) -> tuple[Child, socket.socket]:
        adopt_orphans()
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setblocking(False)
        env = {name: value for name, value in command.env.items() if name not in KEYS}
        # numpy would start threads as it is imported, for work that routers do not have.
        env |= {FD: str(its.fileno()), "OPENBLAS_NUM_THREADS": "1"}
        argv = program, "template".ljust(ROOM)
        try:
            with its:
                child = await self._start(
                    replace(command, name="router-template", argv=argv, env=env, pass_fds=(its.fileno(),))
                )
        except BaseException:
            own.close()
            raise
        self._has_forked = False
        child.exited.add_done_callback(lambda _: self._on_end(child, own))
        return child, own

    def _on_end(self, child: Child, control: socket.socket) -> None:
        control.close()
        if self._has_forked and not child.is_ending and not child.exited.cancelled():
            logger.warning("The template of webservers %s: the next loss costs a start", child.how_it_ended)
