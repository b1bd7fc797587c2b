"""What an engine tells of its model and limits, as the router's `Snapshot`."""

from text_generation_proto import engine_pb2 as pb
from text_generation_router.engine.protocol import JoiningRules, ModelInfo, Snapshot, TokenLimits
from text_generation_router.wire.version import WireError


def facts_of(snapshot: Snapshot) -> pb.Facts:
    model, limits, joining = snapshot.model, snapshot.limits, snapshot.joining
    return pb.Facts(
        epoch=model.epoch,
        dtype=model.dtype,
        device_type=model.device_type,
        vocab_size=model.vocab_size,
        max_positions=model.max_positions,
        eos_token_ids=model.eos_token_ids,
        kernels=model.kernels,
        world_size=model.world_size,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        max_batch_total_tokens=limits.max_batch_total_tokens,
        grammar_refusal=model.grammar_refusal,
        waiting_served_ratio=joining.waiting_served_ratio,
        max_waiting_tokens=joining.max_waiting_tokens,
        max_batch_size=joining.max_batch_size or 0,
    )


def snapshot_of(facts: pb.Facts) -> Snapshot:
    """Raises WireError if no request could ever fit."""
    if not (facts.vocab_size and facts.max_total_tokens and facts.max_batch_total_tokens):
        raise WireError("an engine tells of a model without vocabulary or token slots")
    model = ModelInfo(
        dtype=facts.dtype,
        device_type=facts.device_type,
        vocab_size=facts.vocab_size,
        max_positions=facts.max_positions,
        eos_token_ids=tuple(facts.eos_token_ids),
        kernels=facts.kernels,
        world_size=facts.world_size,
        epoch=facts.epoch,
        grammar_refusal=facts.grammar_refusal,
    )
    limits = TokenLimits(facts.max_input_tokens, facts.max_total_tokens, facts.max_batch_total_tokens)
    joining = JoiningRules(facts.waiting_served_ratio, facts.max_waiting_tokens, facts.max_batch_size or None)
    return Snapshot(model, limits, joining)
