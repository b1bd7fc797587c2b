"""The decoder that all families share: embed → blocks of attention and MLP → norm → logits, on flat batches of
tokens. What differs between families is a value of `ModelConfig`; no family's name occurs here.

Legend: T tokens of a step, H hidden size. One fused product gives the queries, keys and values of a token, and another
gives gate and up. Each rank of a group computes its own heads and its own part of the MLP; the results of attention and
MLP are summed over the ranks.

Constant factors cost nothing while serving: hidden states are kept divided by `multipliers.embedding`. A norm of them
is the same if its epsilon is divided by the square. The weights of the layers that add to them are multiplied by the
factors when they are loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_server.errors import ModelError
from text_generation_server.kernels.interface import Activation, HeadNorms, Kernels, KvLayer
from text_generation_server.layers.norm import HiddenNorm, LayerNorm, RmsNorm
from text_generation_server.layers.rotary import kernel_order, rotary_tables
from text_generation_server.layers.vocabulary import Embedding, Head, pad_rows
from text_generation_server.models.architecture import AttentionRule, Branches, ModelConfig
from text_generation_server.models.kv_cache import KvShape, bytes_per_slot, make_kv_cache
from text_generation_server.models.loading import Loader, stacked
from text_generation_server.models.names import LayerNames
from text_generation_server.models.qkv import features, qkv_parts
from text_generation_server.models.split import Split, split_model
from text_generation_server.platforms import Platform
from text_generation_server.step.inputs import StepInput


@dataclass(frozen=True, slots=True)
class Parts:
    """What every layer is built from."""

    config: ModelConfig
    split: Split
    kernels: Kernels
    loader: Loader

    @property
    def branch_factor(self) -> float:
        """What the result of an attention or an MLP is multiplied by, before it is added to the hidden states."""
        return self.config.multipliers.residual / self.config.multipliers.embedding

    def norm(self, name: str) -> HiddenNorm:
        norm = self.config.norm
        eps = norm.eps / self.config.multipliers.embedding**2
        weight = self.loader.whole(f"{name}.weight")
        if not norm.centred:
            return RmsNorm(self.kernels, weight, eps)
        bias = self.loader.whole(f"{name}.bias") if norm.bias else None
        return LayerNorm(self.kernels, weight, bias, eps)


class Attention:
    def __init__(self, parts: Parts, rule: AttentionRule, names: LayerNames) -> None:
        config, split, loader = parts.config, parts.split, parts.loader
        self._kernels = parts.kernels
        self._heads = (len(split.query_heads), len(split.kv_heads))
        self._scale = rule.scale
        self._qkv = loader.fused(qkv_parts(config, rule.rope, split, names), config.biases.qkv)
        queries = features(split.query_heads, config.head_size)
        has_bias = config.biases.attention_output
        self._o = loader.row_split(names.attention_output, queries, has_bias, parts.branch_factor)
        self._norms: HeadNorms | None = None
        if config.query_key_norm:
            order = kernel_order(rule.rope, config.head_size) or slice(None)
            query, key = (loader.whole(f"{name}.weight")[order] for name in (names.query_norm, names.key_norm))
            self._norms = HeadNorms(query, key, config.norm.eps)

    def __call__(self, x_TH: Tensor, step: StepInput, rotary: tuple[Tensor, Tensor], kv: KvLayer) -> Tensor:
        kernels, qkv = self._kernels, self._qkv(x_TH)
        q_THD = kernels.rope_and_store_kv(qkv, self._heads, rotary, step.positions_T, kv, step.slots_T, self._norms)
        out = kernels.attend(q_THD, kv, step.table, step.rows_R, step.lengths_R, step.segments, self._scale)
        return self._o(out.flatten(1))


class MLP:
    def __init__(self, parts: Parts, names: LayerNames) -> None:
        config, part, size = parts.config, parts.split.intermediate, parts.config.intermediate_size
        self._kernels = parts.kernels
        self._activation, self._gated = config.activation, config.gated
        # The gate of silu is part of the product; other activations are a kernel of their own.
        self._in_product = config.gated and config.activation is Activation.silu
        gate = [(names.gate, size, part)] if config.gated else []
        wanted = stacked(*gate, (names.up, size, part))
        self._up = parts.loader.fused(wanted, config.biases.mlp, gated=self._in_product)
        self._down = parts.loader.row_split(names.down, part, config.biases.mlp, parts.branch_factor)

    def __call__(self, x_TH: Tensor) -> Tensor:
        x = self._up(x_TH)
        return self._down(x if self._in_product else self._kernels.activate(x, self._activation, self._gated))


class Block:
    """A layer. Takes and returns (norm(hidden states), hidden states), so that an addition and the norm after it are
    one kernel."""

    def __init__(self, parts: Parts, rule: AttentionRule, names: LayerNames) -> None:
        self._kernels = parts.kernels
        self._branches = parts.config.branches
        self._attention = Attention(parts, rule, names)
        self._mlp = MLP(parts, names)
        self.attention_norm = parts.norm(names.attention_norm)
        self._mlp_norm = self.attention_norm
        if self._branches is not Branches.parallel:
            self._mlp_norm = parts.norm(names.mlp_norm)

    def __call__(
        self, x: Tensor, residual: Tensor, step: StepInput, rotary: tuple[Tensor, Tensor], kv: KvLayer,
        next_norm: HiddenNorm,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        attended = self._attention(x, step, rotary, kv)
        if self._branches is Branches.sequential:
            x, residual = self._mlp_norm.of_sum(attended, residual)
            return next_norm.of_sum(self._mlp(x), residual)
        other = self._mlp(self._mlp_norm(residual) if self._branches is Branches.parallel_two_norms else x)
        return next_norm.of_sum(self._kernels.add(attended, other), residual)


class Decoder:
    """A `Model` whose layers keep keys and values, and nothing for a row."""

    bytes_per_row = 0

    def __init__(self, config: ModelConfig, platform: Platform, loader: Loader, max_total_tokens: int) -> None:
        kernels, group, names = platform.kernels, platform.group, config.names
        _check_windows(config, max_total_tokens)
        split = split_model(config, group.rank, group.size)

        def vocabulary_part(name: str) -> Tensor:
            return pad_rows(loader.rows(name, split.vocabulary), split.vocabulary_part)

        parts = Parts(config, split, kernels, loader)
        self.vocab_size = config.vocab_size
        self.dtype = loader.dtype
        self.max_total_tokens = max_total_tokens
        self._device = platform.device
        self._kernels = kernels
        self._kv_shapes = [KvShape(2 * len(split.kv_heads), config.head_size)] * config.num_layers
        embedding = vocabulary_part(f"{names.embedding}.weight")
        self._embed = Embedding(embedding, split.vocabulary, kernels, group)
        self._positions = loader.whole(f"{names.positions}.weight") if config.learned_positions else None
        self._blocks = [Block(parts, rule, names.layer(i)) for i, rule in enumerate(config.rules)]
        self._norm = parts.norm(names.norm)
        head = embedding
        if not config.tie_word_embeddings or loader.has(f"{names.head}.weight"):
            head = vocabulary_part(f"{names.head}.weight")
            # As in transformers, a head in the files is used even if config.json says that it is tied to the embedding.
            if config.tie_word_embeddings and torch.equal(head, embedding):
                head = embedding
        head_bias = vocabulary_part(f"{names.head}.bias") if config.biases.head else None
        self._head = Head(head, head_bias, config.vocab_size, kernels, group, config.multipliers.logits)
        tables = {
            rope: rotary_tables(rope, config.head_size, max_total_tokens, platform.device)
            for rope in dict.fromkeys(rule.rope for rule in config.rules)
        }
        self._rotary = [tables[rule.rope] for rule in config.rules]

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        return bytes_per_slot(self._kv_shapes, dtype)

    def make_cache(self, slots: int, rows: int, dtype: torch.dtype, on_layer: Callable[[], None]) -> list[KvLayer]:
        return make_kv_cache(self._kv_shapes, slots, dtype, self._device, on_layer)

    def forward(self, step: StepInput, cache: list[KvLayer], on_layer: Callable[[], None]) -> Tensor:
        residual = self._embed(step.ids_T)
        if self._positions is not None:
            residual = self._kernels.add(residual, self._kernels.embed(step.positions_T, self._positions))
        x = self._blocks[0].attention_norm(residual)
        next_norms = [*(block.attention_norm for block in self._blocks[1:]), self._norm]
        for block, next_norm, rotary, kv in zip(self._blocks, next_norms, self._rotary, cache, strict=True):
            x, residual = block(x, residual, step, rotary, kv, next_norm)
            on_layer()
        return x

    def logits(self, hidden_TH: Tensor) -> Tensor | None:
        return self._head(hidden_TH)


def _check_windows(config: ModelConfig, max_total_tokens: int) -> None:
    """ModelError if a layer has a window that a sequence of this server could outgrow."""
    windows = [rule.window for rule in config.rules if rule.window is not None]
    if windows and min(windows) < max_total_tokens:
        raise ModelError(
            f"layers of this {config.model_type} see the last {min(windows)} tokens only, which is not supported yet in"
            f" longer sequences: choose --max-total-tokens {min(windows)} or less"
        )
