"""What the scheduler decides, as values. The engine turns each into one call to the shards, in order of `number`."""

from dataclasses import dataclass

from text_generation_router.scheduling.request import Sampling
from text_generation_router.scheduling.slots import Slots

# All requests of an engine step together, so one batch is enough.
BATCH_ID = 1


@dataclass(frozen=True, slots=True)
class FirstChunk:
    """What a shard learns once about a request."""

    ids: tuple[int, ...]  # the whole history: prompt, then output if it is resumed
    slots: Slots  # of every position of the history
    prompt_length: int
    sampling: Sampling
    greedy: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions start … end - 1 of a request's history; a `last` chunk gets a token."""

    request_id: int
    start: int
    end: int
    last: bool
    first: FirstChunk | None


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """One token for each of `decode_ids`, whose input tokens go into `decode_slots`, fused with chunks of prompts."""

    number: int
    decode_ids: tuple[int, ...]
    decode_slots: Slots
    chunks: tuple[Chunk, ...]
    joined: int = 0  # requests that begin with this step
    concat_reason: str | None = None  # why they joined running ones, in TGI's words

    @property
    def method(self) -> str:
        return "prefill" if self.chunks else "decode"

    @property
    def request_ids(self) -> tuple[int, ...]:
        return (*self.decode_ids, *(chunk.request_id for chunk in self.chunks))


@dataclass(frozen=True, slots=True)
class FilterStep:
    """The rows of all others leave the shards. None to keep: the batch goes."""

    number: int
    keep: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClearStep:
    """All rows go."""

    number: int


Step = ForwardStep | FilterStep | ClearStep
