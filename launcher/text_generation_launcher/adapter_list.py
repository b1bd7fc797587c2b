"""The LoRA adapters that are served now. A front asks for a change, and every front takes it before the first one is
answered. Fronts that start later get the list, and name its adapters to engines."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from text_generation_common.adapters.listed import listed
from text_generation_common.link import AdapterNote, LinkEvent, LinkMessage, write_adapters
from text_generation_launcher.kept_process import KeptProcess

logger = logging.getLogger("text_generation_launcher")

# Seconds for all fronts to take a list, and between two looks at which of them live. The front that has asked waits for
# longer.
TAKE_S, LOOK_S = 10.0, 0.2


class AdapterList:
    """`take` gets the messages of fronts. `latest` is for fronts that start."""

    def __init__(self, file: str, at_start: str | None, fronts: Callable[[], Iterable[KeptProcess]]) -> None:
        """`file`: where fronts read the list. `at_start`: --lora-adapters, with folders and digests. `fronts`: those
        that there are now."""
        self._file = file
        self._fronts = fronts
        self._notes = {each.name: AdapterNote(each.name, each.path, each.revision) for each in listed(at_start)}
        self._version = 0  # the list's number; 0: no change was asked for
        self._taken: dict[KeptProcess, int] = {}  # the newest version that each front has taken
        self._changed = asyncio.Event()
        self._turns = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def latest(self) -> LinkMessage | None:
        return LinkMessage(LinkEvent.ADAPTERS, self._version, address=self._file) if self._version else None

    def take(self, front: KeptProcess, message: LinkMessage) -> None:
        if message.event is LinkEvent.ADAPTERS_TAKEN:
            self._taken[front] = message.epoch
            self._changed.set()
        elif message.event is LinkEvent.ADAPTER and message.adapter is not None:
            task = asyncio.create_task(self._change(front, message.epoch, message.adapter), name="adapters")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _change(self, front: KeptProcess, number: int, note: AdapterNote) -> None:
        async with self._turns:
            front.send(LinkMessage(LinkEvent.ADAPTER_SET, number, reason=await self._set(note)))

    async def _set(self, note: AdapterNote) -> str:
        """Returns why not all fronts have the new list, or ""."""
        notes = {name: other for name, other in self._notes.items() if name != note.name or note.digest}
        notes |= {note.name: note} if note.digest else {}
        try:
            write_adapters(self._file, notes.values())
        except OSError as error:
            return f"nothing has changed: the list of adapters cannot be written: {error.strerror}"
        self._notes, self._version = notes, self._version + 1
        latest = self.latest
        assert latest is not None
        for each in self._fronts():
            each.send(latest)
        try:
            async with asyncio.timeout(TAKE_S):
                while self._missing():
                    self._changed.clear()
                    with suppress(TimeoutError):  # a front that has ended tells nothing
                        await asyncio.wait_for(self._changed.wait(), LOOK_S)
        except TimeoutError:
            missing = ", ".join(each.title for each in self._missing())
            logger.error("%s did not take the new list of adapters within %.0f s", missing, TAKE_S)
            return f"the change is made, but {missing} did not take it within {TAKE_S:g} s: look at the log"
        return ""

    def _missing(self) -> list[KeptProcess]:
        """The fronts that serve, and have not taken the newest list."""
        living = [front for front in self._fronts() if front.listening.is_set()]
        self._taken = {front: version for front, version in self._taken.items() if front in living}
        return [front for front in living if self._taken.get(front, 0) < self._version]
