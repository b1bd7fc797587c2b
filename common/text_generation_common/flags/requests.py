"""Flags that limit what requests may ask for, and flags of the scheduler."""

# ruff: noqa: RUF009  (`flag` returns `dataclasses.field`, which ruff cannot see)

from dataclasses import dataclass
from typing import ClassVar

from text_generation_common.flags.declaration import flag
from text_generation_common.flags.kinds import AdmissionMode, CacheScope, GenerationConfig, Topic

# The default of max_batch_prefill_tokens, for models with a longer context than this.
PREFILL_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFlags:
    TOPIC: ClassVar = Topic.REQUESTS
    validation_workers: int = flag(
        2,
        "Number of threads that tokenize; one more is for long texts that cannot be cut.",
        min=0,
        positive=True,
    )
    max_concurrent_requests: int = flag(
        128,
        "Most requests at a time, of each engine where there are several; further requests get status 429.",
        min=0,
        positive=True,
    )
    max_best_of: int = flag(2, "Largest best_of that a request may ask for.", min=0)
    max_stop_sequences: int = flag(4, "Most stop sequences of one request.", min=0)
    max_top_n_tokens: int = flag(5, "Largest top_n_tokens that a request may ask for.", min=0)
    enable_prefill_logprobs: bool = flag(
        False, "List the prompt's tokens with their log-probabilities for requests with decoder_input_details."
    )
    max_client_batch_size: int = flag(4, "Most inputs that one request may hold.", min=0)
    max_n: int = flag(16, "Largest n that a request to /v1 may ask for.", min=1, positive=True)
    strict_parameters: bool = flag(
        False, "Refuse requests that have unknown fields or name another model; otherwise a header names them."
    )
    keep_agent_lines: bool = flag(
        False,
        "Keep lines in system prompts that agents write anew for every request, such as x-anthropic-billing-header; "
        "otherwise they are left out, a header names them, and the prefix cache finds the prompt's beginning.",
    )
    # This flag is vLLM's, whose default is another; TGI has none like it.
    generation_config: GenerationConfig = flag(
        GenerationConfig.none,
        "model: sampling parameters that a request leaves out are those of generation_config.json. none: they have no"
        " effect.",
    )
    payload_limit: int = flag(2_000_000, "Largest request body, in bytes.", min=0, positive=True)
    disable_grammar_support: bool = flag(
        False, "Refuse requests that set the form of their text: grammar, response_format and the like."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlags:
    """Limits on tokens. A limit that is None is chosen when the shards have warmed up."""

    TOPIC: ClassVar = Topic.SCHEDULING
    max_input_tokens: int | None = flag(
        None, "Longest prompt, in tokens; found at warm-up when not given.", min=0, positive=True
    )
    max_total_tokens: int | None = flag(
        None, "Longest prompt plus answer, in tokens; found at warm-up when not given.", min=0, positive=True
    )
    max_batch_prefill_tokens: int | None = flag(
        None,
        "Most prompt tokens of one step; a longer prompt takes several steps; "
        f"min({PREFILL_TOKENS}, the model's context) when not given.",
        min=0,
        positive=True,
    )
    max_batch_total_tokens: int | None = flag(
        None, "Most tokens in the whole batch; found at warm-up when not given.", min=0, positive=True
    )

    @property
    def prefill_budget(self) -> int:
        return PREFILL_TOKENS if self.max_batch_prefill_tokens is None else self.max_batch_prefill_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingFlags:
    """Flags of the scheduler. New requests join running requests when there are `waiting_served_ratio` waiting requests
    for each running request, or after `max_waiting_tokens` decode steps.
    """

    TOPIC: ClassVar = Topic.SCHEDULING
    waiting_served_ratio: float = flag(
        0.3, "Ratio of waiting to running requests at which prompts join the batch.", min=0
    )
    max_waiting_tokens: int = flag(20, "Decode steps after which waiting prompts join the batch.", min=0)
    max_batch_size: int | None = flag(None, "Most requests in the batch.", min=0, positive=True)
    max_prefill_slowdown: float = flag(
        4.0,
        "Prompts are cut so that a step beside streams takes at most this many times as long as without prompts, or "
        "has only 8 of their tokens; up to 4 times that while streams that a loss has stopped are computed again; 0: "
        "no bound.",
        min=0,
    )
    max_queued_tokens: int | None = flag(
        None,
        "Most prompt tokens that wait; further requests get status 429; 16 times the token slots when not given.",
        min=1,
        positive=True,
    )
    admission: AdmissionMode = flag(
        AdmissionMode.PAST_FUTURE,
        "When a request starts: when all memory that it may ever need is free (reserve), or when the peak of memory "
        "fits if answers grow to max_new_tokens (peak) or to the lengths of recent answers (past-future).",
    )
    # TGI has the environment variable, but not the flag.
    prefix_caching: bool = flag(
        True, "Keep the keys and values of a prompt, for later prompts that begin with the same tokens."
    )
    prefix_cache_scope: CacheScope = flag(
        CacheScope.KEY,
        "Which requests share cached prefixes: requests of one API key (key; all requests without keys), of one "
        "key and one X-Tenant header (tenant), or all requests (all).",
    )
    priority_between_tenants: bool = flag(
        False, "Requests of better priority go first among all tenants; otherwise only among their own tenant's."
    )
