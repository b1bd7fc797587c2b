from text_generation_router.scheduling.queue import MAX_IDLE_TENANTS, MAX_PASSED, Queue
from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.share import Share


class Waiting:
    """A queue, and who comes out of it. `cached` says how much of a request the cache would have."""

    def __init__(self) -> None:
        self.cached: dict[int, int] = {}
        self.queue = Queue(lambda request: self.cached.get(request.id, 0))
        self.last_id = 0

    def add(self, tenant: str = "", priority: int = 0, length: int = 10) -> Running:
        self.last_id += 1
        request = Running(self.last_id, GenerationRequest((1,) * length, 5, share=Share(tenant), priority=priority))
        self.queue.append(request)
        return request

    def take(self) -> Running:
        request = next(self.queue.candidates(set()))
        self.queue.take(request, computed=request.num_tokens)
        return request


def test_first_come_first_served() -> None:
    waiting = Waiting()
    added = [waiting.add() for _ in range(5)]
    assert [waiting.take() for _ in range(5)] == added and len(waiting.queue) == waiting.queue.num_tokens == 0


def test_the_longest_cached_prefix_goes_first_among_the_first_few() -> None:
    waiting = Waiting()
    added = [waiting.add() for _ in range(40)]
    waiting.cached = {added[3].id: 4, added[7].id: 8, added[39].id: 9}
    assert [waiting.take() for _ in range(3)] == [added[7], added[3], added[0]]


def test_nobody_is_passed_over_for_ever() -> None:
    waiting = Waiting()
    unlucky = waiting.add(priority=1)
    taken = []
    while unlucky not in taken:
        waiting.add()
        taken.append(waiting.take())
    assert len(taken) == MAX_PASSED + 1


def test_lower_priorities_go_first() -> None:
    waiting = Waiting()
    added = [waiting.add(priority=priority) for priority in (5, 0, -3)]
    assert [waiting.take() for _ in range(3)] == added[::-1]


def test_who_has_run_before_goes_first_and_while_it_waits_nobody_else() -> None:
    waiting = Waiting()
    early, late, fresh = (waiting.add() for _ in range(3))
    for request in (late, early):
        waiting.queue.take(request, 10)
        waiting.queue.put_back(request)
    assert list(waiting.queue.candidates({early.id, late.id})) == []
    early.paused = True
    assert next(waiting.queue.candidates(set())) is late
    late.paused = True
    assert next(waiting.queue.candidates(set())) is fresh


def test_tenants_are_served_the_same_number_of_tokens() -> None:
    waiting = Waiting()
    for _ in range(60):
        waiting.add("many")
    for _ in range(10):
        waiting.add("few", length=20)
    taken = [waiting.take().request.share.owner for _ in range(30)]
    assert taken.count("few") == 10 and taken.index("few") <= 1


def test_output_counts_too() -> None:
    waiting = Waiting()
    for tenant in "abab":
        waiting.add(tenant)
    first = waiting.take()
    waiting.queue.served(first, tokens=100)
    assert [waiting.take().request.share.owner for _ in range(3)] == ["b", "b", "a"]


def test_who_asks_for_nothing_saves_nothing_up() -> None:
    waiting = Waiting()
    waiting.add("late")
    waiting.take()
    for _ in range(20):
        waiting.add("busy")
        waiting.take()
    for _ in range(4):
        waiting.add("busy")
        waiting.add("late")
    taken = [waiting.take().request.share.owner for _ in range(8)]
    assert taken.count("late") == 4 and taken[:4].count("late") <= 3


def test_tenants_without_requests_are_forgotten_when_there_are_many() -> None:
    waiting = Waiting()
    stays = waiting.add("stays")
    for i in range(MAX_IDLE_TENANTS + 10):
        waiting.queue.remove(waiting.add(f"passing {i}"))
    assert len(waiting.queue._tenants) <= MAX_IDLE_TENANTS and waiting.take() is stays


def test_a_tenant_with_nothing_running_is_shut_out() -> None:
    waiting = Waiting()
    for _ in range(3):
        waiting.add("many")
    waiting.take()
    assert waiting.queue.shut_out() is None
    first = waiting.add("one")
    waiting.add("one")
    assert waiting.queue.shut_out() is first
