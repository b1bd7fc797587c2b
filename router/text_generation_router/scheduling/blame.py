"""Finds the request to blame when shards die or a step fails. The cause cannot be known, so requests are tested alone.

A loss is the death of the shards, or an exception in a step. It may have come from any request in the unanswered
steps, or from outside. The first MAX_SUSPICIONS losses that meet a request only make it a suspect. A suspect runs alone
until it has made a token; suspects take turns by age. Only a loss that happens while a suspect runs alone counts
against it. The suspect then goes after all requests that are there, but before requests that come later, so that it
gets on in the end, however often shards die. The request ends at MAX_COUNTS such losses.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from text_generation_router.scheduling.request import Arrival, Past
from text_generation_router.scheduling.step import ForwardStep

# Number of losses in a row that a request may have met before it has to run alone.
MAX_SUSPICIONS = 2
# Number of losses in a row, each with no other request in the unanswered steps, that ends a request.
MAX_COUNTS = 3
# The least number of losses in a row that ends a request.
MAX_LOSSES = MAX_SUSPICIONS + MAX_COUNTS
# `reach` of a decode step: larger than the number of tokens of any history.
DECODED = sys.maxsize
# A stream that shards have computed this often without a token goes behind those that have waited less long.
MAX_TRIES = 3
# `stopped_at` of a request that no loss has stopped: later than every loss.
NEVER = sys.maxsize
# Earlier than every arrival.
EVER: Arrival = (float("-inf"), 0)
# What requests are sorted by that start again: see `Blame.turn`.
Turn = tuple[int, Arrival, int, Arrival]


@dataclass(slots=True)
class Blame:
    """The losses that count against one request since its last progress: a confirmed token, or a confirmed chunk with
    new tokens. Chunks that a replay repeats are not progress: otherwise a request whose second chunk kills the shards
    would kill them for ever."""

    suspicions: int = 0  # losses counted before the request had to run alone, at most MAX_SUSPICIONS
    counts: int = 0  # losses counted while the request ran alone
    runs_alone: bool = False  # True from the last suspicion until the next token
    # Arrival of the newest request at the last counted loss: this request now goes after it. EVER: no loss was counted
    # since the last token.
    goes_after: Arrival = EVER
    # Number of the loss since which the request waits for a token, or of a later one that has moved it back. Losses are
    # numbered from 1 on.
    stopped_at: int = NEVER
    num_tries: int = 0  # how often since `stopped_at` a loss has cut the request short while it was computed
    is_marked: bool = False  # whether any field is set that `note_token` clears
    proven: int = 0  # number of first tokens of the history that confirmed chunks have covered

    @property
    def is_replayed(self) -> bool:
        """Whether any loss has met the request since its last token."""
        return self.stopped_at != NEVER

    @property
    def ends_request(self) -> bool:
        return self.counts >= MAX_COUNTS

    @classmethod
    def of(cls, past: Past, newest: Arrival) -> "Blame":
        """What counts against a request that comes from another engine. `newest`: see `meet_loss`."""
        blame = cls(min(past.suspicions, MAX_SUSPICIONS), min(past.counts, MAX_COUNTS - 1))
        blame.runs_alone = blame.suspicions == MAX_SUSPICIONS
        blame.is_marked = bool(blame.suspicions or blame.counts)
        if blame.counts:
            blame.goes_after = newest
        return blame

    def turn(self, arrival: Arrival) -> Turn:
        """Sort key: what has waited since an earlier loss starts first, so that a stream waits until each other one has
        been computed once, and no longer, however often shards die. Otherwise by age, but counted losses move a request
        back."""
        return self.stopped_at, max(self.goes_after, arrival), self.counts, arrival

    def meet_loss(self, reach: int, was_alone: bool, newest: Arrival) -> None:
        """Notes that a loss met the request: the unanswered steps would have computed the first `reach` tokens of its
        history. A loss within the `proven` tokens does not count. `newest`: the last arrival of all requests until now.
        """
        if reach <= self.proven:
            return
        self.is_marked = True
        if self.suspicions < MAX_SUSPICIONS:
            self.suspicions += 1
            self.runs_alone |= self.suspicions == MAX_SUSPICIONS
        elif was_alone:
            self.counts += 1
            self.goes_after, self.num_tries = newest, MAX_TRIES

    def note_replay(self, loss: int, had_chunks: bool) -> None:
        """Notes that loss number `loss` met the request while it ran, so all its tokens are computed again. To be
        called after `meet_loss`. `had_chunks`: whether any had been sent since it joined."""
        self.is_marked = True
        self.num_tries += had_chunks
        if not self.is_replayed or self.num_tries > MAX_TRIES:
            self.stopped_at, self.num_tries = loss, int(had_chunks)

    def note_chunk(self, end: int) -> None:
        """Notes that a chunk of the request, up to token `end` of its history, is confirmed. A suspect still runs alone
        until its next token.
        """
        if end > self.proven:
            self.proven = end
            self.suspicions = self.counts = 0

    def note_token(self) -> None:
        self.suspicions = self.counts = self.num_tries = 0
        self.goes_after, self.stopped_at = EVER, NEVER
        self.runs_alone = self.is_marked = False


def reaches(steps: Iterable[ForwardStep]) -> dict[int, int]:
    """The ids of the requests in `steps`, and how many tokens of each history the steps would have computed."""
    found: dict[int, int] = {}
    for step in steps:
        for chunk in step.chunks:
            found[chunk.request_id] = max(chunk.end, found.get(chunk.request_id, 0))
        found |= dict.fromkeys(step.decode_ids, DECODED)
    return found
