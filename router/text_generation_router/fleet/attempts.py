"""The requests that were submitted on one Work stream, from Submit to the engine's Refused or Ended, and the orders
that wait to be sent. Pure: no input or output, and no clock.

A stream knows a request by an index that is never used twice on it, so tokens of an attempt that is over can never be
taken for tokens of another attempt."""

from collections.abc import Callable, Sequence

from text_generation_router.fleet.requests import RemoteGroup, RemoteRequest
from text_generation_router.fleet.suspects import SuspectTrial
from text_generation_router.fleet.values import Cancel, Credit, EndAt, Order, RemoteCounts, Withdraw
from text_generation_router.wire.version import WireError

# A late message is about a request that has ended or moved. Tokens of steps in flight are late. Maximum number of late
# messages from an engine: LATE_PER_REQUEST for each request that it was sent, plus MAX_LATE.
LATE_PER_REQUEST, MAX_LATE = 64, 1024


class Attempts:
    """`engine`: the engine's number. `has_orders` is called when an order is added to `orders`. Methods raise WireError
    for messages that break the protocol."""

    def __init__(self, engine: int, counts: RemoteCounts, has_orders: Callable[[], None]) -> None:
        self.orders: list[Order] = []
        self.num_unanswered = 0  # groups whose Submit is not answered
        self.newest_answered = 0  # greatest index of an answered Submit
        self._engine = engine
        self._counts = counts
        self._has_orders = has_orders
        self._next = 1
        self._num_late = 0
        self._live: dict[int, RemoteRequest] = {}
        self._groups: dict[int, RemoteGroup] = {}  # unanswered groups, by their first index

    def __len__(self) -> int:
        """Number of requests on the stream."""
        return len(self._live)

    @property
    def requests(self) -> list[RemoteRequest]:
        """The requests that are on the stream, in the order of their Submits."""
        return list(self._live.values())

    @property
    def groups(self) -> list[RemoteGroup]:
        return list(dict.fromkeys(request.group for request in self._live.values()))

    def submit(
        self, group: RemoteGroup, now: float, served_elsewhere: float = 0.0, trial: SuspectTrial | None = None
    ) -> None:
        sequences = []
        for index, request in enumerate(group.members.values(), self._next):
            self._live[index] = request
            sequences.append(request.submitted(index, now, served_elsewhere, trial))
        group.engine, group.is_answered, group.is_leaving = self._engine, False, False
        group.is_suspect = trial is not None
        group.wire_indexes = [sequence.index for sequence in sequences]
        group.submitted_s = now
        self._groups[self._next] = group
        self._next += len(sequences)
        self.num_unanswered += 1
        self._order(sequences)

    def take_orders(self) -> list[Order]:
        orders, self.orders = self.orders, []
        return orders

    @property
    def unanswered_since(self) -> float | None:
        """When the oldest Submit without an answer was sent. None: all are answered."""
        return next((group.submitted_s for group in self._groups.values()), None)

    def accepted(self, indexes: Sequence[int]) -> RemoteGroup | None:
        return self._answered(indexes)

    def refused(self, indexes: Sequence[int]) -> RemoteGroup | None:
        """Takes the group's members off the stream and returns the group. None: all its members had ended before."""
        if (group := self._answered(indexes)) is not None:
            for index in indexes:
                self._live.pop(index, None)
            group.engine = None
        return group

    def _answered(self, indexes: Sequence[int]) -> RemoteGroup | None:
        group = self._groups.pop(indexes[0], None) if indexes else None
        if group is None or list(indexes) != group.wire_indexes:
            raise WireError("an answer to no Submit")
        group.is_answered = True
        self.num_unanswered -= 1
        self.newest_answered = max(self.newest_answered, indexes[-1])
        return group if group.members else None

    def find(self, index: int) -> RemoteRequest | None:
        """The request with this index. None: it has ended or moved."""
        if (request := self._live.get(index)) is None:
            if not 0 < index < self._next:
                raise WireError(f"index {index} was not submitted")
            self._counts.late += 1
            self.note_useless()
        elif not request.group.is_answered:
            raise WireError("a request was worked on before its Submit was answered")
        return request

    def note_useless(self) -> None:
        """Counts a message that changes nothing. Raises WireError after too many."""
        self._num_late += 1
        if self._num_late > MAX_LATE + LATE_PER_REQUEST * self._next:
            raise WireError("too many messages about requests that have ended, or that change nothing")

    def forget(self, request: RemoteRequest) -> None:
        """Notes that the engine has ended the request."""
        self._live.pop(request.wire_index, None)

    def end(self, request: RemoteRequest, count: int) -> None:
        self._leave(request, EndAt(request.wire_index, count))

    def cancel(self, request: RemoteRequest) -> None:
        self._leave(request, Cancel(request.wire_index))

    def _leave(self, request: RemoteRequest, order: Order) -> None:
        if self._live.pop(request.wire_index, None) is not None:
            self._order(order)

    def withdraw(self, group: RemoteGroup, even_begun: bool = False) -> None:
        group.is_leaving = group.has_moved = True
        self._counts.withdrawals += len(group.members)
        for request in group.members.values():
            self._order(Withdraw(request.wire_index, even_begun))

    def credit(self, request: RemoteRequest, tokens: int) -> None:
        if tokens:
            self._order(Credit(request.wire_index, tokens))

    def lose(self) -> list[RemoteGroup]:
        """Ends the stream. Returns the groups that were on it, in the order of their Submits."""
        groups = self.groups
        self._live.clear()
        self._groups.clear()
        self.orders.clear()
        for group in groups:
            group.engine = None
        return groups

    def _order(self, order: Order) -> None:
        self.orders.append(order)
        self._has_orders()
