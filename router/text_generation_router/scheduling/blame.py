"""Which request is to blame when shards die or a step fails. The cause cannot be known, so blame goes by company.

A loss is the death of the shards, or an exception in a step. It may have come from any request in the unanswered
steps, or from outside. The first losses that meet a request only raise a suspicion. A suspect then runs alone until it
has made a token, in its turn by age. Only a loss that happens while a suspect runs alone counts against it, and then
all requests that are there go first, but not those that come later: however often shards die, it gets on in the end.
The last of these losses ends it.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from text_generation_router.scheduling.step import ForwardStep

# Losses in a row that meet a request before it has to run alone.
MAX_SUSPICIONS = 2
# Losses in a row with no other request aboard that end it.
MAX_COUNTS = 3
# Losses in a row with a request aboard that end it; fewer end none.
MAX_LOSSES = MAX_SUSPICIONS + MAX_COUNTS
# How far a decode step reaches: beyond what any chunk has computed.
DECODED = sys.maxsize


@dataclass(slots=True)
class Blame:
    """What speaks against one request. Losses are counted since the last progress: a confirmed token, or a confirmed
    chunk of tokens that no chunk before it had computed. A replay repeats chunks, which proves nothing new: otherwise a
    request whose second chunk kills the shards would kill them for ever."""

    suspicions: int = 0  # losses that met it before it ran alone, at most MAX_SUSPICIONS
    counts: int = 0  # losses that met it while it ran alone
    runs_alone: bool = False  # from the last suspicion until the next token
    goes_after: int = (
        0  # the id of the newest request when a loss last counted against it; 0: none since its last token
    )
    is_replayed: bool = False  # a loss has met it since its last token, whatever that says about it
    proven: int = 0  # the end of the furthest chunk of its own that has been confirmed, in tokens of its history

    @property
    def ends_request(self) -> bool:
        return self.counts >= MAX_COUNTS

    def turn(self, request_id: int) -> tuple[int, int, int]:
        """Requests with a lower turn start first: by age, but for what counts against them."""
        return max(self.goes_after, request_id), self.counts, request_id

    def meet_loss(self, reach: int, was_alone: bool, newest: int) -> None:
        """The request was aboard, and the unanswered steps would have computed `reach` tokens of its history. A loss
        while nothing was computed but what is proven speaks neither for nor against it. `newest`: the largest id of all
        requests so far."""
        if reach <= self.proven:
            return
        if self.suspicions < MAX_SUSPICIONS:
            self.suspicions += 1
            self.runs_alone |= self.suspicions == MAX_SUSPICIONS
        elif was_alone:
            self.counts += 1
            self.goes_after = newest

    def note_chunk(self, end: int) -> None:
        """A chunk of its own that ends there has been confirmed. It still runs alone until its token."""
        if end > self.proven:
            self.proven = end
            self.suspicions = self.counts = 0

    def note_token(self) -> None:
        self.suspicions = self.counts = self.goes_after = 0
        self.runs_alone = self.is_replayed = False


def reaches(steps: Iterable[ForwardStep]) -> dict[int, int]:
    """Who is aboard these steps, and how many tokens of each history they would have computed."""
    found: dict[int, int] = {}
    for step in steps:
        for chunk in step.chunks:
            found[chunk.request_id] = max(chunk.end, found.get(chunk.request_id, 0))
        found |= dict.fromkeys(step.decode_ids, DECODED)
    return found
