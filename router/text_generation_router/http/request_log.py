"""One log line for the end of each request, with no text of it: its status, kind of error, route and id."""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from text_generation_router.http.peer import Network, peer_of

logger = logging.getLogger(__name__)

# Refusals of one kind from one address within PERIOD_S seconds that have a line each. One more line counts the others.
MAX_LINES = 5
PERIOD_S = 1.0
CLIENT_GONE = 499  # nginx's status for a client that disconnected; the answer is rarely read
UNAVAILABLE = 503  # a refusal: the request has not been begun
FAILED = 424  # TGI's status of a generation that has failed
# Routes that are asked all the time by machines: their answers are lines of level DEBUG.
POLLED = frozenset({"/", "/health", "/live", "/metrics", "/ping", "/ready", "/ui/state"})
IS_LOGGED = "text_generation_router.is_logged"  # in the scope of a request whose end has been logged


@dataclass(slots=True)
class RequestEnd:
    """What is known about the end of a request besides its answer."""

    route: str = ""  # the path of the request's route
    error_type: str | None = None  # the `error_type` of the newest error in an answer or event
    error_status: int = 0
    num_tokens: int = 0  # tokens that were made
    num_successes: int = 0  # generations that have logged their ends
    adapter: str = ""  # the name of the LoRA adapter of its generations


request_end: ContextVar[RequestEnd | None] = ContextVar("request_end", default=None)


class RefusalLog:
    """Logs refusals: of one kind from one address, MAX_LINES lines and one count in PERIOD_S seconds."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, object]] = Counter()

    def add(self, address: str, error_type: str, fields: dict[str, Any]) -> None:
        kind = (address, error_type, fields["status"])
        self._counts[kind] += 1
        if self._counts[kind] == 1:
            asyncio.get_running_loop().call_later(PERIOD_S, self._end, kind)
        if self._counts[kind] <= MAX_LINES:
            logger.warning("Refused", extra={"fields": fields})

    def _end(self, kind: tuple[str, str, object]) -> None:
        num_unlogged = self._counts.pop(kind) - MAX_LINES
        if num_unlogged > 0:
            address, error_type, status = kind
            fields = {"status": status, "error_type": error_type, "address": address, "requests": num_unlogged}
            logger.warning("Refused more", extra={"fields": fields})


class Logged:
    """The application, whose requests have a log line each when they end. A generation that succeeds logs its own."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], trusted_proxies: Sequence[Network]) -> None:
        self._app = app
        self._routes = routes  # the application's own list, to which routes are added later
        self._trusted_proxies = trusted_proxies
        self._refusals = RefusalLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        end, status, has_ended = RequestEnd(self._route_of(scope)), CLIENT_GONE, False
        request_end.set(end)

        async def send_noted(message: Message) -> None:
            nonlocal status, has_ended
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                has_ended = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception:
            end.error_type, end.error_status = "internal", 500
            raise
        finally:
            if not scope.get(IS_LOGGED):
                self._log(scope, end, status if has_ended else CLIENT_GONE)

    def _log(self, scope: Scope, end: RequestEnd, status: int) -> None:
        fields = {"method": scope["method"], "route": self._route_of(scope)}
        fields |= {"adapter": end.adapter} if end.adapter else {}
        if end.error_type is not None:
            code = end.error_status
            fields = {"status": code, "error_type": end.error_type, **fields}
            is_refusal = not end.num_tokens and (code == UNAVAILABLE or (code < 500 and code != FAILED))
            if not is_refusal:
                logger.error("Failed", extra={"fields": {**fields, "generated_tokens": end.num_tokens}})
            else:
                self._refusals.add(peer_of(Request(scope), self._trusted_proxies), end.error_type, fields)
        elif status == CLIENT_GONE:
            fields = {"status": status, **fields, "generated_tokens": end.num_tokens}
            logger.info("Cancelled", extra={"fields": fields})
        elif not end.num_successes:
            is_polled = scope["method"] == "OPTIONS" or (scope["method"] != "POST" and fields["route"] in POLLED)
            level = logging.DEBUG if is_polled else logging.INFO
            logger.log(level, "Answered", extra={"fields": {"status": status, **fields}})

    def _route_of(self, scope: Scope) -> str:
        """The path of the request's route, never other words of its client; "" if there is no such route."""
        path: str = scope["path"]
        return path if path in self._endpoints else self._patterns.get(scope.get("endpoint"), "")

    @cached_property
    def _endpoints(self) -> dict[str, Any]:
        """By path. Made when the first request ends, because all routes are there by then."""
        return {route.path: route.endpoint for route in self._routes if isinstance(route, Route)}

    @cached_property
    def _patterns(self) -> dict[Any, str]:
        """The path of each endpoint, as the application has it: `/v1/models/{name}`."""
        return {endpoint: path for path, endpoint in self._endpoints.items()}
