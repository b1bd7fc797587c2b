"""Shares the prompt tokens of one step between the prompts that are being computed."""

from collections.abc import Sequence

from text_generation_router.scheduling.running import Running
from text_generation_router.scheduling.step import Chunk

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


def guaranteed_share(uncomputed: int, budget: int) -> int:
    """Tokens of a step's budget that must be left for a prompt of `uncomputed` tokens to start."""
    return min(uncomputed, max(1, budget // MAX_LONG_PROMPTS))


def next_chunks(prefilling: Sequence[Running], budget: int, number: int) -> tuple[Chunk, ...]:
    """The chunks of step `number`. Prompts that are computed again after a loss come first, in order of arrival."""
    ordered = sorted(prefilling, key=lambda request: (0, request.id) if request.blame.is_replayed else (1, 0))
    num_replayed = sum(request.blame.is_replayed for request in ordered)
    of_each = shares([request.num_uncomputed for request in ordered], budget, num_replayed)
    return tuple(request.send_chunk(share, number) for request, share in zip(ordered, of_each, strict=True) if share)
