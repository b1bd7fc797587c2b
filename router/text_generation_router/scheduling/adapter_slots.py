"""Which LoRA adapters the shards have in their slots, and which come next, if there are more adapters than slots.

A request waits until its adapter is in a slot, and holds up no other request meanwhile. A slot without running
requests is taken at once. If all slots have some, adapters take turns: the one that has been in its slot for longest
takes no more requests once its turn is over, and its running requests are preempted. The length of a turn
follows from the number of adapters: each has its turn within about MAX_WAIT steps. A turn has at least MIN_TURN steps.
The next turn is that of the tenant which was served the fewest tokens, as in the queue, unless an adapter would wait
too long for it.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from text_generation_router.scheduling.running import Running

MAX_WAIT = 192  # forward steps: less than the 256 of the promise, by what slots that are given up need
# Forward steps within which an adapter has its turn although the tenants of others were served less.
MAX_OVERTAKEN = 224
MIN_TURN = 4
# Number of tokens that a request has made since it joined when its adapter gives up the slot. A turn of MAX_WAIT steps
# ends without them.
FEWEST_TOKENS = 4


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """What the shards of an epoch have."""

    known: tuple[str, ...] = ()  # the digests of adapters
    slots: int = 0
    in_host: int = 0  # number of adapters that the shards keep ready for a slot
    grows: bool = False  # whether others may come
    resident: tuple[str, ...] = ()  # the adapters of the first slots; "": none

    @property
    def is_short(self) -> bool:
        """Whether some request may have to wait for its adapter. Adapters that fit are resident,
        unless the shards have not found the files of one: its requests fail then."""
        return self.grows or len(self.known) > self.slots or not {*self.known} <= {*self.resident}


NO_ADAPTERS = AdapterRoom()


@dataclass(slots=True)
class AdapterSlot:
    adapter: str = ""  # "": nothing that is known
    since: int = 0  # the forward step since which its requests may run
    used: int = 0  # the forward step before which its last request left, or that in which it was taken
    is_loading: bool = False
    is_promised: bool = False  # no request of the adapter has begun since it is in the slot


@dataclass(slots=True)
class AdapterSlots:
    """Numbers of steps are those of forward steps."""

    room: AdapterRoom = NO_ADAPTERS
    _is_short: bool = field(init=False)
    _slots: list[AdapterSlot] = field(init=False)
    _rows: Counter[str] = field(default_factory=Counter)  # running requests of each adapter
    # The adapters that requests wait for, in the order in which they began to; the forward step of this.
    _wanted: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _now: int = 0  # number of forward steps
    _asked: set[str] = field(default_factory=set)  # adapters that the shards were asked to keep ready
    _ready: set[str] = field(default_factory=set)  # adapters that the shards have ready
    _loads: list[tuple[int, str]] = field(default_factory=list)  # to be sent: slot and adapter
    _to_ask: list[str] = field(default_factory=list)
    _closing: int | None = None  # the slot whose turn is over

    def __post_init__(self) -> None:
        self._is_short = self.room.is_short
        self._slots = [AdapterSlot(adapter) for adapter in self.room.resident]
        self._slots += [AdapterSlot() for _ in range(self.room.slots - len(self._slots))]

    def admits(self, request: Running) -> bool:
        """Whether the request may join now."""
        adapter = request.request.adapter
        if not adapter or not self._is_short:
            return True
        found = self._find(adapter)
        return found is not None and not self._slots[found].is_loading and found != self._closing

    def join(self, request: Running) -> None:
        if (adapter := request.request.adapter) and self._is_short:
            self._rows[adapter] += 1
            if (found := self._find(adapter)) is not None:
                self._slots[found].is_promised = False

    def leave(self, request: Running) -> None:
        if (adapter := request.request.adapter) and self._is_short:
            self._rows[adapter] -= 1
            if (found := self._find(adapter)) is not None:
                self._slots[found].used = self._now

    def choose(self, waiting: Iterable[Running], running: Collection[Running], now: int) -> list[Running]:
        """Gives slots to adapters that requests wait for. Returns the running requests that have to be preempted for
        this. `now`: the number of forward steps until now."""
        if not self._is_short:
            return []
        self._now = now
        order = self._note_wanted(waiting, now)
        if not self._ready:
            self._closing = None
        preempted: list[Running] = []
        for adapter in [each for each in order if each in self._ready]:
            if (slot := self._free()) is None and (slot := self._due(running, now)) is not None:
                preempted += [r for r in running if r.request.adapter == self._slots[slot].adapter]
            if slot is None:
                break
            self._give(slot, adapter, now)
        return preempted

    def take_unready(self) -> list[str]:
        """The adapters that the shards have to be asked to keep ready."""
        found, self._to_ask = self._to_ask, []
        return found

    def note_ready(self, adapter: str) -> None:
        self._ready.add(adapter)

    def note_unread(self, adapter: str) -> None:
        """Notes that the shards did not answer: they have to be asked again."""
        self._asked.discard(adapter)

    def note_refused(self, adapter: str) -> None:
        """Notes that the shards cannot load an adapter: nothing waits for it any more."""
        self._forget(adapter)
        self._wanted.pop(adapter, None)

    def next_load(self) -> tuple[int, str] | None:
        """The slot that a step has to fill now, and its adapter."""
        return self._loads.pop(0) if self._loads else None

    def note_loaded(self, adapter: str, now: int) -> None:
        for slot in self._slots:
            if slot.adapter == adapter and slot.is_loading:
                slot.is_loading, slot.since = False, now
        self._wanted.pop(adapter, None)

    def void(self) -> None:
        """Notes that no request runs any more, and that steps which fill slots may not have been run."""
        self._rows.clear()
        self._loads.clear()
        self._closing = None
        for slot in self._slots:
            if slot.is_loading:
                slot.adapter, slot.is_loading, slot.is_promised = "", False, False

    def _note_wanted(self, waiting: Iterable[Running], now: int) -> list[str]:
        """Returns the adapters that requests wait for, the next one first."""
        adapters: dict[str, tuple[float, float]] = {}
        for request in waiting:
            if (adapter := request.request.adapter) and not request.paused:
                served = request.tenant.owner.served, request.tenant.served
                adapters[adapter] = min(served, adapters.get(adapter, served))
                if not self.admits(request):
                    request.waited_for = "adapter"
        for slot in self._slots:  # no request waits for the promise any more
            slot.is_promised &= slot.adapter in adapters
        for gone in [adapter for adapter in self._wanted if adapter not in adapters]:
            del self._wanted[gone]
        for adapter in adapters:
            found = self._find(adapter)
            if found is None or found == self._closing:
                self._wanted.setdefault(adapter, now)
        known = self._slots_by_adapter
        # Adapters that are on their way into a slot are still in the host's memory.
        most = max(1, self.room.in_host - sum(slot.is_loading for slot in self._slots))
        order = self._in_order(now, adapters)
        kept = [adapter for adapter in order if adapter not in known][:most]
        self._asked &= {*kept}
        self._ready &= self._asked
        for adapter in kept:
            if adapter not in self._asked:
                self._asked.add(adapter)
                self._to_ask.append(adapter)
        return order

    def _in_order(self, now: int, served: Mapping[str, tuple[float, float]]) -> list[str]:
        """`served`: by adapters, what the owner and the tenant of a request were served that waits for it, the least of
        all."""
        # If turns go by age from now on, a slot changes its adapter every `pace` steps.
        pace = self._turn / max(1, self.room.slots)
        is_late = any(
            now - since + (place + 2) * pace > MAX_OVERTAKEN for place, since in enumerate(self._wanted.values())
        )
        return [*self._wanted] if is_late else sorted(self._wanted, key=served.__getitem__)

    @property
    def _turn(self) -> int:
        return max(MIN_TURN, MAX_WAIT * self.room.slots // (self.room.slots + len(self._wanted)))

    def _free(self) -> int | None:
        """A slot of which no request runs, the one whose last request left first."""
        free = [
            number
            for number, slot in enumerate(self._slots)
            if not (slot.is_loading or slot.is_promised or self._rows[slot.adapter])
        ]
        return min(free, key=lambda number: self._slots[number].used, default=None)

    def _due(self, running: Iterable[Running], now: int) -> int | None:
        """The slot whose requests give it up now."""
        able = [n for n, slot in enumerate(self._slots) if not (slot.is_loading or slot.is_promised)]
        oldest = min(able, key=lambda number: self._slots[number].since, default=None)
        if oldest is None or (age := now - self._slots[oldest].since) < self._turn:
            return None
        self._closing = oldest
        of_slot = [r for r in running if r.request.adapter == self._slots[oldest].adapter]
        have_made = all(r.num_sent - r.num_sent_at_start >= FEWEST_TOKENS or r.paused for r in of_slot)
        return oldest if have_made or age >= MAX_WAIT else None

    def _give(self, number: int, adapter: str, now: int) -> None:
        self._slots[number] = AdapterSlot(adapter, now, now, is_loading=True, is_promised=True)
        self._loads.append((number, adapter))
        del self._wanted[adapter]
        self._closing = None

    def _forget(self, adapter: str) -> None:
        for slot in self._slots:
            if slot.adapter == adapter:
                slot.adapter, slot.is_loading, slot.is_promised = "", False, False
        self._asked.discard(adapter)
        self._ready.discard(adapter)
        self._loads = [load for load in self._loads if load[1] != adapter]

    @property
    def _slots_by_adapter(self) -> Mapping[str, int]:
        return {slot.adapter: number for number, slot in enumerate(self._slots) if slot.adapter}

    def _find(self, adapter: str) -> int | None:
        return self._slots_by_adapter.get(adapter)
