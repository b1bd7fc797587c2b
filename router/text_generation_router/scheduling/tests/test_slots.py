from hypothesis import given
from hypothesis import strategies as st

from text_generation_router.scheduling.slots import TokenSlots


def test_allocated_slots_are_distinct_and_contiguous_at_first() -> None:
    pool = TokenSlots(10)
    assert pool.allocate(4).tolist() == [0, 1, 2, 3]
    assert pool.allocate(6).tolist() == [4, 5, 6, 7, 8, 9]
    assert pool.num_free == 0


def test_a_shared_slot_is_free_when_its_last_holder_lets_go() -> None:
    pool = TokenSlots(4)
    slots = pool.allocate(2)
    pool.retain(slots)
    pool.release(slots)
    assert pool.num_free == 2
    pool.release(slots)
    assert pool.num_free == 4


@given(st.lists(st.integers(0, 12), max_size=60), st.randoms(use_true_random=False))
def test_no_slot_has_two_owners_and_none_leaks(sizes: list[int], random: object) -> None:
    pool = TokenSlots(40)
    held: list[list[int]] = []
    for size in sizes:
        if size <= pool.num_free:
            slots = pool.allocate(size)
            assert not {int(s) for s in slots} & {s for other in held for s in other}
            held.append(slots.tolist())
        elif held:
            import numpy as np

            pool.release(np.array(held.pop(random.randrange(len(held))), dtype=np.int32))  # type: ignore[attr-defined]
        assert pool.num_used == sum(map(len, held))
