"""Histories whose keys and values the shards have computed for an engine that has died. The next engine caches those
that pass these checks."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from text_generation_router.scheduling.memory.slots import Slots
from text_generation_router.scheduling.memory.trails import Ids, common_length


@dataclass(frozen=True, slots=True)
class ComputedHistory:
    """The first tokens of a request's history, and the slot of each of them."""

    namespace: Hashable
    ids: Ids
    slots: Slots

    def first(self, count: int) -> "ComputedHistory":
        return replace(self, ids=self.ids[:count], slots=self.slots[:count])


def without_conflicts(histories: Sequence[ComputedHistory], capacity: int) -> list[ComputedHistory]:
    """Each history up to its first slot that is also another token's: an engine that preempts a request gives its slots
    away in a step before it drops the row, so which of both tokens the slot holds is unknown. Nothing if a slot is not
    one of the `capacity` slots, or not each token has one.
    """
    if not histories or any(len(h.ids) != len(h.slots) or not _within(h.slots, capacity) for h in histories):
        return []
    lengths = [len(h.slots) for h in histories]
    slots = np.concatenate([h.slots for h in histories])
    order = np.argsort(slots, kind="stable")
    slots = slots[order]
    positions = np.concatenate([np.arange(length) for length in lengths])[order]
    owners = np.repeat(np.arange(len(histories)), lengths)[order]
    # Claims to one slot are neighbours now. If each is equal to the next one, all of them are equal.
    one = np.flatnonzero(slots[1:] == slots[:-1])
    pairs, pair_of = np.unique(owners[one] * len(histories) + owners[one + 1], return_inverse=True)
    neighbours = [divmod(pair, len(histories)) for pair in pairs.tolist()]
    common = np.array([_num_common(histories[a], histories[b]) for a, b in neighbours], dtype=np.int64)
    is_equal = (positions[one] == positions[one + 1]) & (positions[one] < common[pair_of])
    doubtful = slots[one[~is_equal]]
    sound = [h.first(int(np.append(np.isin(h.slots, doubtful), True).argmax())) for h in histories]
    return [h for h in sound if len(h.ids)]


def _num_common(one: ComputedHistory, other: ComputedHistory) -> int:
    return common_length(one.ids, other.ids) if one.namespace == other.namespace else 0


def _within(slots: Slots, capacity: int) -> bool:
    return not len(slots) or (int(slots.min()) >= 0 and int(slots.max()) < capacity)
