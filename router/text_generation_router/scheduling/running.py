"""One request on its way: what it has said, what has been sent for it, what it holds."""

import sys
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from text_generation_router.scheduling.blame import Blame
from text_generation_router.scheduling.radix_tree import NOTHING, Node
from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.scheduling.slots import Slots
from text_generation_router.scheduling.tenant import Owner, Tenant
from text_generation_router.scheduling.trails import Ids

Flags = npt.NDArray[np.bool_]
Lengths = npt.NDArray[np.int64]
NO_FLAGS: Flags = np.empty(0, dtype=np.bool_)
NO_LENGTHS: Lengths = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class Holding:
    """The slots of positions 0, 1, … of a request. It owns those that are not the prefix cache's."""

    slots: Slots
    is_cached: Flags  # the prefix cache owns it
    node: Node | None  # what it holds of the cache, if there is one
    count: int = 0
    num_cached: int = 0
    kept: int = 0  # so many first tokens have been offered to the cache

    @property
    def num_private(self) -> int:
        return self.count - self.num_cached

    def add(self, slots: Slots) -> None:
        self.slots[self.count : self.count + len(slots)] = slots
        self.count += len(slots)

    def add_cached(self, slots: Slots) -> None:
        end = self.count + len(slots)
        self.is_cached[self.count : end] = True
        self.num_cached += len(slots)
        self.add(slots)

    def hand_over(self, start: int, end: int) -> None:
        """The cache owns these positions from now on."""
        self.is_cached[start:end] = True
        self.num_cached += end - start

    def private(self) -> Slots:
        return self.slots[: self.count][~self.is_cached[: self.count]]


@dataclass(slots=True, eq=False)
class Running:
    """`input_ids + output_ids` is the truth of a request: from it the request can be started again, anywhere.

    What is *sent* runs ahead of what is *confirmed* (`output_ids`), because a step is decided before the one ahead of
    it has answered.
    """

    id: int  # also the order of arrival
    request: GenerationRequest
    output_ids: list[int] = field(default_factory=list)
    holding: Holding | None = None  # while it runs, and until the last step that carries it has answered
    prefill_to: int = 0  # length of the history that a (re)start computes
    prefilled: int = 0  # how much of it has been sent
    num_computed: int = 0  # tokens whose keys and values an answered step has confirmed
    num_sent: int = 0  # output tokens whose step has been sent, confirmed or not
    num_sent_at_start: int = 0
    last_step: int = 0  # the last step sent that contains it
    blame: Blame = field(default_factory=Blame)
    ended: bool = False
    paused: bool = False  # its reader is so far behind that it gets no more tokens for now
    has_begun: bool = False  # it has run, and may have been put back
    computed_from: int = sys.maxsize  # tokens that each of its starts found in the cache, at least
    cached_tokens: int = 0  # of the prompt, found in the prefix cache when it began
    expected: Lengths = field(default_factory=lambda: NO_LENGTHS)  # draws of how many tokens it will have made
    seat: int = 0  # where they are while it runs
    estimate: int = 0  # the mean of them when it began
    waited_for: str = ""  # what last kept it in the queue
    is_good: bool = True  # what was computed for it may be kept
    is_known_to_shards: bool = False  # its first chunk has been sent
    most_computed: int = 0  # so much of it had been computed when it was last put back
    num_tokens: int = 0  # prompt and output
    tenant: Tenant = field(default_factory=lambda: Tenant(Owner(0.0)))  # whose counter it moves; the queue gives it
    _ids: Ids = field(default_factory=lambda: NOTHING)

    def __post_init__(self) -> None:
        self._ids = np.array(self.request.input_ids, dtype=np.int32)
        self.num_tokens = len(self._ids)

    @property
    def history(self) -> Ids:
        """Prompt and output."""
        return self._ids[: self.num_tokens]

    @property
    def most_slots(self) -> int:
        """At its longest: nobody needs the keys of the last token."""
        return len(self.request.input_ids) + self.request.max_new_tokens - 1

    @property
    def num_uncomputed(self) -> int:
        """Tokens of its history whose chunks are still to be sent."""
        return self.prefill_to - self.prefilled

    @property
    def wants_token(self) -> bool:
        """Whether another decode step may carry it: somebody reads, and its end is not yet on its way."""
        return self.prefilled >= self.prefill_to and self.num_sent < self.request.max_new_tokens and not self.paused

    @property
    def is_ending(self) -> bool:
        """Its last token is on its way."""
        return self.num_sent == self.request.max_new_tokens

    @property
    def slots(self) -> Slots:
        """As many as it holds, in order of position."""
        return self.holding.slots[: self.holding.count] if self.holding else NOTHING

    def start(self, node: Node | None, cached: Slots) -> None:
        """Ready for a prefill of what the cache does not have of everything it has said so far."""
        size = len(self.request.input_ids) + self.request.max_new_tokens
        if len(self._ids) < size:
            self._ids = np.append(self._ids, np.empty(size - len(self._ids), dtype=np.int32))
        self.holding = Holding(np.empty(size, dtype=np.int32), np.zeros(size, dtype=np.bool_), node)
        self.holding.add_cached(cached)
        self.holding.kept = len(cached)
        self.prefill_to = self.num_tokens
        self.prefilled = self.num_computed = len(cached)
        self.computed_from = min(self.computed_from, len(cached))
        self.num_sent = self.num_sent_at_start = len(self.output_ids)
        self.last_step = 0  # new shards count their steps from 1 again
        self.is_known_to_shards = False

    def begin(self, expected: Lengths) -> None:
        """It has joined, and is expected to have made so many tokens in the end."""
        if not self.has_begun:
            self.cached_tokens, self.estimate = self.prefilled, round(float(expected.mean()))
        self.has_begun = True

    def add_token(self, token_id: int) -> None:
        """A confirmed one. Its own keys are computed by the step that it goes into."""
        self._ids[self.num_tokens] = token_id
        self.num_computed = self.num_tokens
        self.num_tokens += 1
        self.output_ids.append(token_id)
        self.blame.note_token()

    def add_tokens(self, token_id: int, count: int) -> None:
        """The same one several times over."""
        self._ids[self.num_tokens : self.num_tokens + count] = token_id
        self.num_tokens += count
        self.num_computed = self.num_tokens - 1
        self.output_ids.extend([token_id] * count)
