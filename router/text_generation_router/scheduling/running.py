"""The state of one request: its tokens, the steps that were sent for it, and the slots that it holds."""

import sys
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from text_generation_router.scheduling.blame import Blame
from text_generation_router.scheduling.memory.radix_tree import NOTHING, Node
from text_generation_router.scheduling.memory.slots import Slots
from text_generation_router.scheduling.memory.trails import Ids
from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.scheduling.tenant import Owner, Tenant

Flags = npt.NDArray[np.bool_]
Lengths = npt.NDArray[np.int64]
NO_FLAGS: Flags = np.empty(0, dtype=np.bool_)
NO_LENGTHS: Lengths = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class Holding:
    """The slots of positions 0, 1, … of a request. Each slot is owned by the request or by the prefix cache."""

    slots: Slots
    is_cached: Flags  # of each position: whether the prefix cache owns the slot
    node: Node | None  # the locked node of the prefix cache; None without prefix caching
    count: int = 0  # slots in use
    num_cached: int = 0  # slots among them that the cache owns
    kept: int = 0  # number of first tokens that the cache holds up to `node`

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
    """A request and its progress. From `input_ids + output_ids` alone it can be started again, on any shards.

    What is *sent* runs ahead of what is *confirmed* (`output_ids`), because a step is decided before the one ahead of
    it has answered.
    """

    id: int  # also the order of arrival
    request: GenerationRequest
    output_ids: list[int] = field(default_factory=list)
    holding: Holding | None = None  # while running or leaving
    prefill_to: int = 0  # tokens of the history that the last (re)start computes
    prefilled: int = 0  # tokens of the history that are cached or in sent chunks
    num_computed: int = 0  # tokens whose keys and values an answered step has confirmed
    num_sent: int = 0  # output tokens whose step has been sent, confirmed or not
    num_sent_at_start: int = 0  # `num_sent` at the last (re)start
    last_step: int = 0  # number of the last sent step that carries the request
    blame: Blame = field(default_factory=Blame)
    ended: bool = False
    paused: bool = False  # gets no tokens for now, because its client reads too slowly
    has_begun: bool = False  # has joined at least once
    computed_from: int = sys.maxsize  # fewest cached tokens that any of its starts found
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first start
    expected: Lengths = field(default_factory=lambda: NO_LENGTHS)  # sampled final output lengths
    seat: int = 0  # while it runs: row of `Futures` with the sampled lengths
    estimate: int = 0  # mean sampled length at the first start, in tokens
    waited_for: str = ""  # why the request last stayed in the queue
    is_good: bool = True  # keys and values computed for the request may stay in the cache
    is_known_to_shards: bool = False  # the first chunk has been sent, so the shards have a row
    most_computed: int = 0  # computed tokens at the last release of the slots
    num_tokens: int = 0  # prompt and output tokens
    tenant: Tenant = field(default_factory=lambda: Tenant(Owner(0.0)))  # the account to charge; set by the queue
    _ids: Ids = field(default_factory=lambda: NOTHING)

    def __post_init__(self) -> None:
        self._ids = np.array(self.request.input_ids, dtype=np.int32)
        self.num_tokens = len(self._ids)

    @property
    def history(self) -> Ids:
        """Token ids of prompt and output."""
        return self._ids[: self.num_tokens]

    @property
    def most_slots(self) -> int:
        """Slots at the greatest length. The last token needs no slot: no later token attends to it."""
        return len(self.request.input_ids) + self.request.max_new_tokens - 1

    @property
    def num_uncomputed(self) -> int:
        """Tokens of the history whose chunks are still to be sent."""
        return self.prefill_to - self.prefilled

    @property
    def wants_token(self) -> bool:
        """Whether another decode step may carry the request: prefilled, not paused, and the last token not sent yet."""
        return self.prefilled >= self.prefill_to and self.num_sent < self.request.max_new_tokens and not self.paused

    @property
    def is_ending(self) -> bool:
        """Whether the step that makes the last token has been sent."""
        return self.num_sent == self.request.max_new_tokens

    @property
    def slots(self) -> Slots:
        """The slots in use, in order of position."""
        return self.holding.slots[: self.holding.count] if self.holding else NOTHING

    def start(self, node: Node | None, cached: Slots) -> None:
        """Prepares a prefill of the history after its cached tokens, whose slots are `cached`, locked at `node`."""
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
        """The request has joined. `expected`: sampled final output lengths, in tokens."""
        if not self.has_begun:
            self.cached_tokens, self.estimate = self.prefilled, round(float(expected.mean()))
        self.has_begun = True

    def add_token(self, token_id: int) -> None:
        """Adds a confirmed token. Its keys and values are computed by the next step, whose input it is."""
        self._ids[self.num_tokens] = token_id
        self.num_computed = self.num_tokens
        self.num_tokens += 1
        self.output_ids.append(token_id)
        self.blame.note_token()

    def add_tokens(self, token_id: int, count: int) -> None:
        """Adds the same confirmed token `count` times."""
        self._ids[self.num_tokens : self.num_tokens + count] = token_id
        self.num_tokens += count
        self.num_computed = self.num_tokens - 1
        self.output_ids.extend([token_id] * count)
