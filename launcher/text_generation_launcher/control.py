"""Commands to a running launcher: a unix socket for its user, with one JSON object in each line.

A command is {"command": NAME, …}; the answer is {"answer": …}, or {"error": …, "hint": …}.
"""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any

from text_generation_common.errors import AddressInUse, ArgumentValidation, CommandError, WrongUsage
from text_generation_launcher.control_call import LINE_BYTES
from text_generation_launcher.errors import ScaleRefused
from text_generation_launcher.serving import FrontsAndReplicas

logger = logging.getLogger("text_generation_launcher")

# Seconds for a command to arrive.
READ_S = 5.0

Run = Callable[[Mapping[str, Any]], object]


def commands_of(serving: FrontsAndReplicas) -> dict[str, Run]:
    """What each command does. Its result is the answer, as JSON; a CommandError is told."""

    def report(command: Mapping[str, Any]) -> object:
        if serving.replicas is None:
            raise ScaleRefused("this server starts no replicas", "start it with --replicas N")
        demand = serving.demand
        return serving.replicas.report.as_json() | {"num_requests": demand.requests if demand is not None else 0}

    def scale(command: Mapping[str, Any]) -> object:
        wanted = command.get("replicas")
        if type(wanted) is not int:
            raise WrongUsage(f"`replicas` is {wanted!r}", "give a number of replicas")
        serving.scale(wanted)
        return report(command)

    def restart_fronts(command: Mapping[str, Any]) -> object:
        serving.restart_fronts()
        return {}

    def front(command: Mapping[str, Any]) -> object:
        demand = serving.demand
        return {"listens": serving.has_listened, "demand": None if demand is None else asdict(demand)}

    return {"replicas": report, "scale": scale, "restart-fronts": restart_fronts, "front": front}


class ControlSocket:
    """The launcher's end."""

    def __init__(self, commands: Mapping[str, Run]) -> None:
        self._commands = commands

    def answer(self, line: bytes) -> dict[str, Any]:
        try:
            return {"answer": self._run(line)}
        except CommandError as error:
            return {"error": error.reason, "hint": error.hint}

    def _run(self, line: bytes) -> object:
        try:
            command = json.loads(line)
            run = self._commands[command["command"]]
        except (ValueError, KeyError, TypeError):
            raise ArgumentValidation("not a command", f"known are {', '.join(self._commands)}") from None
        return run(command)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one command."""
        try:
            with suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
                async with asyncio.timeout(READ_S):
                    line = await reader.readuntil(b"\n")
                    writer.write(json.dumps(self.answer(line)).encode() + b"\n")
                    await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def controlled(path: str, commands: Mapping[str, Run]) -> AsyncIterator[None]:
    """Inside this context commands are taken on a socket at `path`, which only this user can open. AddressInUse if it
    cannot be made."""
    with suppress(FileNotFoundError):
        os.unlink(path)  # a killed launcher has left it: the place is locked
    before = os.umask(0o177)
    try:
        server = await asyncio.start_unix_server(ControlSocket(commands).serve, path, limit=LINE_BYTES)
    except OSError as error:
        raise AddressInUse(f"cannot make the socket {path} ({error.strerror}): choose another --port") from error
    finally:
        os.umask(before)
    try:
        yield
    finally:
        server.close()
        with suppress(FileNotFoundError):
            os.unlink(path)
