"""What another engine had computed enters the cache if it is certain which token each slot holds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_router.scheduling.memory.computed import ComputedHistory, without_conflicts
from text_generation_router.scheduling.memory.memory import Memory, find_error

CAPACITY = 40


def history(ids: list[int], slots: list[int], salt: str = "") -> ComputedHistory:
    return ComputedHistory((salt,), np.array(ids, np.int32), np.array(slots, np.int32))


def cached(*histories: ComputedHistory, prefix_caching: bool = True) -> dict[tuple[str, tuple[int, ...]], list[int]]:
    """The slots of the cached first tokens of each history, by namespace and ids."""
    memory = Memory(CAPACITY, prefix_caching)
    memory.take_over(histories)
    assert find_error(memory, []) is None
    found = {}
    for each in histories:
        node, slots = memory.cache.lock(each.namespace, each.ids)
        memory.cache.unlock(node)
        assert not memory.slots.is_free[slots].any()
        found[each.namespace[0], tuple(each.ids.tolist())] = slots.tolist()
    owned = {slot for slots in found.values() for slot in slots}
    assert memory.slots.num_used == len(owned) == memory.num_available - memory.slots.num_free
    assert sorted({*memory.slots.allocate(memory.slots.num_free).tolist(), *owned}) == list(range(CAPACITY))
    return found


def test_histories_share_slots_as_far_as_they_are_equal() -> None:
    one, other = history([1, 2, 3, 4], [7, 3, 9, 11]), history([1, 2, 5], [7, 3, 20])
    assert cached(one, other) == {("", (1, 2, 3, 4)): [7, 3, 9, 11], ("", (1, 2, 5)): [7, 3, 20]}


def test_equal_tokens_with_slots_of_their_own_are_cached_once() -> None:
    one, other = history([1, 2, 3], [7, 3, 9]), history([1, 2, 3, 4], [10, 11, 12, 13])
    assert cached(one, other)["", (1, 2, 3, 4)] == [7, 3, 9, 13]


def test_namespaces_share_nothing() -> None:
    one, other = history([1, 2], [0, 1]), history([1, 2], [2, 3], "salt")
    assert cached(one, other) == {("", (1, 2)): [0, 1], ("salt", (1, 2)): [2, 3]}


# Salt, and for each token its id and which of some slots it has: those of its position, or one that all may have.
CLAIMS = st.tuples(
    st.sampled_from(["", "", "salt"]),
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0, 0, 0, 1, 2, 39])), min_size=1, max_size=8),
)


@given(st.lists(CLAIMS, max_size=6))
def test_nothing_is_cached_from_a_slot_on_that_two_tokens_have(claims: list[tuple[str, list[tuple[int, int]]]]) -> None:
    histories = [
        history([token for token, _ in tokens], [min(4 * at + which, 39) for at, (_, which) in enumerate(tokens)], salt)
        for salt, tokens in claims
    ]
    tokens_of: dict[int, set[object]] = {}
    for each in histories:
        ids = tuple(each.ids.tolist())
        for position, slot in enumerate(each.slots.tolist()):
            tokens_of.setdefault(slot, set()).add((each.namespace, ids[: position + 1]))
    ends = [
        next((at for at, slot in enumerate(each.slots.tolist()) if len(tokens_of[slot]) > 1), len(each.ids))
        for each in histories
    ]
    expected = [
        (h.namespace, h.ids[:end].tolist(), h.slots[:end].tolist())
        for h, end in zip(histories, ends, strict=True)
        if end
    ]
    sound = without_conflicts(histories, CAPACITY)
    assert [(h.namespace, h.ids.tolist(), h.slots.tolist()) for h in sound] == expected
    cached(*sound)


def test_a_history_that_names_a_slot_twice_ends_before_it() -> None:
    assert cached(history([1, 2, 3, 4], [7, 3, 9, 3])) == {("", (1, 2, 3, 4)): [7]}


@pytest.mark.parametrize("wrong", [history([9], [CAPACITY]), history([9], [-1]), history([9, 9], [30])])
def test_of_books_that_are_not_of_this_cache_nothing_is_cached(wrong: ComputedHistory) -> None:
    memory = Memory(CAPACITY, True)
    memory.take_over([history([1, 2], [3, 4]), wrong])
    assert memory.slots.num_used == 0 and find_error(memory, []) is None


def test_nothing_is_cached_without_prefix_caching() -> None:
    assert cached(history([1, 2], [3, 4]), prefix_caching=False) == {("", (1, 2)): []}
