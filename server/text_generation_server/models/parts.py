"""What the layers of a decoder are built from, and how their norms and constant factors are loaded."""

from dataclasses import dataclass

import torch

from text_generation_server.kernels.interface import AttentionOptions, Kernels
from text_generation_server.layers.norm import HiddenNorm, LayerNorm, RmsNorm
from text_generation_server.models.architecture import AttentionRule, ModelConfig
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
        return self._norm(name, self.config.norm.eps / self.embedding_factor**2, 1.0)

    def post_norm(self, name: str) -> HiddenNorm:
        """A norm of a branch's result."""
        return self._norm(name, self.config.norm.eps, self.branch_factor)

    def _norm(self, name: str, eps: float, factor: float) -> HiddenNorm:
        norm = self.config.norm
        weight = self.loader.whole(f"{name}.weight")
        if norm.plus_one or factor != 1:
            weight = (weight.float() + float(norm.plus_one)) * factor
        if not norm.centred:
            return RmsNorm(self.kernels, weight if norm.plus_one else weight.to(self.loader.dtype), eps)
        bias = self.loader.whole(f"{name}.bias", factor) if norm.bias else None
        return LayerNorm(self.kernels, weight.to(self.loader.dtype), bias, eps)

    def attention_options(self, rule: AttentionRule) -> AttentionOptions:
        heads, slopes = self.split.query_heads, None
        if rule.slopes is not None:
            slopes = torch.tensor(rule.slopes[heads.start : heads.stop], dtype=torch.float32, device=self.device)
        # A window that no sequence of this server outgrows changes nothing.
        outgrown = rule.window is not None and rule.window < self.max_total_tokens
        return AttentionOptions(rule.scale, slopes_H=slopes, window=rule.window if outgrown else None)
