"""Shares the prompt tokens of one step between the prompts that are being computed."""

from collections.abc import Sequence

# About this many long prompts are computed at a time; more would only make all of them late.
MAX_LONG_PROMPTS = 8


def shares(uncomputed: Sequence[int], budget: int, num_first: int = 0) -> list[int]:
    """Tokens of each prompt in this step: equal shares of `budget`. What a short prompt leaves goes to the others.

    The first `num_first` prompts come before the others, and get all they need, one after the other. These prompts are
    computed again because the shards died: if all advanced together and shards died again, none would be finished.
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
    """The tokens of a step's budget that must be left for a prompt to start."""
    return min(uncomputed, max(1, budget // MAX_LONG_PROMPTS))
