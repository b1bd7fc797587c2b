import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from text_generation_router.scheduling.memory.slots import TokenSlots


def test_allocated_slots_are_distinct_and_contiguous_at_first() -> None:
    pool = TokenSlots(10)
    assert pool.allocate(4).tolist() == [0, 1, 2, 3]
    assert pool.allocate(6).tolist() == [4, 5, 6, 7, 8, 9]
    assert pool.num_free == 0


def test_a_large_allocation_gets_runs_of_adjacent_slots_when_there_are_any() -> None:
    pool = TokenSlots(200)
    one, other = pool.allocate(100), pool.allocate(100)
    pool.release(np.random.default_rng(0).permutation(one))
    assert pool.allocate(40).tolist() == list(range(40)) and pool.num_free == 60
    pool.release(other)
    assert (np.diff(pool.allocate(100)) == 1).sum() > 90


def test_a_pool_with_all_slots_free_again_gives_out_runs_from_the_first_slot_on() -> None:
    pool = TokenSlots(200)
    pool.release(np.random.default_rng(0).permutation(pool.allocate(200)))
    assert pool.allocate(100).tolist() == list(range(100)) and pool.allocate(3).tolist() == [100, 101, 102]


@given(st.lists(st.integers(0, 12), max_size=60), st.randoms(use_true_random=False))
def test_no_slot_has_two_owners_and_no_slot_leaks(sizes: list[int], random: object) -> None:
    pool = TokenSlots(40)
    held: list[list[int]] = []
    for size in sizes:
        if size <= pool.num_free:
            slots = pool.allocate(size)
            assert not {int(s) for s in slots} & {s for other in held for s in other}
            held.append(slots.tolist())
        elif held:
            pool.release(np.array(held.pop(random.randrange(len(held))), dtype=np.int32))  # type: ignore[attr-defined]
        assert pool.num_used == sum(map(len, held))
