"""One watch of an engine for all its viewers: the engine is watched while it has viewers, and by one watcher."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from text_generation_router.engine.protocol import StateNews, Watchable


class StateViewer:
    """A reader of states with a pace of its own. Only the newest state waits for it: older states are skipped."""

    def __init__(self) -> None:
        self.news: StateNews | None = None  # None: there is none yet
        self.num_skipped = 0
        self._changed = asyncio.Event()

    def put(self, news: StateNews) -> None:
        self.num_skipped += self._changed.is_set()
        self.news = news
        self._changed.set()

    async def next(self, wait_s: float | None = None) -> StateNews | None:
        """The newest state that this viewer has not got yet. None: no state came within `wait_s` seconds."""
        try:
            await asyncio.wait_for(self._changed.wait(), wait_s)
        except TimeoutError:
            return None
        self._changed.clear()
        return self.news


class StateHub:
    def __init__(self, engine: Watchable) -> None:
        self._engine = engine
        self._viewers: dict[str, set[StateViewer]] = {}

    @property
    def num_viewers(self) -> int:
        return sum(map(len, self._viewers.values()))

    @contextmanager
    def watching(self, name: str) -> Iterator[StateViewer]:
        """Inside this context the viewer gets the states of the engine `name`."""
        viewer = StateViewer()
        viewers = self._viewers.setdefault(name, set())
        viewers.add(viewer)
        if len(viewers) == 1:
            self._engine.watch_state(name, lambda news: self._put(name, news))
        else:
            newest = next((other.news for other in viewers if other.news is not None), None)
            if newest is not None:
                viewer.put(newest)
        try:
            yield viewer
        finally:
            viewers.discard(viewer)
            if not viewers:
                del self._viewers[name]
                self._engine.watch_state(name, None)

    def _put(self, name: str, news: StateNews) -> None:
        for viewer in self._viewers.get(name, ()):
            viewer.put(news)
