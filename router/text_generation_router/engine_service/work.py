"""One front's Work stream: its requests on the engine, by its own indexes."""

import time
from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry, Counter, Gauge

from text_generation_proto import engine_pb2 as pb
from text_generation_router.engine.local import LocalEngine, NewRequest
from text_generation_router.engine.protocol import Ended, Snapshot
from text_generation_router.engine_service.arrivals import (
    MESSAGES_AT_ONCE,
    MESSAGES_PER_SECOND,
    NEWS_AT_ONCE,
    NEWS_PER_SECOND,
    PART,
    Pace,
)
from text_generation_router.engine_service.sinks import Outbox, RequestSink, StepSender, Trial
from text_generation_router.errors import FrontLostError, Refusal, RefusedError
from text_generation_router.scheduling.request import Share
from text_generation_router.wire.steps import ended_to_pb, refused_to_pb
from text_generation_router.wire.submits import Submitted, submitted
from text_generation_router.wire.version import VERSION, WITH_BEGUN, WireError, facts_of

# How many messages without effect a front may send.

# Messages without effect that a front may send at once, and each second. Even a correct front sends a few for each
# request: a message about a request that has just ended has no effect.
AT_ONCE, PER_SECOND = 4096, 1024


class Allowance:
    """Counts messages without effect, and forgets PER_SECOND of them each second."""

    def __init__(self, now_s: float) -> None:
        self._left = float(AT_ONCE)
        self._counted_s = now_s

    def take(self, now_s: float) -> bool:
        """Counts a message. False: the front has sent too many."""
        self._left = min(AT_ONCE, self._left + (now_s - self._counted_s) * PER_SECOND) - 1
        self._counted_s = now_s
        return self._left >= 0


# Metrics of an engine's connections to its fronts.

# The label `why` of a stream that ended by an error of its front.
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
        """Counts the end of a front's stream. None: the front closed the stream, or its connection broke."""
        self._ends.labels(why=CLOSED if error is None else REASONS.get(type(error), FAILED)).inc()


# Maximum sizes of messages in bytes.

MESSAGE_BYTES = 4 * 2**20
# Bytes of a Submit besides 4 for each token of the context.
SUBMIT_BYTES = 2**20
# Bytes of the message around a Submit.
ENVELOPE_BYTES = 16


def submit_bytes(snapshot: Snapshot) -> int:
    """Maximum size of a Submit in bytes."""
    tokens = max(snapshot.model.max_positions, snapshot.limits.max_total_tokens)
    return 4 * tokens + SUBMIT_BYTES


UNLIMITED = 2**63


