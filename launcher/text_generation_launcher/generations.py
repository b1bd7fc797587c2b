"""Keeps shards alive: one group after the other, each a new generation, until another would not help."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from text_generation_launcher.errors import LauncherError, ShardCannotStart, ShardFailed
from text_generation_launcher.link import Event, Message
from text_generation_launcher.process import Child, log_last_lines
from text_generation_launcher.restarts import Restarts
from text_generation_launcher.shard_group import Loss, ShardGroup
from text_generation_launcher.tasks import cancelled

logger = logging.getLogger("text_generation_launcher")

REMIND_S = 10.0


class Generations:
    """`run` it in a task. `announce` passes messages to the router; `clean` removes the files of dead shards."""

    def __init__(
        self,
        socket_paths: Sequence[str],
        start_shard: Callable[[int, int], Awaitable[Child]],  # of rank and generation
        announce: Callable[[Message], None],
        clean: Callable[[], None],
        restarts: Restarts,
    ) -> None:
        self._socket_paths = socket_paths
        self._start_shard = start_shard
        self._announce = announce
        self._clean = clean
        self._restarts = restarts
        self._number = 0
        self._group: ShardGroup | None = None
        self._has_been_ready = False

    async def run(self) -> None:
        """Never returns. Raises a LauncherError when another start would not help, after the culprit's last lines.

        A cancelled run leaves its shards to the canceller, who may have time to end them politely.
        """
        self._clean()  # after a launcher that was killed together with its janitor
        while True:
            self._number += 1
            group = self._group = ShardGroup(self._socket_paths)
            try:
                loss = await self._life_of(group)
                # Counted before the router hears of it, whose answer may be that a request is to blame, and not they.
                wait_s = self._restarts.failed() if loss.counts else 0.0
                self._announce(Message(Event.LOST, self._number, loss.reason))
            finally:
                self._group = None
                await group.unwatch()
            _log_loss(loss, group)
            await group.kill()
            self._clean()
            await self._wait_after(loss, group, wait_s)

    def confirm(self, generation: int) -> None:
        """The router has an answer to a step of `generation`, which may be dead by now, and was of use all the same."""
        if generation == self._number:
            self._restarts.succeeded()

    def excuse(self) -> None:
        """The router has ended the request of which the last generations died: that is no fault of the shards, and the
        next request finds a clean record. The word may come after the next generation has begun."""
        self._restarts.succeeded()

    def end_generation(self, generation: int, reason: str) -> None:
        """The router has no use for `generation`; it may speak of one that is over."""
        if self._group is not None and generation == self._number:
            self._group.lose(Loss(f"The webserver asks for new shards: {reason}"))

    def end_ready_generation(self, reason: str) -> None:
        """A group that is starting has heard nothing yet, and is left to its start."""
        if self._group is not None and self._group.ready.is_set():
            self._group.lose(Loss(reason, counts=False))

    async def _life_of(self, group: ShardGroup) -> Loss:
        started_s = time.monotonic()
        logger.info("Starting shard")
        try:
            await group.start(lambda rank: self._start_shard(rank, self._number))
        except LauncherError as error:
            if self._number == 1:
                raise
            group.lose(Loss(f"Shard cannot start: {error.reason}"))
        if await _is_ready(group):
            logger.info("Shard ready in %.3fs", time.monotonic() - started_s)
            self._has_been_ready = True
            self._restarts.came_up()
            self._announce(Message(Event.READY, self._number))
        return await group.lost

    async def _wait_after(self, loss: Loss, group: ShardGroup, wait_s: float | None) -> None:
        """Until the next start; raises when there should be none."""
        error = ShardFailed if self._has_been_ready else ShardCannotStart
        if self._number == 1 and not self._has_been_ready and _is_user_error(loss, group):
            raise error
        if wait_s is None:
            logger.error("The shards failed too often: giving up")
            raise error
        logger.warning("Starting generation %d of the shards in %.1fs", self._number + 1, wait_s)
        await asyncio.sleep(wait_s)


async def _is_ready(group: ShardGroup) -> bool:
    """False when the group is lost first. No deadline: large weights take their time, and the watchdogs are awake."""
    ready = asyncio.create_task(group.ready.wait())
    ends: list[asyncio.Future[Any]] = [ready, group.lost]
    try:
        while not (await asyncio.wait(ends, timeout=REMIND_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            logger.info("Waiting for shard to be ready...")
        return not group.lost.done()
    finally:
        await cancelled(ready)


def _is_user_error(loss: Loss, group: ShardGroup) -> bool:
    """An error that only the user can mend; the shard has said which."""
    if loss.rank is None:
        return False
    exited = group.children[loss.rank].exited
    return exited.done() and exited.result() == os.EX_CONFIG


def _log_loss(loss: Loss, group: ShardGroup) -> None:
    if loss.rank is None:
        logger.error("%s", loss.reason)
    else:
        log_last_lines(loss.reason, group.children[loss.rank])
        logger.error("Shard %d crashed", loss.rank)
