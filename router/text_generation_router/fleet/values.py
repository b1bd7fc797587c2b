"""The values that a front and an engine send each other: orders of the front, reports of the engine, and how much news
an engine may send.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from text_generation_router.engine.protocol import Snapshot
from text_generation_router.fleet.choice import EngineLoad
from text_generation_router.scheduling.request import Share
from text_generation_router.wire.submits import Submitted
from text_generation_router.wire.version import VERSION, WireError


@dataclass(frozen=True, slots=True)
class EndAt:
    index: int
    count: int  # number of output tokens that count


@dataclass(frozen=True, slots=True)
class Cancel:
    index: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    index: int
    even_begun: bool = False


@dataclass(frozen=True, slots=True)
class Credit:
    index: int
    tokens: int


class EngineLoss(Enum):
    """The cause of the end of a connection to an engine."""

    OUTSIDE = "outside"  # the link was cut, the process was stopped, or the front ended it: no request is the cause
    # The engine fell silent while another engine sent messages: a request that meets several such losses may be the
    # cause.
    SILENT = "silent"
    DIED = "died"  # the engine's process died, as far as the front can know
    CUT_OFF = "cut off"  # the engine still runs, and has ended this front's stream, perhaps for an unanswered Submit


# A list is a Submit: the sequences of one prompt.
Order = list[Submitted] | EndAt | Cancel | Withdraw | Credit


class EngineFirst(NamedTuple):
    """What an engine reports with the first tokens that it made for a request."""

    queue_s: float  # seconds from Submit to the first step on this engine
    inference_s: float  # seconds from the first step to these tokens
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine reports about itself when a front connects."""

    engine_id: str
    term: int  # incarnation number: changes at each start of the engine's process
    digest: bytes  # requests go on with the same text only on an engine of the same digest
    snapshot: Snapshot
    version: int = VERSION  # version of the protocol that both sides speak

    def with_adapters(self, digests: Iterable[str]) -> "EngineFacts":
        model = self.snapshot.model
        model = replace(model, adapters=model.adapters.union(digests))
        return replace(self, snapshot=replace(self.snapshot, model=model))


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an engine reports regularly about its load."""

    load: EngineLoad
    permits: int  # requests that this front may have on the engine
    # Tokens served to each tenant since the engine's process started, as `Account.served` counts them.
    served: Mapping[Share, float] = field(default_factory=dict)
    # Greatest index of this front's Submits that the load includes; None: the engine does not report it.
    newest_index: int | None = None


@dataclass(slots=True)
class RemoteCounts:
    """What happened between a front and its engines since the front began."""

    lost_engines: int = 0
    resumes: int = 0  # requests that were submitted again after the loss of their engine
    withdrawals: int = 0  # requests that an engine was asked to give back, if possible
    moves: int = 0  # requests that were withdrawn from an engine and submitted to another one
    late: int = 0  # messages about requests that had ended or moved
    dropped_tokens: int = 0  # tokens that the front had already, or of requests that had ended or moved
    news_bytes: int = 0  # bytes of messages about loads and caches
    news_gaps: int = 0  # times that an engine had to report its whole cache again, because news were missing
    broken_rules: int = field(default=0)  # times that an engine was cut off because it broke a rule of the protocol


# How often a front wants news of its engines, and how much news an engine may send.

# Bytes of news that an engine may send at once: the whole cache of an engine with 8 million blocks. Then bytes per
# second: many times the news of an engine that computes 100,000 tokens per second.
BURST_BYTES, BYTES_PER_S = 64 * 2**20, 2 * 2**20
# Bytes that each message counts in addition to its size: reading this number of bytes takes as long as reading an empty
# message.
MESSAGE_BYTES = 1024


class NewsBudget:
    """An engine that floods a front is cut off before it costs the other engines much. Times are seconds of a clock
    that never goes back."""

    def __init__(self, now: float) -> None:
        self._left = float(BURST_BYTES)
        self._at = now

    def take(self, size: int, now: float) -> None:
        """Counts a message of `size` bytes. Raises WireError if the engine has sent too much."""
        self._left = min(self._left + (now - self._at) * BYTES_PER_S, BURST_BYTES) - size - MESSAGE_BYTES
        self._at = now
        if self._left < 0:
            raise WireError("an engine sent too much news")
