"""Splits a model over ranks: decides which part of it each rank holds."""

from dataclasses import dataclass

from text_generation_common.errors import ModelError
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.fitting import Heads


@dataclass(frozen=True, slots=True)
class Split:
    query_heads: range
    kv_heads: range  # other ranks hold the same head if there are more ranks than key and value heads
    intermediate: range  # columns of gate and up, and rows of down
    expert_intermediate: range  # numbers between the products of each expert
    shared_intermediate: range  # the same of the MLP beside the experts
    vocabulary: range  # token ids; fewer, or none, on the last ranks
    vocabulary_part: int  # number of ids to which every rank's part is padded


def split_model(config: ModelConfig, rank: int, size: int, vocabulary_part: int) -> Split:
    """The part of `rank`. `vocabulary_part` is the number of ids of each rank, padding of the last ranks included.

    ModelError if heads cannot be divided evenly: in every step all ranks would wait for the rank with most heads.
    """
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if reason := Heads(heads, kv_heads).refusal(size):
        raise ModelError(reason)
    first_id, end_id = (min(r * vocabulary_part, config.vocab_size) for r in (rank, rank + 1))
    return Split(
        query_heads=_share(heads, rank, size),
        kv_heads=_share(kv_heads, rank, size) if size <= kv_heads else _shared_head(kv_heads, rank, size),
        intermediate=_share(config.intermediate_size, rank, size),
        expert_intermediate=_share(config.moe.intermediate_size if config.moe else 0, rank, size),
        shared_intermediate=_share(config.moe.shared_size if config.moe else 0, rank, size),
        vocabulary=range(first_id, end_id),
        vocabulary_part=vocabulary_part,
    )


def _share(count: int, rank: int, size: int) -> range:
    return range(count * rank // size, count * (rank + 1) // size)


def _shared_head(kv_heads: int, rank: int, size: int) -> range:
    """The key and value head of this rank's queries, which `size / kv_heads` neighbouring ranks share."""
    head = rank * kv_heads // size
    return range(head, head + 1)