class FrontWork:
    """Handles the messages of one front. `handle` raises WireError if the front breaks the protocol."""

    def __init__(
        self,
        front_id: str,
        engine: LocalEngine,
        outbox: Outbox,
        counts: FrontCounts,
        max_open: int,
        note_share: Callable[[Share], None],
        trial: Trial,
        version: int = VERSION,
    ) -> None:
        """`max_open`: maximum number of requests of the front at a time. `note_share` is called with the
        tenant's share that each accepted request names. `trial`: decides which suspect requests the engine takes.
        `version`: version of the protocol that both sides speak."""
        self.front_id = front_id
        self.outbox = outbox
        self._engine = engine
        self._counts = counts
        self._max_open = max_open
        self._note_share = note_share
        self._trial = trial
        self._reports_begun = version >= WITH_BEGUN
        self._sender = StepSender(outbox)
        self._open: dict[int, RequestSink] = {}
        self._last_index = -1
        now_s = time.monotonic()
        self._allowance = Allowance(now_s)
        self._pace = Pace(MESSAGES_AT_ONCE, MESSAGES_PER_SECOND, now_s)
        self.news_pace = Pace(NEWS_AT_ONCE, NEWS_PER_SECOND, now_s)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def newest_index(self) -> int:
        """Greatest index of the front's Submits until now; 0: there was none."""
        return max(self._last_index, 0)

    def handle(self, message: pb.FrontMessage) -> float:
        """Handles one message of the front. Returns the seconds to wait before the next message is read."""
        size = message.ByteSize()
        self._handle(message, size)
        return self._pace.take(1 + size // PART, time.monotonic())

    def _handle(self, message: pb.FrontMessage, size: int) -> None:
        kind = message.WhichOneof("message")
        if kind == "submit":
            if size > submit_bytes(self._engine.snapshot()):
                raise WireError(f"a Submit has {size} bytes")
            self._submit(message.submit)
            return
        if size > MESSAGE_BYTES:
            raise WireError(f"a message has {size} bytes")
        if kind == "credit":
            self._with(message.credit.index, lambda index: self._engine.credit(index, message.credit.tokens))
        elif kind == "cancel":
            self._with(message.cancel.index, self._engine.cancel)
        elif kind == "end":
            self._with(message.end.index, lambda index: self._engine.end(index, message.end.count))
        elif kind == "withdraw":
            even_begun = message.withdraw.even_begun
            self._with(message.withdraw.index, lambda index: self._engine.withdraw(index, even_begun))
        else:
            raise WireError(f"a front sends `{kind}` within its stream")

    def _with(self, wire_index: int, act: Callable[[int], None]) -> None:
        """Calls `act` with the engine's index of a request. Messages about other requests are dropped."""
        if (sink := self._open.get(wire_index)) is not None:
            act(sink.index)
        else:
            self._counts.dropped.inc()
            self._note_useless()

    def _note_useless(self) -> None:
        if not self._allowance.take(time.monotonic()):
            raise WireError("too many messages have no effect")

    def _submit(self, submit: pb.Submit) -> None:
        snapshot = self._engine.snapshot()
        sequences = submitted(submit, snapshot.model.vocab_size)
        self._check_indexes(sequences)
        indexes = [one.index for one in sequences]
        try:
            self._check_room(sequences, snapshot)
            sinks = self._accept(sequences)
        except RefusedError as error:
            self.outbox.put(pb.EngineMessage(refused=refused_to_pb(indexes, error)))
            return
        self._open.update(zip(indexes, sinks, strict=True))
        self._note_share(sequences[0].request.share)
        self.outbox.put(pb.EngineMessage(accepted=pb.Accepted(indexes=indexes)))

    def _check_indexes(self, sequences: Collection[Submitted]) -> None:
        for one in sequences:
            if one.index <= self._last_index:
                raise WireError(f"index {one.index} follows index {self._last_index}")
            self._last_index = one.index

    def _check_room(self, sequences: list[Submitted], snapshot: Snapshot) -> None:
        if len(self._open) + len(sequences) > self._max_open:
            self._note_useless()
            raise RefusedError(Refusal.OVERLOADED, self._engine.load().retry_after_s)
        request = sequences[0].request
        if len(request.input_ids) + request.max_new_tokens > snapshot.limits.max_total_tokens:
            raise RefusedError(Refusal.TOO_LONG)
        if request.adapter and request.adapter not in snapshot.model.adapters:
            raise RefusedError(Refusal.NO_ADAPTER)
        if not self._trial.takes(sequences[0].group):
            raise RefusedError(Refusal.OTHER_SUSPECTS)

    def _accept(self, sequences: list[Submitted]) -> list[RequestSink]:
        suspects = sequences[0].group
        trial = self._trial if suspects else None
        sinks = [RequestSink(one.index, len(one.past.output_ids), self._sender, self._end, trial) for one in sequences]
        group = [
            NewRequest(
                one.request,
                sink,
                UNLIMITED if one.credits is None else one.credits,
                one.past,
                sink.begun if self._reports_begun else None,
            )
            for one, sink in zip(sequences, sinks, strict=True)
        ]
        for sink, index in zip(sinks, self._engine.submit_group(group), strict=True):
            sink.index = index
        if suspects:
            self._trial.enter(suspects, len(sinks))
        return sinks

    def _end(self, wire_index: int, ended: Ended | None) -> None:
        """Called when a request has ended. An engine that has failed reports no ends: its requests go on with another
        engine once their streams have ended."""
        del self._open[wire_index]
        if ended is not None and not self._engine.has_failed:
            self._sender.end(ended_to_pb(wire_index, ended))

    def lost(self, reason: str, aboard: Collection[int]) -> None:
        self._sender.send()
        indexes = [wire_index for wire_index, sink in self._open.items() if sink.index in aboard]
        self.outbox.put(pb.EngineMessage(epoch=pb.Epoch(reason=reason, aboard=indexes)))

    def ready(self, snapshot: Snapshot) -> None:
        self.outbox.put(pb.EngineMessage(epoch=pb.Epoch(is_ready=True, facts=facts_of(snapshot))))

    def close(self) -> None:
        """Ends all requests of the front, whose stream has ended."""
        for sink in list(self._open.values()):
            self._engine.cancel(sink.index)
