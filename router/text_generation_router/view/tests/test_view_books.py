"""What is shown of slots, tree, rows and queue, beside the scheduler's own books, in random states."""

from collections.abc import Iterator
from itertools import accumulate
from random import Random

import numpy as np

from text_generation_common.flags.kinds import AdmissionMode
from text_generation_router.scheduling.memory.prefix_cache import PrefixCache
from text_generation_router.scheduling.memory.radix_tree import Node
from text_generation_router.scheduling.memory.slots import TokenSlots
from text_generation_router.scheduling.request import Share
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.tests.test_scheduler_machine import MIXED, SchedulerMachine
from text_generation_router.view.reading import TenantDigests, queue_of, rows_of
from text_generation_router.view.slot_map import CACHED, FREE, HELD, LOCKED, MAX_RUNS, slot_runs_of, uses_of
from text_generation_router.view.tree import MAX_NODES, TreeWalk
from text_generation_router.view.values import SlotRuns

DIGESTS = TenantDigests()


def cells_of(runs: SlotRuns) -> list[int]:
    return [run % 4 for run in runs.runs for _ in range(run // 4)]


def nodes_of(scheduler: Scheduler) -> list[Node]:
    """All nodes that own slots: those of searches, and those that were forgotten while requests hold them."""
    held = [n for r in scheduler.active if r.holding and r.holding.node for n in r.holding.node.path()]
    return list({id(node): node for node in (*scheduler.memory.cache.nodes(), *held)}.values())


def check(scheduler: Scheduler) -> int:
    """Compares the view with the free stack, the owners of private slots and the locks of the tree, none of which the
    view reads. Returns the number of different uses."""
    memory, uses = scheduler.memory, uses_of(scheduler)
    free = memory.slots._stack[memory.slots._top :]
    private = [s for r in scheduler.active if r.holding for s in r.holding.private.tolist()]
    assert sorted(np.flatnonzero(uses == FREE)) == sorted(free.tolist())
    assert sorted(np.flatnonzero(uses == HELD)) == sorted(private)
    locks = {slot: node.locks for node in nodes_of(scheduler) for slot in node.slots.tolist()}
    assert {slot for slot, count in locks.items() if count} == set(np.flatnonzero(uses == LOCKED).tolist())
    assert {slot for slot, count in locks.items() if not count} == set(np.flatnonzero(uses == CACHED).tolist())
    runs = slot_runs_of(uses)
    assert cells_of(runs) == uses.tolist() and sum(runs.counts) == memory.capacity
    assert runs.counts[LOCKED] + runs.counts[HELD] == memory.num_held
    rows, queue = rows_of(scheduler, DIGESTS, 9.0), queue_of(scheduler, DIGESTS, 9.0)
    running = scheduler.active.running
    assert rows.id == tuple(running) and rows.slots == tuple(len(running[i].slots) for i in rows.id)
    assert len(queue.reason) == len(scheduler.queue) and all(queue.reason)
    return len(set(uses.tolist()))


def random_states(seed: int, count: int) -> Iterator[Scheduler]:
    """The states of a scheduler whose requests come, end, are cancelled, fail and lose their shards at random."""
    random = Random(seed)
    machine = SchedulerMachine()
    machine.begin(
        mode=random.choice(list(AdmissionMode)),
        prefix_caching=seed % 4 > 0,
        ratio=random.choice([0.0, 0.3]),
        learned=seed % 2 == 0,
        shares=MIXED,
        priority_between_tenants=False,
        end_tokens=frozenset(),
        slowdown=0.0,
        adapters=0,
        deaths=set(),
        random=random,
    )
    for _ in range(count):
        chance = random.random()
        if chance < 0.2:
            new, twos = random.randint(1, 20), random.randint(0, 3)
            machine.add(
                length=random.randint(1, 40), new=new, twos=twos, whose=random.randint(0, 3), priority=0, namespace="",
                kills=9, top_n=None, made=0, losses=(0, 0), age_s=0, unready=False, adapter=0,
            )  # fmt: skip
        elif chance < 0.24 and machine.alive:
            machine.scheduler.cancel(machine.alive.pop(random.choice(list(machine.alive))).id)
        elif chance < 0.25:
            machine.shards_die(is_kept=random.random() < 0.5)
        elif chance < 0.6 and machine.in_flight:
            machine.answer(eos=random.randint(0, 30), poisoned=random.randint(0, 60))
        elif len(machine.in_flight) < 2:
            machine.decide()
        yield machine.scheduler
    machine.teardown()


def test_the_view_equals_the_books_in_a_thousand_random_states():
    uses = [check(scheduler) for seed in range(20) for scheduler in random_states(seed, 60)]
    assert len(uses) >= 1000 and sum(count > 2 for count in uses) > 300 and uses.count(4) > 20


def test_a_large_map_has_few_cells_each_with_the_strongest_use_of_its_slots():
    uses = np.zeros(262_144, np.uint8)
    uses[5], uses[100_000:100_040] = HELD, CACHED
    runs = slot_runs_of(uses)
    assert runs.slots_per_cell == 16 and sum(run // 4 for run in runs.runs) == 16_384 and len(runs.runs) == 4
    assert cells_of(runs)[0] == HELD and runs.counts == (262_103, 40, 0, 1)
    uses[::40] = LOCKED
    worst = slot_runs_of(uses)
    assert len(worst.runs) <= MAX_RUNS and set(cells_of(worst)) == {LOCKED, HELD}
    assert slot_runs_of(np.zeros(0, np.uint8)).runs == ()


def test_the_tree_is_walked_in_slices_while_it_changes():
    cache = PrefixCache(pool := TokenSlots(2000))
    for i in range(300):
        ids = np.array([7, 7, i, *range(i % 5)], np.int32)
        known = cache.match("", ids)
        cache.insert("", ids, np.concatenate([np.zeros(known, np.int32), pool.allocate(len(ids) - known)]))
    ticks = accumulate([0.0003] * 10_000)
    walk = TreeWalk(cache, lambda: next(ticks))
    assert not walk.go_on()
    cache.evict(200)
    while not walk.go_on():
        pass
    table = walk.table()
    sizes = {len(column) for column in (table.tokens, table.parent, table.before, table.locks, table.used)}
    [size] = sizes
    assert 0 < size <= MAX_NODES and table.num_tokens == cache.num_tokens
    assert table.tokens[0] == 2 and table.parent[0] == -1 and table.before[0] == 0
    assert all(above < place for place, above in enumerate(table.parent))
    assert set(table.parent[1:]) == {0} and set(table.before[1:]) == {2}


def test_the_name_of_a_tenant_cannot_be_found_by_trying():
    share = Share("peer 192.0.2.1", "a")
    digests = TenantDigests()
    assert digests.of(share) == digests.of(share) != digests.of(Share("peer 192.0.2.1", "b"))
    assert TenantDigests().of(share) != digests.of(share) and len(digests.of(share)) == 8
