"""The decisions of the scheduler, and the answers to them. The engine turns each step into one call to the shards, in
order of `number`."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from text_generation_common.sampling import Sampling
from text_generation_router.scheduling.memory.slots import Slots
from text_generation_router.scheduling.prompt_logprobs import PromptLogprobs
from text_generation_router.scheduling.request import EndReason, Namespace

# All requests of an engine run in the same steps, so the protocol's batches are not needed: there is only one.
BATCH_ID = 1
NO_PROMPTS: Mapping[int, PromptLogprobs] = MappingProxyType({})
NO_FAILURES: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class FirstChunk:
    """Facts about a request that a shard gets once, with the request's first chunk."""

    ids: tuple[int, ...]  # the whole history: prompt, then output if the request is resumed
    slots: Slots  # the slot of every position of the history
    prompt_length: int
    sampling: Sampling
    prompt_logprobs: int | None = None  # as in `GenerationRequest`; None once all of them are known
    adapter: str = ""  # as in `GenerationRequest`
    namespace: Namespace | None = None  # as in `GenerationRequest`; None: without prefix caching


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk: positions start … end - 1 of a request's history. A `last` chunk ends the history, and a token is
    sampled after it. A `scored` chunk gives log-probabilities of the prompt, which takes longer.
    """

    request_id: int
    start: int
    end: int
    last: bool
    first: FirstChunk | None
    scored: bool = False


class ForwardStep(NamedTuple):
    """A step that decodes one token for each request of `decode_ids`, and computes chunks of prompts. `decode_slots`:
    for each of these requests, the slot of its input token.
    """

    number: int
    decode_ids: tuple[int, ...]
    decode_slots: Slots
    chunks: tuple[Chunk, ...]
    joined: int = 0  # number of requests that begin with this step
    concat_reason: str | None = None  # why the requests joined running ones, in TGI's words

    @property
    def method(self) -> str:
        return "prefill" if self.chunks else "decode"

    @property
    def request_ids(self) -> tuple[int, ...]:
        return (*self.decode_ids, *(chunk.request_id for chunk in self.chunks))


@dataclass(frozen=True, slots=True)
class FilterStep:
    """A step that removes from the shards all rows except those of the requests in `keep`. If `keep` is empty, it
    removes the batch too.
    """

    number: int
    keep: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClearStep:
    """A step that removes all rows and all batches from the shards."""

    number: int


@dataclass(frozen=True, slots=True)
class AdapterStep:
    """A step that puts a LoRA adapter into a slot of the shards, in the place of the one that is there."""

    number: int
    slot: int
    adapter: str  # the adapter's digest


Step = ForwardStep | FilterStep | ClearStep | AdapterStep


class StepAnswer(NamedTuple):
    """The answer to step `number`. `request_ids`, `token_ids`, `logprobs` and `top_counts` have one entry for each row
    that made a token; `top_ids` and `top_logprobs` are the rows' top tokens joined. The answer to a step that only
    drops rows has none. Times are in nanoseconds; 0 if they are not known. A named tuple, because one is made per step,
    and a frozen dataclass of twelve fields takes eight times as long to make.
    """

    number: int
    request_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    top_counts: Sequence[int] = ()
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()
    forward_ns: int = 0
    total_ns: int = 0
    gap_ns: int = 0
    successor_queued: bool = False
    failures: Mapping[int, str] = NO_FAILURES  # requests that failed alone, and why: their tokens are invalid
    prompt_logprobs: Mapping[int, PromptLogprobs] = NO_PROMPTS  # what the step's chunks gave, by the request's id
    complete_ids: Collection[int] = ()  # requests whose grammar is complete with this token
    refusal: str = ""  # why the shards cannot do an `AdapterStep`


@dataclass(frozen=True, slots=True)
class Applied:
    """The changes made by the answer to a step. Requests are named by their ids."""

    taken: list[tuple[int, ...]] = field(default_factory=list)
    """The tokens to publish, in the order of the answer's requests: empty for a request that had ended before, and for
    one that failed in this step."""
    ended: dict[int, EndReason] = field(default_factory=dict)
    """Requests that ended at their length limit, with an end token, or with their grammar complete, in this step."""
    computed: list[int] = field(default_factory=list)
    """Ids of requests that ended without a token, because their prompts are computed and they want no more."""
    failed: dict[int, str] = field(default_factory=dict)
    """Requests that failed in this step, and why."""
    freed: list[int] = field(default_factory=list)
    """Ended requests that no unanswered step carries any more: their slots are free, and nothing is known of them."""


# Numbers the steps of an epoch, and remembers the forward steps that have not answered.


class SentSteps:
    def __init__(self) -> None:
        self.newest = 0  # number of the newest step
        self.answered = 0  # number of the newest step that has answered
        self._unanswered: deque[ForwardStep] = deque()

    def __iter__(self) -> Iterator[ForwardStep]:
        """The forward steps that have not answered, in order."""
        return iter(self._unanswered)

    def next_number(self) -> int:
        self.newest += 1
        return self.newest

    def send(self, step: ForwardStep) -> None:
        self._unanswered.append(step)

    def note_answered(self, number: int) -> list[Chunk]:
        """Notes that step `number` and all earlier steps have answered. Returns the chunks of the steps that were
        unanswered until now."""
        self.answered = number
        chunks: list[Chunk] = []
        while self._unanswered and self._unanswered[0].number <= number:
            chunks += self._unanswered.popleft().chunks
        return chunks

    def carry_any_but(self, request_id: int) -> bool:
        """Whether an unanswered step carries a request other than `request_id`, which could also be the cause of a
        loss.
        """
        return any(other != request_id for step in self._unanswered for other in step.request_ids)

    def void(self) -> None:
        """Forgets the unanswered steps, because none of them will answer any more."""
        self._unanswered.clear()
