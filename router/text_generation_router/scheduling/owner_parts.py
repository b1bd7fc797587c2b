"""How many prompt tokens of one owner a step may compute: all that fit, or only a part while owners share the server.

Two steps are under way when a request arrives, and its own step is the third. If one owner's prompts filled all three,
every other owner would wait three long steps for a first token.
"""

from text_generation_router.scheduling.tenant import Owner

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
