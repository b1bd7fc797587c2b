"""A Submit as requests of the engine, and back."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite

from text_generation_common.sampling import Sampling
from text_generation_common.sampling_wire import from_pb, to_pb
from text_generation_proto import engine_pb2 as pb
from text_generation_router.scheduling.request import GenerationRequest, Past, Share
from text_generation_router.wire.version import INT32, Array, WireError, packed, unpacked

# Checks of a Submit. Fronts send checked values, so a value that fails here comes from another program.

# The most entries of a list of tokens, as in proto/generate.proto, and the most top tokens.
MAX_LISTED, MAX_ENDS, MAX_TOP = 1024, 2048, 1024
MAX_GRAMMAR_BYTES = 2**20


def check_ids(name: str, ids: Array, vocab_size: int) -> None:
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        raise WireError(f"`{name}` has a token outside of the vocabulary of {vocab_size}")


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raises WireError for a value that no checked request has."""
    for field in fields(sampling):
        value = getattr(sampling, field.name)
        if isinstance(value, float) and not isfinite(value):
            raise WireError(f"`{field.name}` is {value}")
    in_range = (
        sampling.temperature > 0
        and 0 < sampling.top_p <= 1
        and 0 <= sampling.min_p <= 1
        and 0 < sampling.typical_p <= 1
        and sampling.repetition_penalty > 0
        and sampling.top_n_tokens <= MAX_TOP
        and len(sampling.grammar) <= MAX_GRAMMAR_BYTES
        and len(sampling.logit_bias) <= MAX_LISTED
        and len(sampling.allowed_token_ids) <= MAX_LISTED
        and sum(map(len, sampling.bad_words_ids)) <= MAX_LISTED
        and all(sampling.bad_words_ids)
        and len(sampling.end_token_ids) <= MAX_ENDS
    )
    if not in_range:
        raise WireError("a sampling parameter is out of its range")
    words = (token for word in sampling.bad_words_ids for token in word)
    biased = [token for token, bias in sampling.logit_bias if isfinite(bias)]
    listed = (*biased, *sampling.allowed_token_ids, *sampling.end_token_ids, *words)
    if len(biased) < len(sampling.logit_bias) or any(token >= vocab_size for token in listed):
        raise WireError("a list of tokens has a token outside of the vocabulary, or a bias is not finite")


# The most sequences of one Submit.
MAX_SEQUENCES = 1024
# The most service that is believed: beyond it a float does not count single tokens.
MAX_SERVED = 2.0**53
# Most bytes of the name of a group of suspects.
MAX_GROUP = 256


@dataclass(frozen=True, slots=True)
class Submitted:
    """One sequence of a Submit."""

    index: int
    request: GenerationRequest
    past: Past
    credits: int | None  # None: any number of tokens
    group: str = ""  # the group of suspects that it belongs to (fleet/suspects.py); empty: it is not a suspect


def submit_of(sequences: Sequence[Submitted]) -> pb.Submit:
    """`sequences` differ in index, seed, output and credits only."""
    request, past = sequences[0].request, sequences[0].past
    submit = pb.Submit(
        input_ids=packed(request.input_ids, INT32),
        max_new_tokens=request.max_new_tokens,
        ignore_eos=request.ignore_eos,
        stop_token_ids=sorted(request.stop_token_ids),
        owner=request.share.owner,
        tenant=request.share.tenant,
        priority=request.priority,
        namespace=request.namespace,
        age_ms=round(past.age_s * 1000),
        prompt_logprobs=request.prompt_logprobs,
        served_elsewhere=past.served_elsewhere,
        has_run=past.has_run,
        adapter=request.adapter,
    )
    if request.timeout_s is not None:
        submit.deadline_ms = min(max(round(request.timeout_s * 1000), 0), 2**63)
    if past.suspicions or past.counts or sequences[0].group:
        submit.losses.suspicions, submit.losses.counts = past.suspicions, past.counts
        submit.losses.group = sequences[0].group
    to_pb(replace(request.sampling, seed=0), submit)
    for one in sequences:
        ids = packed(one.past.output_ids, INT32)
        submit.sequences.add(index=one.index, seed=one.request.sampling.seed, output_ids=ids, credits=one.credits)
    return submit


def submitted(submit: pb.Submit, vocab_size: int) -> list[Submitted]:
    """The sequences of a Submit. Raises WireError if any of its values is none that a front of ours would send."""
    if not 0 < len(submit.sequences) <= MAX_SEQUENCES:
        raise WireError(f"a Submit has {len(submit.sequences)} sequences")
    sampling = from_pb(submit)
    check_sampling(sampling, vocab_size)
    inputs = unpacked("input_ids", submit.input_ids, INT32)
    if not len(inputs):
        raise WireError("a Submit has no `input_ids`")
    check_ids("input_ids", inputs, vocab_size)
    if not 0 <= submit.served_elsewhere <= MAX_SERVED:
        raise WireError(f"`served_elsewhere` is {submit.served_elsewhere}")
    if len(submit.losses.group) > MAX_GROUP:
        raise WireError(f"the name of a group of suspects has {len(submit.losses.group)} characters")
    request = GenerationRequest(
        input_ids=tuple(inputs.tolist()),
        max_new_tokens=submit.max_new_tokens,
        sampling=sampling,
        ignore_eos=submit.ignore_eos,
        share=Share(submit.owner, submit.tenant),
        priority=submit.priority,
        namespace=tuple(submit.namespace),
        timeout_s=submit.deadline_ms / 1000 if submit.HasField("deadline_ms") else None,
        prompt_logprobs=submit.prompt_logprobs if submit.HasField("prompt_logprobs") else None,
        stop_token_ids=frozenset(submit.stop_token_ids),
        adapter=submit.adapter,
    )
    past = Past(
        age_s=submit.age_ms / 1000,
        has_run=submit.has_run,
        suspicions=submit.losses.suspicions,
        counts=submit.losses.counts,
        served_elsewhere=submit.served_elsewhere,
    )
    return [_sequence(one, request, past, submit.losses.group, vocab_size) for one in submit.sequences]


def _sequence(one: pb.Sequence, request: GenerationRequest, past: Past, group: str, vocab_size: int) -> Submitted:
    outputs = unpacked("output_ids", one.output_ids, INT32)
    check_ids("output_ids", outputs, vocab_size)
    if len(outputs) and len(outputs) >= request.max_new_tokens:
        raise WireError(f"a Submit has {len(outputs)} output tokens of {request.max_new_tokens}: nothing is left to do")
    seeded = replace(request, sampling=replace(request.sampling, seed=one.seed))
    credits = one.credits if one.HasField("credits") else None
    return Submitted(one.index, seeded, replace(past, output_ids=tuple(outputs.tolist())), credits, group)
