"""Metrics of an engine's connections to its fronts."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from text_generation_router.errors import FrontLostError
from text_generation_router.wire.errors import WireError

# What ended a front's stream: the front itself, or an error of the front.
REASONS: dict[type[BaseException], str] = {WireError: "protocol", FrontLostError: "unread"}
CLOSED, FAILED = "closed", "failed"


class FrontCounts:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.fronts = Gauge("tgi_engine_fronts", "Fronts that are connected", registry=registry)
        self.dropped = Counter(
            "tgi_engine_dropped_messages", "Messages about requests that are unknown", registry=registry
        )
        self.turned_away = Counter(
            "tgi_engine_turned_away", "Fronts that were refused because too many connect", registry=registry
        )
        self._ends = Counter("tgi_engine_front_ends", "Fronts whose stream ended", ["why"], registry=registry)
        for reason in (CLOSED, FAILED, *REASONS.values()):
            self._ends.labels(why=reason)

    def ended(self, error: BaseException | None) -> None:
        """Notes that a front's stream ended. None: the front closed it, or its connection broke."""
        self._ends.labels(why=CLOSED if error is None else REASONS.get(type(error), FAILED)).inc()
