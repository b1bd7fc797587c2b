"""Shares the prompt tokens of one step between the prompts that are being computed."""

from collections.abc import Hashable, Sequence

from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.step import Chunk
from text_generation_router.scheduling.tenant import Owner

# How many prompt tokens of one owner a step may compute: all that fit, or only a part while owners share the server.
#
# Two steps are under way when a request arrives, and its own step is the third. If one owner's prompts filled all
# three, every other owner would wait three long steps for a first token.

# While owners share the server, one owner's prompts get at most 1 / PARTS of a step's budget.
PARTS = 4
# Owners share the server if requests of two owners have joined within this many forward steps.
SHARED_STEPS = 256


class OwnerParts:
    def __init__(self, budget: int) -> None:
        """`budget`: prompt tokens of one step."""
        self._budget = budget
        self._newest: Owner | None = None  # owner of the request that joined last
        self._newest_at = self._other_at = -SHARED_STEPS  # steps of the last joins, of this owner and of any other

    def note_joined(self, owner: Owner, now: int) -> None:
        """A request of `owner` joins before forward step `now`."""
        if owner is not self._newest:
            self._newest, self._other_at = owner, self._newest_at
        self._newest_at = now

    def most(self, now: int) -> int:
        """The most prompt tokens of one owner in forward step `now`."""
        is_shared = now - self._other_at < SHARED_STEPS
        return max(1, self._budget // PARTS) if is_shared else self._budget


# Number of long prompts that are computed at a time; with more, all of them would be late.
MAX_LONG_PROMPTS = 8


def shares(uncomputed: Sequence[int], budget: int, num_first: int = 0) -> list[int]:
    """Tokens of each prompt in this step: equal shares of `budget`. If a prompt needs less than its share, the rest
    goes to the others.

    The first `num_first` prompts are computed again because the shards died. They come before the others, one after the
    other, and each gets all tokens it needs: if all advanced together and the shards died again, none would be
    finished.
    """
    given = [0] * len(uncomputed)
    for i in range(num_first):
        given[i] = min(uncomputed[i], budget)
        budget -= given[i]
    by_need = sorted(range(num_first, len(uncomputed)), key=lambda i: uncomputed[i])
    for place, i in enumerate(by_need):
        given[i] = min(uncomputed[i], budget // (len(by_need) - place))
        budget -= given[i]
    return given


def shares_by_owner(uncomputed: Sequence[int], owners: Sequence[Hashable], budget: int, most: int) -> list[int]:
    """Tokens of each prompt in this step: equal shares between owners, at most `most` for each, and within an owner
    equal shares between its prompts. `owners[i]` is the owner of prompt i."""
    prompts_of: dict[Hashable, list[int]] = {}
    for i, owner in enumerate(owners):
        prompts_of.setdefault(owner, []).append(i)
    needs = [min(sum(uncomputed[i] for i in prompts), most) for prompts in prompts_of.values()]
    given = [0] * len(uncomputed)
    for prompts, part in zip(prompts_of.values(), shares(needs, budget), strict=True):
        for i, share in zip(prompts, shares([uncomputed[i] for i in prompts], part), strict=True):
            given[i] = share
    return given


def guaranteed_share(uncomputed: int, budget: int) -> int:
    """Tokens of a step's budget that must be left for a prompt of `uncomputed` tokens to start."""
    return min(uncomputed, max(1, budget // MAX_LONG_PROMPTS))


def next_chunks(prefilling: Sequence[Running], budget: int, most: int, number: int) -> tuple[Chunk, ...]:
    """The chunks of step `number`, with at most `most` tokens of one owner. Prompts that are computed again after a
    loss come first, in the order of the queue, and may have the whole budget."""
    replayed = sorted((r for r in prefilling if r.blame.is_replayed), key=lambda request: request.turn)
    others = [request for request in prefilling if not request.blame.is_replayed]
    of_replayed = shares([request.num_uncomputed for request in replayed], budget, len(replayed))
    uncomputed, owners = [r.num_uncomputed for r in others], [r.tenant.owner for r in others]
    of_others = shares_by_owner(uncomputed, owners, budget - sum(of_replayed), most)
    of_each = zip([*replayed, *others], [*of_replayed, *of_others], strict=True)
    return tuple(request.send_chunk(share, number) for request, share in of_each if share)
