"""Requests to the engine in token ids: the owner and tenant that are charged, the limits, and the reasons of an end."""

# ruff: noqa: RUF009  (a frozen dataclass is a constant)

from dataclasses import dataclass, field
from enum import StrEnum

from text_generation_common.flags.requests import SchedulingFlags
from text_generation_common.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Share:
    """Owner and tenant of a request. Shares of the server are equal first between owners, then between the tenants of
    one owner. Must not be logged: both fields may be a person's name or address.
    """

    owner: str = ""  # name of the client's API key, or its peer address
    tenant: str = ""  # value of the `X-Tenant` header


@dataclass(frozen=True, slots=True)
class Limits:
    capacity: int  # number of token slots
    max_rows: int  # most requests that may hold a row in the shards
    max_batch_prefill_tokens: int
    policy: SchedulingFlags = SchedulingFlags()

    @property
    def max_running(self) -> int:
        return min(self.max_rows, self.policy.max_batch_size or self.max_rows)


Namespace = tuple[str, ...]
# Sort key of requests by age: when a request arrived at its front, in seconds of the engine's clock, and its id.
Arrival = tuple[float, int]


class EndReason(StrEnum):
    """Why a request has ended. The scheduler itself finds only the first three reasons."""

    LENGTH = "length"  # `max_new_tokens` are made; of 0 tokens, the prompt is computed
    EOS_TOKEN = "eos_token"
    COMPLETE = "complete"  # the request's grammar is complete with the last token, which belongs to the text
    STOPPED = "stopped"  # the request's front found a stop string
    CANCELLED = "cancelled"  # the request's front needs no more tokens
    DEADLINE = "deadline"  # the request's time ran out
    FAILED = "failed"
    CLOSED = "closed"  # the engine was closed
    WITHDRAWN = "withdrawn"  # the request's front took it back before its first step, for another engine


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request that has been validated and tokenized. `len(input_ids) + max_new_tokens` fits the server's limits. With
    `max_new_tokens` 0 the prompt is computed, and the request ends without a token."""

    input_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    ignore_eos: bool = False
    share: Share = field(default_factory=Share)  # the owner and tenant to which the work is charged
    priority: int = 0  # lower goes first, as in vLLM
    namespace: Namespace = ()  # prompts of different namespaces share no cached prefix
    timeout_s: float | None = None  # seconds from submission until the engine ends the request
    # Number of most likely tokens that are listed with the log-probability of each token of the prompt. None: no
    # log-probabilities of the prompt are wanted.
    prompt_logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()  # end the text as the model's end tokens do, even with `ignore_eos`
    # The digest of the LoRA adapter that changes the model; "": none. It is part of the namespace, too.
    adapter: str = ""
    adapter_name: str = ""  # by which the client has asked for it; its front alone knows the name


@dataclass(frozen=True, slots=True)
class Past:
    """What happened to a request before this engine got it. The default is that of a new request."""

    output_ids: tuple[int, ...] = ()  # tokens that other engines have made
    age_s: float = 0.0  # seconds since the request arrived at its front
    has_run: bool = False  # whether it has had a row on any engine
    suspicions: int = 0  # see `Blame`
    counts: int = 0  # see `Blame`
    # Tokens that other engines have served to its tenant, as `Account.total` counts them.
    served_elsewhere: float = 0.0


NEW = Past()
