"""The interface between fronts and engines: token ids go in, token ids come out.

A front knows HTTP, templates, texts and stop strings. An engine knows the queue, token slots and shards. For each
request the front gives the engine a sink, an object that receives the request's tokens. Requests that are submitted
together end in one RefusedError for all of them, or in exactly one Ended for each.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from text_generation_common.flags.requests import SchedulingFlags
from text_generation_router.scheduling.adapter_slots import NO_ADAPTERS, AdapterRoom
from text_generation_router.scheduling.costs import SINGLE_QUERIES, QueryBlocks
from text_generation_router.scheduling.prompt_logprobs import PromptLogprobs
from text_generation_router.scheduling.request import EndReason, GenerationRequest


@dataclass(frozen=True, slots=True)
class ModelInfo:
    dtype: str  # "torch.bfloat16"
    device_type: str
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    kernels: str
    world_size: int
    epoch: int
    query_blocks: QueryBlocks = SINGLE_QUERIES
    grammar_refusal: str = ""  # why every grammar is refused, for the client; "": grammars are served
    adapters: frozenset[str] = frozenset()  # digests of the LoRA adapters that can be asked for
    adapter_room: AdapterRoom = NO_ADAPTERS


@dataclass(frozen=True, slots=True)
class TokenLimits:
    max_input_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int


@dataclass(frozen=True, slots=True)
class JoiningRules:
    """When waiting requests join running ones, as `/info` tells it: see `SchedulingFlags`."""

    waiting_served_ratio: float
    max_waiting_tokens: int
    max_batch_size: int | None

    @classmethod
    def of(cls, flags: SchedulingFlags) -> "JoiningRules":
        return cls(flags.waiting_served_ratio, flags.max_waiting_tokens, flags.max_batch_size)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Facts about the shards of the newest epoch: the model they run, the limits that their memory sets, and how the
    engine fills them."""

    model: ModelInfo
    limits: TokenLimits
    joining: JoiningRules


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is."""

    retry_after_s: int  # forecast in seconds: when a request that is refused now would have started
    wait_s: float = 0.0  # forecast: when a request that arrives now would start
    is_ready: bool = True  # shards are there
    is_draining: bool = False
    free_slots: int = 0
    running: int = 0  # number of requests with a row
    waiting: int = 0  # number of requests in the queue
    waiting_tokens: int = 0  # prompt and output tokens in the queue
    computing_tokens: int = 0  # prompt tokens of running requests that are still to be computed


@dataclass(frozen=True, slots=True)
class FirstStep:
    """What the engine knows about a request once its first step was sent."""

    queue_s: float  # seconds from `submit` to the first step
    # Number of tokens of the prompt, and of the output that came with the request, that the prefix cache had.
    cached_tokens: int
    # Log-probabilities of the prompt's tokens from the second on, if the request asked for them.
    prompt_logprobs: PromptLogprobs | None = None


TopToken = tuple[int, float]  # token id, log-probability


class Tokens(NamedTuple):
    """The tokens that one step made for a request. A request with `max_new_tokens` 0 gets one `Tokens` without ids at
    its end. A named tuple, because one is made per token and step, and a frozen dataclass takes three times as long to
    make."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: tuple[tuple[TopToken, ...], ...]  # the most likely tokens for each id; () if the request asked for none
    inference_s: float  # seconds from the request's first step until `ids` were made
    first: FirstStep | None  # None after the request's first tokens


@dataclass(frozen=True, slots=True)
class Ended:
    """Why a request has ended."""

    reason: EndReason
    inference_s: float = 0.0  # seconds from the request's first step to its end; 0 if it never joined a step
    cause: str = ""  # why the request failed: a text for the client
    queue_s: float | None = None  # seconds from `submit` to the first step; None: it never joined a step
    # For each loss of the shards that met the running request: seconds from its first step to the loss, and to the step
    # with which it was sent to shards again.
    replays: tuple[tuple[float, float], ...] = ()
    suspicions: int = 0  # losses that count against the request, as in `Blame`
    counts: int = 0


class Sink(Protocol):
    """The receiver of one request's tokens, on the side of the front. The engine calls it in the loop that drives the
    shards, so both methods return at once and raise nothing. They may call the engine's `end`, `cancel` and `credit`.
    An exception from `take` fails this request only: `ended` is called, with FAILED.
    """

    def take(self, tokens: Tokens, ended: Ended | None) -> None:
        """Receives the tokens of one step. If `ended` is given, they are the request's last tokens."""

    def ended(self, ended: Ended) -> None:
        """The request ends without more tokens. The engine calls it before `end` or `cancel` returns."""


