"""What the layers of a decoder are built from, and how their norms and constant factors are loaded."""

from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_common.models.architecture import AttentionRule, ModelConfig
from text_generation_server.kernels.interface import AttentionOptions, Kernels
from text_generation_server.layers.norm import HiddenNorm, LayerNorm, NoNorm, RmsNorm
from text_generation_server.models.loading import Loader
from text_generation_server.models.split import Split


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
