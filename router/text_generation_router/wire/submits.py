"""A Submit as requests of the engine, and back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from text_generation_common.sampling_wire import from_pb, to_pb
from text_generation_proto import engine_pb2 as pb
from text_generation_router.scheduling.request import GenerationRequest, Past
from text_generation_router.scheduling.share import Share
from text_generation_router.wire.arrays import INT32, packed, unpacked
from text_generation_router.wire.checks import check_ids, check_sampling
from text_generation_router.wire.errors import WireError

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
