"""Sources of shard groups for the engine. Each start of the group is a new epoch; the launcher announces when its
shards are ready.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from text_generation_common.link import Link, LinkEvent, LinkMessage
from text_generation_common.tasks import cancelled
from text_generation_router.engine.shards import ShardedClient
from text_generation_router.errors import ShardsError

RETRY_S = 1.0


class ShardGroups(Protocol):
    async def next(self) -> ShardedClient:
        """Waits for a new group, one that was not returned before, and connects to it. Raises ShardsError if no more
        groups will come.
        """
        ...

    def lost(self, group: ShardedClient, reason: str) -> None:
        """To be called when the engine cannot use this group any more."""

    def confirmed(self, group: ShardedClient) -> None:
        """To be called once for each group, when a first step has made tokens or computed chunks."""

    def blamed(self, group: ShardedClient) -> None:
        """To be called when the loss of this group was blamed on a request, which has ended with an error."""

    def listening(self, address: str = "") -> None:
        """To be called when the router begins to serve requests, or an engine at `address`."""

    def deserted(self, reason: str) -> None:
        """To be called when an engine in a process of its own is not needed any more."""

    async def close(self) -> None: ...


class LaunchedGroups:
    """Shards that the launcher starts, watches and restarts."""

    def __init__(
        self, link: Link, master_uds_path: str, on_other: Callable[[LinkMessage], None] = lambda message: None
    ) -> None:
        """`on_other` is called with messages that are not about shards."""
        self._link = link
        self._on_other = on_other
        self._path = master_uds_path
        self._ready = 0  # newest epoch that the launcher has announced as ready
        self._taken = 0
        self._launcher_ended = False
        self._changed = asyncio.Event()
        self._group: ShardedClient | None = None
        self._task = asyncio.create_task(self._listen(), name="launcher")

    async def next(self) -> ShardedClient:
        while True:
            while self._ready <= self._taken or self._launcher_ended:
                if self._launcher_ended:
                    raise ShardsError("the launcher has ended, or given up: there will be no shards any more")
                self._changed.clear()
                await self._changed.wait()
            self._taken = self._ready
            try:
                group = await ShardedClient.connect(self._path, takes_over=True)
            except ShardsError as error:
                self._send(LinkEvent.RESTART, self._taken, str(error))
                continue
            if group.epoch == self._taken == self._ready:
                self._group = group
                return group
            await group.close()  # a newer group replaced this group meanwhile

    def lost(self, group: ShardedClient, reason: str) -> None:
        self._send(LinkEvent.RESTART, group.epoch, reason)

    def confirmed(self, group: ShardedClient) -> None:
        self._send(LinkEvent.CONFIRMED, group.epoch)

    def blamed(self, group: ShardedClient) -> None:
        self._send(LinkEvent.BLAMED, group.epoch)

    def listening(self, address: str = "") -> None:
        self._link.send(LinkMessage(LinkEvent.LISTENING, address=address))

    def deserted(self, reason: str) -> None:
        self._send(LinkEvent.DESERTED, reason=reason)

    async def close(self) -> None:
        await cancelled(self._task)
        self._link.close()

    def _send(self, event: LinkEvent, epoch: int = 0, reason: str = "") -> None:
        self._link.send(LinkMessage(event, epoch, reason))

    async def _listen(self) -> None:
        while (message := await self._link.receive()) is not None:
            if message.event is LinkEvent.READY:
                self._ready = message.epoch
                self._changed.set()
            elif message.event is LinkEvent.PING:
                self._send(LinkEvent.PONG)
            elif message.event is LinkEvent.LOST:
                if self._group and self._group.epoch == message.epoch:
                    self._group.lose(message.reason)
            else:
                self._on_other(message)
        self._launcher_ended = True
        self._changed.set()
        if self._group is not None:
            self._group.lose("the launcher has ended")


class StandaloneGroups:
    """Shards that run without a launcher. When the shards' socket can be reached again after a loss, a new epoch
    begins.
    """

    def __init__(self, master_uds_path: str) -> None:
        self._path = master_uds_path
        self._connected = False

    async def next(self) -> ShardedClient:
        """Connects to the group. Raises ShardsError if the first group cannot be reached."""
        if self._connected:
            await asyncio.sleep(RETRY_S)  # wait, so that a group that answers but fails is not retried in a tight loop
        while True:
            try:
                group = await ShardedClient.connect(self._path, takes_over=True)
                self._connected = True
                return group
            except ShardsError:
                if not self._connected:
                    raise
                await asyncio.sleep(RETRY_S)

    def lost(self, group: ShardedClient, reason: str) -> None:
        pass  # no launcher to inform

    def confirmed(self, group: ShardedClient) -> None:
        pass

    def blamed(self, group: ShardedClient) -> None:
        pass

    def listening(self, address: str = "") -> None:
        pass

    def deserted(self, reason: str) -> None:
        pass

    async def close(self) -> None:
        pass
