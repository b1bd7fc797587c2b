"""One request with slots: its tokens, the steps that were sent for it, the slots that it holds. And all such requests:
*running*, with a row in the shards, or *leaving*, while a step in flight carries them.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from text_generation_router.scheduling.blame import Blame, Turn
from text_generation_router.scheduling.memory.memory import Holding, Memory
from text_generation_router.scheduling.memory.radix_tree import NOTHING
from text_generation_router.scheduling.memory.slots import Slots
from text_generation_router.scheduling.memory.trails import Ids
from text_generation_router.scheduling.prompt_logprobs import KnownLogprobs
from text_generation_router.scheduling.request import NEW, Arrival, EndReason, GenerationRequest, Namespace, Past
from text_generation_router.scheduling.step import Chunk, FirstChunk
from text_generation_router.scheduling.tenant import Owner, Tenant

Lengths = npt.NDArray[np.int64]
NO_LENGTHS: Lengths = np.empty(0, dtype=np.int64)
NO_TOKENS: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Running:
    """A request and its progress. From `input_ids + output_ids` alone it can be started again, on any shards.

    The number of *sent* tokens is ahead of the *confirmed* tokens (`output_ids`), because a step is decided before the
    step before it has answered.
    """

    id: int
    request: GenerationRequest
    past: Past = NEW
    arrived_s: float = 0.0  # when the request arrived at its front, in seconds of the engine's clock
    output_ids: list[int] = field(default_factory=list)  # begins with those of `past`
    num_tokens: int = 0  # number of prompt and output tokens
    ended: bool = False
    paused: bool = False  # True while the request gets no tokens because its client reads too slowly; set by its stream
    blame: Blame = field(default_factory=Blame)
    prompt_logprobs: KnownLogprobs | None = None  # set if the request wants log-probabilities of its prompt

    # Progress since the request last started: changed by `start`, `send_chunk` and `send_tokens`.
    prefill_to: int = 0  # number of tokens of the history that the last start computes
    prefilled: int = 0  # number of tokens of the history that are cached or in sent chunks
    num_sent: int = 0  # number of output tokens whose step has been sent, confirmed or not
    num_sent_at_start: int = 0  # `num_sent` at the last start
    last_step: int = 0  # number of the last sent step that carries the request
    is_known_to_shards: bool = False  # True once the first chunk has been sent: the shards have a row for the request

    # Set by `begin`, when the request joins.
    has_begun: bool = False  # whether the request has ever joined
    cached_tokens: int = (
        0  # number of prompt tokens, and tokens of the past, found in the prefix cache at the first start
    )
    estimate: int = 0  # mean sampled length at the first start, in tokens

    # Set by `Memory`.
    holding: Holding | None = None  # set while the request runs or leaves
    max_computed: int = 0  # number of tokens that were computed at the last release of the slots
    fewest_cached: int = sys.maxsize  # smallest number of cached tokens that any start of the request found
    # Set by `Queue`: whether all tokens of a stream but the newest outlived the loss, or engine, that has stopped it.
    is_kept: bool = False

    # Set by `Queue`, `Joining` and `Futures`.
    # The account to which the request's tokens are charged.
    tenant: Tenant = field(default_factory=lambda: Tenant(Owner(0.0)))
    waited_for: str = ""  # why the request last stayed in the queue
    expected: Lengths = field(default_factory=lambda: NO_LENGTHS)  # sampled final output lengths, in tokens
    futures_row: int = 0  # row of `Futures` with the sampled lengths, while the request runs

    _ids: Ids = field(default_factory=lambda: NOTHING)  # token ids of the history as of the last call of `history`
    _num_ids: int = 0  # number of token ids in `_ids`

    def __post_init__(self) -> None:
        self._ids = np.array(self.request.input_ids, dtype=np.int32)
        self._num_ids = len(self._ids)
        self.output_ids.extend(self.past.output_ids)
        self.num_tokens = self._num_ids + len(self.output_ids)
        if self.request.prompt_logprobs is not None:
            self.prompt_logprobs = KnownLogprobs(self._num_ids)

    @property
    def arrival(self) -> Arrival:
        """Sort key of requests by age."""
        return self.arrived_s, self.id

    @property
    def turn(self) -> Turn:
        """Sort key of requests that start again."""
        return self.blame.turn(self.arrival)

    @property
    def newness(self) -> Arrival:
        """Sort key: the newest request first."""
        return -self.arrived_s, -self.id

    @property
    def namespace(self) -> Namespace:
        return self.request.namespace

    @property
    def history(self) -> Ids:
        """Token ids of prompt and output."""
        if (known := self._num_ids) < self.num_tokens:
            if self.num_tokens > len(self._ids):
                self._ids = np.append(self._ids, np.empty(self.max_tokens - len(self._ids), dtype=np.int32))
            self._ids[known : self.num_tokens] = self.output_ids[known - len(self.request.input_ids) :]
            self._num_ids = self.num_tokens
        return self._ids[: self.num_tokens]

    @property
    def max_tokens(self) -> int:
        return len(self.request.input_ids) + self.request.max_new_tokens

    @property
    def max_slots(self) -> int:
        """Number of slots at the greatest length. The last new token needs no slot, because no later token attends to
        it.
        """
        return max(self.max_tokens - 1, len(self.request.input_ids))

    @property
    def num_matchable(self) -> int:
        """Number of first tokens of the history that may come from the prefix cache. The last one must be computed,
        because the next token is sampled from its output; and so must all tokens after which a token of the prompt
        follows whose log-probability is wanted and not known yet.
        """
        known, most = self.prompt_logprobs, self.num_tokens - 1
        return most if known is None or known.are_complete else min(most, known.count)

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of the prompt are still wanted."""
        return self.prompt_logprobs is not None and not self.prompt_logprobs.are_complete

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens of the history whose chunks are still to be sent."""
        return self.prefill_to - self.prefilled

    @property
    def is_due(self) -> bool:
        """Whether the request, which runs, is a stream that goes on with one token, because the cache had all others:
        after a loss that has left keys and values, or a preemption."""
        return bool(self.output_ids) and self.num_uncomputed == 1

    @property
    def is_stopped(self) -> bool:
        """Whether a loss has stopped the stream since its last token."""
        return bool(self.output_ids) and self.blame.is_replayed

    @property
    def num_computed(self) -> int:
        """Number of first tokens whose keys and values an answered step has computed. Once a step has made a token
        since the last start, these are all tokens but the newest, whose keys are computed by the step that takes it as
        input.
        """
        assert self.holding is not None
        if self.num_tokens > self.prefill_to:
            return self.num_tokens - 1
        return min(self.holding.num_confirmed, self.num_tokens)  # fewer: tokens after a stop string were forgotten

    @property
    def wants_token(self) -> bool:
        """Whether another decode step may carry the request: it is prefilled, not paused, and its last token is not
        sent yet.
        """
        return self.prefilled >= self.prefill_to and self.num_sent < self.request.max_new_tokens and not self.paused

    @property
    def is_ending(self) -> bool:
        """Whether the last step of the request has been sent: the step that makes its last token or, if it wants no
        token, the step that ends its prompt."""
        return self.num_sent == self.request.max_new_tokens and self.prefilled >= self.prefill_to

    def is_computed_at(self, end: int) -> bool:
        """Whether the request wants no token, and a chunk that ends at `end` ends its prompt."""
        return not self.request.max_new_tokens and end >= self.prefill_to

    @property
    def slots(self) -> Slots:
        """The slots in use, in order of position."""
        return self.holding.slots if self.holding else NOTHING

    def start(self) -> None:
        """Prepares a prefill of the history after its cached tokens, which the request holds."""
        assert self.holding is not None
        self.prefill_to, self.prefilled = self.num_tokens, self.holding.count
        self.num_sent = self.num_sent_at_start = len(self.output_ids)
        self.last_step = 0  # new shards count their steps from 1 again
        self.is_known_to_shards = False

    def begin(self, expected: Lengths) -> None:
        """Notes that the request has joined. `expected`: sampled final output lengths, in tokens."""
        if not self.has_begun:
            self.cached_tokens, self.estimate = self.prefilled, round(float(expected.mean()))
        self.has_begun = True

    def send_chunk(self, tokens: int, number: int) -> Chunk:
        """Makes a chunk of step `number` from the next `tokens` tokens of the history."""
        start, end = self.prefilled, self.prefilled + tokens
        last = end == self.prefill_to and self.request.max_new_tokens > 0
        first = None if self.is_known_to_shards else self._first_chunk()
        self.prefilled, self.last_step, self.is_known_to_shards = end, number, True
        self.num_sent += last
        return Chunk(request_id=self.id, start=start, end=end, last=last, first=first, scored=self.is_scored)

    def _first_chunk(self) -> FirstChunk:
        asked, is_cached = self.request, self.holding is not None and self.holding.node is not None
        ids = (*asked.input_ids, *self.output_ids)
        prompt_logprobs = asked.prompt_logprobs if self.is_scored else None
        return FirstChunk(
            ids,
            self.slots.copy(),
            len(asked.input_ids),
            asked.sampling,
            prompt_logprobs,
            adapter=asked.adapter,
            namespace=asked.namespace if is_cached else None,
        )

    def add_tokens(
        self, token_ids: tuple[int, ...], end_tokens: frozenset[int] = NO_TOKENS, is_complete: bool = False
    ) -> tuple[tuple[int, ...], EndReason | None]:
        """Adds confirmed tokens up to the token that ends the request. Returns the added tokens and, if they end the
        request, the reason: its length, one of its own stop tokens, or one of `end_tokens` unless the request ignores
        them. `is_complete`: the request's grammar is complete with the last of the tokens, which ends the request in
        any case.
        """
        asked, made, reason = self.request, len(self.output_ids), None
        if asked.ignore_eos and not is_complete:
            end_tokens = asked.stop_token_ids
        elif asked.stop_token_ids:
            end_tokens |= asked.stop_token_ids
        if not end_tokens.isdisjoint(token_ids):
            first = next(place for place, token_id in enumerate(token_ids) if token_id in end_tokens)
            token_ids, reason = token_ids[: first + 1], EndReason.EOS_TOKEN
        if is_complete:
            reason = reason or EndReason.COMPLETE
        elif (
            made + len(token_ids) >= asked.max_new_tokens
        ):  # the length limit is checked before the end token, as in TGI
            token_ids, reason = token_ids[: asked.max_new_tokens - made], EndReason.LENGTH
        self.output_ids += token_ids
        self.num_tokens += len(token_ids)
        if self.blame.is_marked:
            self.blame.note_token()
        return token_ids, reason

    def keep_output(self, count: int) -> None:
        """Forgets all output tokens but the first `count`."""
        if count < len(self.output_ids):
            del self.output_ids[count:]
            self.num_tokens = len(self.request.input_ids) + count
            self._num_ids = min(self._num_ids, self.num_tokens)


def send_tokens(requests: Iterable[Running], count: int, number: int) -> None:
    """Counts `count` more sent tokens for each of the requests, and `number` as the last step that carries them."""
    for request in requests:
        request.num_sent += count
        request.last_step = number


class ActiveRequests:
    """All requests that have slots. If a request has left and its row is still in the shards, the row is *departed*
    until a filter step removes it.
    """

    def __init__(self) -> None:
        self.running: dict[int, Running] = {}  # id → running request, in order of joining
        self.leaving: list[Running] = []  # ended or preempted requests whose last step has not answered
        self._departed: set[int] = set()  # ids of requests that left, with a row still in the shards
        # The request that last began to run alone because it may have caused a loss.
        self._suspect: Running | None = None

    def __iter__(self) -> Iterator[Running]:
        yield from self.running.values()
        yield from self.leaving

    def __len__(self) -> int:
        return len(self.running) + len(self.leaving)

    def find(self, request_id: int) -> Running | None:
        running = self.running.get(request_id)
        return running if running is not None else next((r for r in self.leaving if r.id == request_id), None)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_reserved(self) -> int:
        """Slots that the running requests would hold at their greatest lengths."""
        return sum(request.max_slots for request in self.running.values())

    @property
    def suspect(self) -> Running | None:
        """The running request that has to run alone, if there is one. While it runs alone, no step carries other
        rows.
        """
        request = self._suspect
        if request is not None and not (request.blame.runs_alone and request.id in self.running):
            request = self._suspect = None
        return request

    @property
    def have_departed_rows(self) -> bool:
        return bool(self._departed)

    def join(self, request: Running) -> None:
        self.running[request.id] = request
        if request.blame.runs_alone:
            self._suspect = request

    def leave(self, request: Running, answered: int) -> bool:
        """Ends the running of a request. Returns whether the request has to keep its slots, because a step after step
        `answered` carries it.
        """
        del self.running[request.id]
        if request.is_known_to_shards:
            self._departed.add(request.id)
        if request.last_step > answered:
            self.leaving.append(request)
        return request.last_step > answered

    def take_left(self, answered: int) -> list[Running]:
        """Removes and returns the leaving requests that no step after step `answered` carries."""
        left = [request for request in self.leaving if request.last_step <= answered]
        for request in left:
            self.leaving.remove(request)
        return left

    def drop_rows(self) -> tuple[int, ...]:
        """Marks the departed rows as removed, because the next step drops them. Returns the ids of the requests whose
        rows stay.
        """
        self._departed.clear()
        return tuple(request.id for request in self.running.values() if request.is_known_to_shards)

    def clear(self) -> list[Running]:
        """Removes and returns all requests, running ones first, because all rows are void."""
        requests = list(self)
        self.running.clear()
        self.leaving.clear()
        self._departed.clear()
        return requests


# Chooses the running request that gives up its slots when there are too few slots for the next tokens.


def find_victim(active: ActiveRequests, memory: Memory) -> Running | None:
    """The request to preempt: a paused request first, then the request with the fewest slots of its own, then the
    newest. None if fewer than two requests run, or all are about to end.
    """
    if active.num_running < 2:
        return None
    able = (request for request in active.running.values() if not request.is_ending)
    return min(able, key=lambda r: (not r.paused, memory.num_exclusive(r), r.newness), default=None)


def num_soon_free(active: ActiveRequests, memory: Memory) -> int:
    """Number of slots that steps in flight, or the steps after them, will free without preemption."""
    ending = [request for request in active.running.values() if request.is_ending]
    going: Sequence[Running] = [*active.leaving, *ending]
    return sum(memory.exclusives(going))
