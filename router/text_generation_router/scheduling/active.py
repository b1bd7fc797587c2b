"""The requests with slots: *running*, with a row in the shards, and *leaving*, while a step in flight carries them."""

from collections.abc import Iterator, Sequence

from text_generation_router.scheduling.memory.memory import Memory
from text_generation_router.scheduling.running import Running


class ActiveRequests:
    """All requests that have slots. If a request has left and its row is still in the shards, the row is *departed*
    until a filter step removes it.
    """

    def __init__(self) -> None:
        self.running: dict[int, Running] = {}  # id → running request, in order of joining
        self.leaving: list[Running] = []  # ended or preempted requests whose last step has not answered
        self._departed: set[int] = set()  # ids of requests that left, with a row still in the shards
        # The request that last began to run alone because it may have caused a loss.
        self._suspect: Running | None = None

    def __iter__(self) -> Iterator[Running]:
        yield from self.running.values()
        yield from self.leaving

    def __len__(self) -> int:
        return len(self.running) + len(self.leaving)

    def find(self, request_id: int) -> Running | None:
        running = self.running.get(request_id)
        return running if running is not None else next((r for r in self.leaving if r.id == request_id), None)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_reserved(self) -> int:
        """Slots that the running requests would hold at their greatest lengths."""
        return sum(request.max_slots for request in self.running.values())

    @property
    def suspect(self) -> Running | None:
        """The running request that has to run alone, if there is one. While it runs alone, no step carries other
        rows.
        """
        request = self._suspect
        if request is not None and not (request.blame.runs_alone and request.id in self.running):
            request = self._suspect = None
        return request

    @property
    def have_departed_rows(self) -> bool:
        return bool(self._departed)

    def join(self, request: Running) -> None:
        self.running[request.id] = request
        if request.blame.runs_alone:
            self._suspect = request

    def leave(self, request: Running, answered: int) -> bool:
        """Ends the running of a request. Returns whether the request has to keep its slots, because a step after step
        `answered` carries it.
        """
        del self.running[request.id]
        if request.is_known_to_shards:
            self._departed.add(request.id)
        if request.last_step > answered:
            self.leaving.append(request)
        return request.last_step > answered

    def take_left(self, answered: int) -> list[Running]:
        """Removes and returns the leaving requests that no step after step `answered` carries."""
        left = [request for request in self.leaving if request.last_step <= answered]
        for request in left:
            self.leaving.remove(request)
        return left

    def drop_rows(self) -> tuple[int, ...]:
        """Marks the departed rows as removed, because the next step drops them. Returns the ids of the requests whose
        rows stay.
        """
        self._departed.clear()
        return tuple(request.id for request in self.running.values() if request.is_known_to_shards)

    def clear(self) -> list[Running]:
        """Removes and returns all requests, running ones first, because all rows are void."""
        requests = list(self)
        self.running.clear()
        self.leaving.clear()
        self._departed.clear()
        return requests


# Chooses the running request that gives up its slots when there are too few slots for the next tokens.


def find_victim(active: ActiveRequests, memory: Memory) -> Running | None:
    """The request to preempt: a paused request first, then the request with the fewest slots of its own, then the
    newest. None if fewer than two requests run, or all are about to end.
    """
    if active.num_running < 2:
        return None
    able = (request for request in active.running.values() if not request.is_ending)
    return min(able, key=lambda r: (not r.paused, memory.num_exclusive(r), r.newness), default=None)


def num_soon_free(active: ActiveRequests, memory: Memory) -> int:
    """Number of slots that steps in flight, or the steps after them, will free without preemption."""
    ending = [request for request in active.running.values() if request.is_ending]
    going: Sequence[Running] = [*active.leaving, *ending]
    return sum(memory.exclusives(going))
