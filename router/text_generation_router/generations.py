"""Where shards come from: each start of their group is a new generation, and the launcher says when one is there."""

import asyncio
from typing import Protocol

from text_generation_launcher.link import Event, Link, Message
from text_generation_router.errors import ShardsError
from text_generation_router.shards import ShardGroup

RETRY_S = 1.0


class Generations(Protocol):
    async def next(self) -> ShardGroup:
        """Waits for shards that have not been handed out before, and connects to them. ShardsError: there will be
        none any more."""
        ...

    def lost(self, group: ShardGroup, reason: str) -> None:
        """This group is of no use any more."""

    def confirmed(self, group: ShardGroup) -> None:
        """A step of this group has made tokens or computed chunks. Said once for each group."""

    def blamed(self, group: ShardGroup) -> None:
        """The loss of this group has been held against a request, which has ended over it."""

    def listening(self) -> None:
        """The router serves requests from now on."""

    async def close(self) -> None: ...


class LaunchedGenerations:
    """Shards that a launcher starts, watches and starts again."""

    def __init__(self, link: Link, master_uds_path: str) -> None:
        self._link = link
        self._path = master_uds_path
        self._ready = 0  # the newest generation that the launcher calls ready
        self._taken = 0
        self._launcher_ended = False
        self._changed = asyncio.Event()
        self._group: ShardGroup | None = None
        self._task = asyncio.create_task(self._listen(), name="launcher")

    async def next(self) -> ShardGroup:
        while True:
            while self._ready <= self._taken or self._launcher_ended:
                if self._launcher_ended:
                    raise ShardsError("the launcher has ended, or given up: there will be no shards any more")
                self._changed.clear()
                await self._changed.wait()
            self._taken = self._ready
            try:
                group = await ShardGroup.connect(self._path)
            except ShardsError as error:
                self._send(Event.RESTART, self._taken, str(error))
                continue
            if group.generation == self._taken == self._ready:
                self._group = group
                return group
            await group.close()  # replaced while we were connecting

    def lost(self, group: ShardGroup, reason: str) -> None:
        self._send(Event.RESTART, group.generation, reason)

    def confirmed(self, group: ShardGroup) -> None:
        self._send(Event.CONFIRMED, group.generation)

    def blamed(self, group: ShardGroup) -> None:
        self._send(Event.BLAMED, group.generation)

    def listening(self) -> None:
        self._send(Event.LISTENING)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._link.close()

    def _send(self, event: Event, generation: int = 0, reason: str = "") -> None:
        self._link.send(Message(event, generation, reason))

    async def _listen(self) -> None:
        while (message := await self._link.receive()) is not None:
            if message.event is Event.READY:
                self._ready = message.generation
                self._changed.set()
            elif message.event is Event.PING:
                self._send(Event.PONG)
            elif message.event is Event.LOST and self._group and self._group.generation == message.generation:
                self._group.lose(message.reason)
        self._launcher_ended = True
        self._changed.set()
        if self._group is not None:
            self._group.lose("the launcher has ended")


class StandaloneGenerations:
    """Shards that somebody else starts. A socket that answers again is a new generation."""

    def __init__(self, master_uds_path: str) -> None:
        self._path = master_uds_path
        self._connected = False

    async def next(self) -> ShardGroup:
        """ShardsError if the first ones cannot be reached."""
        if self._connected:
            await asyncio.sleep(RETRY_S)  # those that answer and are of no use are not asked in a hurry
        while True:
            try:
                group = await ShardGroup.connect(self._path)
                self._connected = True
                return group
            except ShardsError:
                if not self._connected:
                    raise
                await asyncio.sleep(RETRY_S)

    def lost(self, group: ShardGroup, reason: str) -> None:
        pass  # there is nobody to tell

    def confirmed(self, group: ShardGroup) -> None:
        pass

    def blamed(self, group: ShardGroup) -> None:
        pass

    def listening(self) -> None:
        pass

    async def close(self) -> None:
        pass