class Submission(NamedTuple):
    """Requests that were given to an engine together."""

    indexes: Sequence[int]  # one for each request
    # None: the engine has accepted the requests. Otherwise its result comes once they are accepted, or have ended
    # before that; RefusedError: the engine takes none of them.
    answer: asyncio.Future[None] | None = None


class EpochWatcher(Protocol):
    """Is told when the shards are lost, and when others are ready."""

    def lost(self, reason: str, aboard: Collection[int]) -> None:
        """`aboard`: indexes of the requests whose unanswered steps were with the shards, some of which have ended."""

    def ready(self, snapshot: Snapshot) -> None: ...


class Engine(Protocol):
    """The interface of an engine. Requests are named by the indexes that `submit_all` returned. Calls for a request
    that has ended have no effect.
    """

    def submit_all(self, requests: Sequence[GenerationRequest], sinks: Sequence[Sink], credits: int) -> Submission:
        """Queues the requests of one prompt, which differ in their seeds only: all or none. Each sink is called later,
        never within `submit_all`. `credits`: see `credit`; each request has as many. RefusedError: the engine does not
        take the requests, or `Submission.answer` says so later."""
        ...

    def end(self, index: int, num_tokens: int) -> None:
        """Ends a request that is complete with its first `num_tokens` output tokens, because its text has reached a
        stop string. If called within `Sink.take`, the request ends before the next step is decided.
        """

    def cancel(self, index: int) -> None:
        """Ends the request, because its front needs no more tokens."""

    def credit(self, index: int, tokens: int) -> None:
        """Allows the sink `tokens` more output and top tokens. A request whose credits are used up pauses."""

    def has_begun(self, index: int) -> bool:
        """Whether the request runs, or has run before a preemption or a loss of the shards."""
        ...

    def snapshot(self) -> Snapshot: ...

    def load(self) -> Load:
        """Walks over the running requests: to be called a few times a second."""
        ...

    async def is_healthy(self) -> bool:
        """Asks the shards whether they work. False if a shard does not answer in time, or if no shards are
        connected.
        """
        ...


# The folders of adapters, by their digests.
NO_FOLDERS: Mapping[str, str] = MappingProxyType({})


# How the reasons of `AdapterEngine.load_adapter` begin that may soon be over.
NOT_READY, NOT_CONNECTED, NO_ANSWER = "the shards are not ready", "it is not connected", "it did not answer"
TEMPORARY = (NOT_READY, NOT_CONNECTED, NO_ANSWER)


class AdapterEngine(Protocol):
    """What an engine does for LoRA adapters that come while it runs."""

    async def learn_adapters(self, folders: Mapping[str, str]) -> None:
        """Tells of all adapters that are served, by their digests, and of those that are loaded again, last."""

    async def load_adapter(self, digest: str, folder: str) -> Mapping[str, str]:
        """Has the shards read an adapter. Returns why it cannot be served, by the names of engines."""
        ...

    async def num_with_adapter(self, digest: str) -> int:
        """Number of requests of an adapter that have not ended. An engine that does not answer may have one."""
        ...


class EngineStanding(StrEnum):
    READY = "ready"
    LOST = "lost"  # the engine has no shards
    DRAINING = "draining"
    AWAY = "away"  # the engine is not connected


@dataclass(frozen=True, slots=True)
class EngineNote:
    """An engine as its front knows it without asking."""

    name: str
    standing: EngineStanding
    running: int = 0
    waiting: int = 0
    loss: str = ""  # why the connection to it was lost last
    loss_s: float | None = None  # seconds since then


@dataclass(frozen=True, slots=True)
class StateNews:
    """The newest state of an engine: the JSON of a view's `EngineSnapshot`, or why there is none."""

    state: bytes = b""
    problem: str = ""


StateWatcher = Callable[[StateNews], None]
# Maximum number of bytes of states that a viewer is sent in a second, so a large state is made less often too.
STATE_BYTES_PER_S = 16 * 2**10


@runtime_checkable
class Watchable(Protocol):
    """What an Engine may offer besides: its state, for people."""

    @property
    def front_id(self) -> str:
        """This front's name among those of an engine; empty if front and engine are one process."""
        ...

    def engines(self) -> Sequence[EngineNote]: ...

    def watch_state(self, name: str, watcher: StateWatcher | None) -> None:
        """From now on `watcher`, and no other one, gets the states of the engine `name` a few times a second. None: no
        state is computed any more."""


class EngineRun(Engine, Protocol):
    """An engine from its start to its end.

    `failed` is done once the engine can generate nothing more for any request.
    """

    failed: asyncio.Future[None]

    async def start(self) -> None:
        """Waits until the engine takes requests and has a snapshot. Raises ShardsError if it never will."""

    async def close(self) -> None:
        """Stops at once: every request ends with CLOSED. May be called more than once."""
