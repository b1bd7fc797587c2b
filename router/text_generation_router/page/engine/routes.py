"""The routes of the engine view: a stream of states, fifteen minutes of history, and the newest requests."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from text_generation_router.api.admin import ReplicaControl
from text_generation_router.engine.protocol import STATE_BYTES_PER_S, StateNews, Watchable
from text_generation_router.engine.state_hub import StateHub, StateViewer
from text_generation_router.errors import NoSuchRouteError, OverloadedError
from text_generation_router.http.encoding import json_response, to_event
from text_generation_router.http.gate import Gate
from text_generation_router.http.sse import EventStream
from text_generation_router.page.engine.access import ViewAccess
from text_generation_router.page.engine.history import EVERY_S, History
from text_generation_router.page.engine.records import Records

# The paths of the view begin so. None of them gets a CORS header.
PREFIX = "/engine/"
# Maximum number of viewers of a front; minimum and maximum seconds between two events of a viewer.
MAX_VIEWERS, MIN_PAUSE_S, MAX_PAUSE_S = 32, 0.2, 1.0
# Seconds after which a stream ends and the page asks again, so that a front that leaves does not wait for viewers.
STREAM_S = 10.0
# Most requests of the list.
MAX_LISTED = 50
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


@dataclass(frozen=True, slots=True)
class ShownParts:
    """What the view shows, besides the states of engines."""

    engine: Watchable
    gate: Gate
    history: History
    records: Records
    replicas: ReplicaControl | None  # None: no launcher has replicas


class EngineRoutes:
    """`endpoints`: the endpoint of each path. The access is checked before anything else is read."""

    def __init__(self, parts: ShownParts, access: ViewAccess) -> None:
        self._parts = parts
        self._hub = StateHub(parts.engine)
        self._access = access
        self.endpoints: dict[str, Callable[[Request], Awaitable[Response]]] = {
            f"{PREFIX}state": self.state,
            f"{PREFIX}history": self.history,
            f"{PREFIX}requests": self.requests,
            f"{PREFIX}requests/{{id}}": self.request,
        }

    async def state(self, request: Request) -> Response:
        """The state of one engine, and what is known of all, as a stream of events."""
        self._access.check(request)
        if request.method == "HEAD":
            return Response(headers=HEADERS)
        if self._hub.num_viewers >= MAX_VIEWERS:
            raise OverloadedError
        return EventStream(self._events(request.query_params.get("engine", "")), HEADERS)

    async def history(self, request: Request) -> Response:
        """The last fifteen minutes, a number for each second."""
        self._access.check(request)
        return json_response({"every_s": EVERY_S, "columns": self._parts.history.table()}, HEADERS)

    async def requests(self, request: Request) -> Response:
        """The newest requests of this front."""
        self._access.check(request)
        return json_response({"requests": self._parts.records.newest(MAX_LISTED)}, HEADERS)

    async def request(self, request: Request) -> Response:
        """The stages of one request. Ids that are unknown, or belong to another front or server, are not told apart."""
        self._access.check(request)
        found = self._parts.records.find(request.path_params["id"])
        if found is None:
            raise NoSuchRouteError
        return json_response({"id": request.path_params["id"], "generations": found}, HEADERS)

    async def _events(self, wanted: str) -> AsyncGenerator[bytes, None]:
        """States at the viewer's pace. While an event waits to be read, newer states take each other's place."""
        names = [note.name for note in self._parts.engine.engines()]
        name = wanted if wanted in names or not names else names[0]
        clock = asyncio.get_running_loop().time
        until_s = clock() + STREAM_S
        with self._hub.watching(name) as viewer:
            while not self._parts.gate.is_shut:
                event = self._event(name, await viewer.next(MAX_PAUSE_S), viewer)
                yield event
                if clock() >= until_s:
                    return
                await asyncio.sleep(max(MIN_PAUSE_S, len(event) / STATE_BYTES_PER_S))

    def _event(self, name: str, news: StateNews | None, viewer: StateViewer) -> bytes:
        """`news` None: nothing is new of the engine, so its state is left out."""
        parts = self._parts
        report = parts.replicas.report if parts.replicas is not None else None
        state = orjson.Fragment(news.state) if news is not None and news.state else None
        event: dict[str, Any] = {
            "engine": name,
            "problem": viewer.news.problem if viewer.news is not None else "",
            "skipped": viewer.num_skipped,
            "engines": parts.engine.engines(),
            "front": {"id": parts.engine.front_id, "open": parts.gate.num_unfinished},
            "replicas": report.as_json() if report is not None else None,
            "state": state,
        }
        return to_event(event)
