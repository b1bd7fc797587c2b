"""Keeps shards alive: starts one group after the other, each with the next epoch number, until another start would not
help.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from text_generation_common.errors import CommandError
from text_generation_common.link import LinkEvent, LinkMessage
from text_generation_common.tasks import cancelled
from text_generation_launcher.errors import ShardCannotStart, ShardFailed
from text_generation_launcher.process import SEE_LOG, log_last_lines
from text_generation_launcher.restarts import Restarts
from text_generation_launcher.shard_group import Loss, ShardGroup, StartShard

logger = logging.getLogger("text_generation_launcher")

REMIND_S = 10.0


class Epochs:
    """Keeps one shard group alive. `run` is to be started as a task. `notify_router` sends a message to the router;
    `remove_files` removes files that dead shards have left.
    """

    def __init__(
        self,
        start_shard: StartShard,
        socket_paths: Sequence[str],
        notify_router: Callable[[LinkMessage], None],
        remove_files: Callable[[], None],
        restarts: Restarts,
        stands_by: Callable[[], bool] = lambda: False,
    ) -> None:
        """`stands_by` tells whether dead shards are replaced at once."""
        self._start_shard = start_shard
        self._socket_paths = socket_paths
        self._notify_router = notify_router
        self._remove_files = remove_files
        self._restarts = restarts
        self._stands_by = stands_by
        self._number = 0
        self._group: ShardGroup | None = None
        self._has_been_ready = False

    async def run(self) -> None:
        """Never returns. Logs the last lines of the failed shard and raises a CommandError when no further start can
        help. When the task is cancelled the shards live on: the supervisor stops them with SIGTERM.
        """
        self._remove_files()  # A launcher that was killed together with its janitor may have left files.
        while True:
            self._number += 1
            group = self._group = ShardGroup(self._number, self._socket_paths)
            try:
                loss = await self._run_group(group)
                # The failure is counted before the router is notified: the router may answer that a request is to
                # blame, which clears the record of the shards.
                wait_s = self._restarts.failed(self._stands_by())
                self._notify_router(LinkMessage(LinkEvent.LOST, self._number, loss.reason))
            finally:
                self._group = None
                await group.unwatch()
            await group.await_reported()
            error = self._final_error(loss, group, wait_s)
            if error is None or not group.error_of(loss):
                _log_loss(loss, group)
            await group.kill()
            self._remove_files()
            if error is not None:
                raise error
            logger.warning("Starting epoch %d of the shards in %.1fs", self._number + 1, wait_s)
            await asyncio.sleep(wait_s or 0.0)

    def confirm(self, epoch: int) -> None:
        """Records that a step of the shards of `epoch` has succeeded, as the router reported. The shards may be dead by
        now.
        """
        if epoch == self._number:
            self._restarts.succeeded()

    def clear_failures(self) -> None:
        """Clears the record of the shards: the router has ended the request that killed the last groups, so the shards
        are not at fault. This message may arrive after the start of the next group.
        """
        self._restarts.succeeded()

    def end_epoch(self, epoch: int, reason: str) -> None:
        """Ends the shards of `epoch` because the router asks for new ones. A request about an earlier group is
        ignored.
        """
        if self._group is not None and epoch == self._number:
            self._group.lose(Loss(f"The webserver asks for new shards: {reason}"))

    async def _run_group(self, group: ShardGroup) -> Loss:
        started_s = time.monotonic()
        logger.info("Starting shard")
        try:
            await group.start(self._start_shard)
        except CommandError as error:
            if self._number == 1:
                raise
            group.lose(Loss(f"Shard cannot start: {error.reason}"))
        if await _is_ready(group):
            logger.info("Shard ready in %.3fs", time.monotonic() - started_s)
            self._has_been_ready = True
            self._restarts.came_up()
            self._notify_router(LinkMessage(LinkEvent.READY, self._number))
        return await group.lost

    def _final_error(self, loss: Loss, group: ShardGroup, wait_s: float | None) -> CommandError | None:
        """The error that ends the launcher, or None if there should be a next start."""
        kind = ShardFailed if self._has_been_ready else ShardCannotStart
        error = group.error_of(loss)
        if self._number == 1 and not self._has_been_ready and group.is_user_error():
            return kind(error) if error else kind(loss.reason, SEE_LOG)
        if wait_s is not None:
            return None
        return kind(f"the shards failed too often, at last: {error or loss.reason}", "" if error else SEE_LOG)


async def _is_ready(group: ShardGroup) -> bool:
    """Waits until the group is ready. False when the group is lost before. There is no deadline: large weights load for
    minutes, and watchdogs notice a shard that hangs.
    """
    ready = asyncio.create_task(group.ready.wait())
    ends: list[asyncio.Future[Any]] = [ready, group.lost]
    try:
        while not (await asyncio.wait(ends, timeout=REMIND_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            logger.info("Waiting for shard to be ready...")
        return not group.lost.done()
    finally:
        await cancelled(ready)


def _log_loss(loss: Loss, group: ShardGroup) -> None:
    if loss.rank is None:
        logger.error("%s", loss.reason)
    else:
        log_last_lines(loss.reason, group.children[loss.rank])
        logger.error("Shard %d crashed", loss.rank)
