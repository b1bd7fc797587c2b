"""The requests with slots: *running*, with a row in the shards, and *leaving*, while a step in flight carries them."""

from collections.abc import Iterator

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
        return sum(request.most_slots for request in self.running.values())

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
