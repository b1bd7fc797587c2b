"""A fake engine that can be watched, and a state of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from text_generation_common.json_values import as_json
from text_generation_router.app import create_app
from text_generation_router.engine.protocol import EngineNote, EngineStanding, StateNews, StateWatcher
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.page.engine.history import History
from text_generation_router.page.engine.records import Records
from text_generation_router.page.engine.routes import ShownParts
from text_generation_router.view.values import (
    EngineSnapshot,
    FrontNote,
    RowColumns,
    ShardNote,
    SlotRuns,
    StepColumns,
    TreeColumns,
    WaitColumns,
)

STATE = EngineSnapshot(
    rows=RowColumns((7,), ("d1f0",), (1.5,), (40,), (16,), (40,), (40,), (12,), (60,), (30,), (52,), (0,)),
    num_running=1,
    queue=WaitColumns((8, 9), ("d1f0", "00ab"), (0.5, 0.4), (30, 31), (0, 0), (9, 9), ("memory", "turn")),
    num_waiting=2,
    slots=SlotRuns(100, 1, (4 * 40, 4 * 8 + 1, 4 * 16 + 2, 4 * 36 + 3), (40, 8, 16, 36)),
    tree=TreeColumns((16, 8), (-1, 0), (0, 16), (1, 0), (0, 3), 2, 24),
    steps=StepColumns((1, 2), (0, 1), (40, 0), (1, 0), (9000, 4000), (0, 10)),
    shards=ShardNote(True, 5.0, 1, 1, "reference"),
    fronts=(FrontNote("f1", 1), FrontNote("f0", 0, 3.0)),
    preemptions=0,
    recomputed_tokens=0,
    prefix_hit_tokens=16,
    prefilled_tokens=24,
)


class FakeWatched:
    """An engine with a state, and one that is away. `watcher`: the present watcher."""

    front_id = "f1"

    def __init__(self) -> None:
        self.state = STATE
        self.watcher: StateWatcher | None = None
        self.num_watches = 0

    def engines(self) -> Sequence[EngineNote]:
        return (EngineNote("e1", EngineStanding.READY, 1, 2), EngineNote("e2", EngineStanding.AWAY, loss="killed"))

    def watch_state(self, name: str, watcher: StateWatcher | None) -> None:
        self.watcher = watcher
        if watcher is not None:
            self.num_watches += 1
            watcher(StateNews(as_json(self.state)) if name == "e1" else StateNews(problem="not connected"))


def viewed(make_server: Callable[..., Any], **config: Any) -> Any:
    """A server with the view, whose requests are recorded."""
    records = Records()
    server = make_server(tracer=records, **config)
    server.watched = FakeWatched()
    server.history = History(server.engine, server.gate, server.metrics)
    shown = ShownParts(server.watched, server.gate, server.history, records, None)
    # Keys are counted in the registry of an application's own.
    server.app = create_app(replace(server.services, metrics=Metrics()), shown)
    return server
