"""How the prompts under way share the tokens of one step."""

from collections.abc import Sequence

# Of so many long prompts at a time the chunks are computed; more would only make all of them late.
MAX_LONG_PROMPTS = 8


def shares(uncomputed: Sequence[int], budget: int, num_first: int = 0) -> list[int]:
    """Each prompt gets the same, or what it needs if that is less, and what is left over goes to the others.

    The first `num_first` of them get all they need, one after the other. Those are prompts that are computed again
    because the shards died: if they all advanced together, shards that die again would have finished none of them.
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
    """What a prompt needs at least, for itself, of a step's budget to be worth starting."""
    return min(uncomputed, max(1, budget // MAX_LONG_PROMPTS))
