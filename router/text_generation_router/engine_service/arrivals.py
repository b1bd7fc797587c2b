"""Which new Work streams an engine takes: how many at a time, and how fast. Pure: no input or output, and no clock.

A new stream costs the engine about as much as a few steps of its loop, so one front that connects again and again would
slow down the streams of all others. A front that is refused tries again later, like a front that cannot reach the
engine. After an engine's restart all its fronts come at once, so each limit lets all of them in without a wait."""

from collections import Counter
from dataclasses import dataclass

# Rates at which a front may send messages and call for news. A message beyond the rate waits in the front's own
# connection.

# Maximum number of units that a front's messages may have at once, and per second. A message has one unit, and one more
# for each PART bytes.
MESSAGES_AT_ONCE, MESSAGES_PER_SECOND, PART = 16384, 16384, 4096
# Maximum number of News calls that a front may make at once, and per second.
NEWS_AT_ONCE, NEWS_PER_SECOND = 8, 2


class Pace:
    """A token bucket: `at_once` units may be taken at once, and `per_second` more each second. `now_s`: seconds of a
    clock that never goes back."""

    def __init__(self, at_once: float, per_second: float, now_s: float) -> None:
        self._at_once = at_once
        self._per_second = per_second
        self._left = at_once
        self._counted_s = now_s

    def left(self, now_s: float) -> float:
        """Units that may be taken without a wait."""
        return min(self._at_once, self._left + (now_s - self._counted_s) * self._per_second)

    def take(self, units: float, now_s: float) -> float:
        """Takes `units`, even if fewer are left. Returns the seconds to wait before the next units may be taken."""
        self._left = self.left(now_s) - units
        self._counted_s = now_s
        return max(0.0, -self._left / self._per_second)


# Maximum number of fronts of an engine, and of its fronts at one address, so that no machine alone takes all places.
MAX_FRONTS, MAX_AT_ADDRESS = 256, 128
# Maximum number of new streams at once, and per second: of one front, from one address, and of all fronts.
FRONT_AT_ONCE, FRONT_PER_SECOND = 8, 0.5
ADDRESS_AT_ONCE, ADDRESS_PER_SECOND = MAX_AT_ADDRESS, 8
AT_ONCE, PER_SECOND = 2 * MAX_FRONTS, 16
# Maximum number of token buckets that are kept, one for each name. Beyond it, full buckets are forgotten.
MAX_NAMES = 1024


class Paces:
    """A token bucket for each name of a front or address."""

    def __init__(self, at_once: float, per_second: float) -> None:
        self._at_once = at_once
        self._per_second = per_second
        self._paces: dict[str, Pace] = {}

    def __len__(self) -> int:
        return len(self._paces)

    def allows(self, name: str, now_s: float) -> bool:
        pace = self._paces.get(name)
        return (self._at_once if pace is None else pace.left(now_s)) >= 1

    def take(self, name: str, now_s: float) -> None:
        if name not in self._paces:
            if len(self._paces) >= MAX_NAMES:
                self._forget(now_s)
            self._paces[name] = Pace(self._at_once, self._per_second, now_s)
        self._paces[name].take(1, now_s)

    def _forget(self, now_s: float) -> None:
        self._paces = {name: pace for name, pace in self._paces.items() if pace.left(now_s) < self._at_once}


@dataclass(frozen=True, slots=True)
class ArrivingFront:
    """A front that opens a stream."""

    front_id: str
    address: str  # address of the machine; empty: this machine, whose processes use a unix socket


def arriving_front(front_id: str, peer: str) -> ArrivingFront:
    """`peer`: gRPC's name of the connection's other end, such as `ipv4:10.0.0.3:51234`."""
    kind, _, address = peer.partition(":")
    return ArrivingFront(front_id, address.rpartition(":")[0] if kind in ("ipv4", "ipv6") else "")


class Arrivals:
    """Decides which Work streams may open. `now_s`: seconds of a clock that never goes back."""

    def __init__(self, now_s: float) -> None:
        self._all = Pace(AT_ONCE, PER_SECOND, now_s)
        self._of_fronts = Paces(FRONT_AT_ONCE, FRONT_PER_SECOND)
        self._of_addresses = Paces(ADDRESS_AT_ONCE, ADDRESS_PER_SECOND)
        self._open: Counter[str] = Counter()  # number of streams from each address

    @property
    def num_names(self) -> int:
        """Number of names that are remembered."""
        return len(self._of_fronts) + len(self._of_addresses) + len(self._open)

    def refusal(self, caller: ArrivingFront, now_s: float) -> str:
        """Why the stream may not open now. Empty: the stream opens, and the caller has to call `leave` at its end."""
        if reason := self._reason(caller, now_s):
            return reason
        self._all.take(1, now_s)
        self._of_fronts.take(caller.front_id, now_s)
        if caller.address:
            self._of_addresses.take(caller.address, now_s)
        self._open[caller.address] += 1
        return ""

    def _reason(self, caller: ArrivingFront, now_s: float) -> str:
        if self._open.total() >= MAX_FRONTS:
            return f"{MAX_FRONTS} fronts are connected"
        if not self._of_fronts.allows(caller.front_id, now_s):
            return "the front connects too often: it may try again in a few seconds"
        if caller.address and self._open[caller.address] >= MAX_AT_ADDRESS:
            return f"{MAX_AT_ADDRESS} fronts of this address are connected"
        if caller.address and not self._of_addresses.allows(caller.address, now_s):
            return "fronts of this address connect too often: they may try again in a few seconds"
        return "" if self._all.left(now_s) >= 1 else "too many fronts connect: they may try again in a few seconds"

    def leave(self, caller: ArrivingFront) -> None:
        """Notes that a stream has ended."""
        self._open[caller.address] -= 1
        if not self._open[caller.address]:
            del self._open[caller.address]
