"""Which part of a model each rank holds, what the layers of a decoder are built from, and how their norms and constant
factors are loaded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_common.errors import ModelError
from text_generation_common.models.architecture import AttentionRule, ModelConfig
from text_generation_common.models.fitting import Heads
from text_generation_server.kernels.interface import AttentionOptions, Kernels
from text_generation_server.layers.norm import HiddenNorm, LayerNorm, NoNorm, RmsNorm
from text_generation_server.models.loading import Loader


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


@dataclass(frozen=True, slots=True)
class Parts:
    """What every layer is built from."""

    config: ModelConfig
    split: Split
    kernels: Kernels
    loader: Loader
    device: torch.device
    max_total_tokens: int

    @property
    def embedding_factor(self) -> float:
        factor = self.config.multipliers.embedding
        return torch.tensor(factor, dtype=self.loader.dtype).item() if self.config.multipliers.rounded else factor

    @property
    def branch_factor(self) -> float:
        """What the result of an attention or an MLP is multiplied by, before it is added to the hidden states."""
        return self.config.multipliers.residual / self.embedding_factor

    @property
    def linear_factor(self) -> float:
        """What the last product of a branch is multiplied by: the branch's factor, if no norm follows."""
        return 1.0 if self.config.post_norms else self.branch_factor

    def norm(self, name: str) -> HiddenNorm:
        """A norm of hidden states."""
        if not name:
            return NoNorm(self.kernels)
        return self._norm(name, self.config.norm.eps / self.embedding_factor**2, 1.0)

    def post_norm(self, name: str) -> HiddenNorm:
        """A norm of a branch's result."""
        return self._norm(name, self.config.norm.eps, self.branch_factor)

    def _norm(self, name: str, eps: float, factor: float) -> HiddenNorm:
        norm = self.config.norm
        weight = self.norm_weight(self.loader.whole(f"{name}.weight"), factor)
        if not norm.centred:
            return RmsNorm(self.kernels, weight, eps)
        bias = self.loader.whole(f"{name}.bias", factor) if norm.bias else None
        return LayerNorm(self.kernels, weight.to(self.loader.dtype), bias, eps)

    def norm_weight(self, stored: Tensor, factor: float = 1.0) -> Tensor:
        """What a norm multiplies by: float32 if its result is rounded after the multiplication only."""
        norm = self.config.norm
        weight = (stored.float() + float(norm.plus_one)) * factor
        return weight if norm.plus_one or norm.rounded_last else weight.to(self.loader.dtype)

    def attention_options(self, rule: AttentionRule, sinks: str = "") -> AttentionOptions:
        """`sinks` is the name of their tensor, if the rule has sinks."""
        heads, slopes = self.split.query_heads, None
        if rule.slopes is not None:
            slopes = torch.tensor(rule.slopes[heads.start : heads.stop], dtype=torch.float32, device=self.device)
        # A window that no sequence of this server outgrows changes nothing.
        outgrown = rule.window is not None and rule.window < self.max_total_tokens
        sinks_H = self.loader.rows(sinks, heads).float() if rule.sinks else None
        return AttentionOptions(rule.scale, rule.softcap, slopes, sinks_H, rule.window if outgrown else None)
