"""Llama: embed → blocks of attention and a gated MLP → norm → logits, on flat batches of tokens.

Legend: T tokens of a step, H hidden size. One fused product gives the queries, keys and values of a token, and another
gives gate and up. Each rank of a group computes its own heads and its own part of the MLP; the results of attention and
MLP are summed over the ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from text_generation_server.distributed import Group
from text_generation_server.kernels.interface import Kernels, KvLayer
from text_generation_server.layers.rotary import inverse_frequencies, rotary_tables
from text_generation_server.layers.vocabulary import Embedding, Head, pad_rows
from text_generation_server.models.config import ModelConfig
from text_generation_server.models.loading import Loader
from text_generation_server.models.split import Split, split_model
from text_generation_server.models.tensors import HEAD
from text_generation_server.step.inputs import StepInput


class LlamaAttention:
    def __init__(self, config: ModelConfig, split: Split, kernels: Kernels, loader: Loader, prefix: str) -> None:
        self._kernels = kernels
        self._heads = (len(split.query_heads), len(split.kv_heads))
        self._scale = config.head_size**-0.5
        queries, keys = _features(split.query_heads, config.head_size), _features(split.kv_heads, config.head_size)
        parts = {f"{prefix}.q_proj": queries, f"{prefix}.k_proj": keys, f"{prefix}.v_proj": keys}
        self._qkv = loader.fused(kernels, parts, config.attention_bias)
        self._o = loader.row_split(kernels, f"{prefix}.o_proj", queries, config.attention_bias)

    def __call__(self, x_TH: Tensor, step: StepInput, rotary: tuple[Tensor, Tensor], kv: KvLayer) -> Tensor:
        kernels = self._kernels
        q_THD = kernels.rope_and_store_kv(self._qkv(x_TH), self._heads, rotary, step.positions_T, kv, step.slots_T)
        if step.segments is None:
            out = kernels.attend_decode(q_THD, kv, step.table, step.rows_R, step.lengths_R, self._scale)
        else:
            out = kernels.attend_prefill(q_THD, kv, step.table, step.segments, self._scale)
        return self._o(out.flatten(1))


class LlamaMLP:
    def __init__(self, config: ModelConfig, split: Split, kernels: Kernels, loader: Loader, prefix: str) -> None:
        part = split.intermediate
        parts = {f"{prefix}.gate_proj": part, f"{prefix}.up_proj": part}
        self._gated = loader.fused(kernels, parts, config.mlp_bias, gated=True)
        self._down = loader.row_split(kernels, f"{prefix}.down_proj", part, config.mlp_bias)

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self._down(self._gated(x_TH))


class LlamaBlock:
    def __init__(self, config: ModelConfig, split: Split, kernels: Kernels, loader: Loader, prefix: str) -> None:
        self.attention = LlamaAttention(config, split, kernels, loader, f"{prefix}.self_attn")
        self.mlp = LlamaMLP(config, split, kernels, loader, f"{prefix}.mlp")
        self.attention_norm = loader.whole(f"{prefix}.input_layernorm.weight")
        self.mlp_norm = loader.whole(f"{prefix}.post_attention_layernorm.weight")


class Llama:
    """Weights and forward pass. Keeps no state between steps: `forward` writes keys and values into the KV cache."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        loader: Loader,
        group: Group,
        device: torch.device,
        max_total_tokens: int,
    ) -> None:
        split = split_model(config, group.rank, group.size)

        def vocabulary_part(name: str) -> Tensor:
            return pad_rows(loader.rows(name, split.vocabulary), split.vocabulary_part)

        self.num_kv_heads = len(split.kv_heads)  # of this rank
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        embedding = vocabulary_part("model.embed_tokens.weight")
        self._embed = Embedding(embedding, split.vocabulary, kernels, group)
        layers = range(config.num_layers)
        self._blocks = [LlamaBlock(config, split, kernels, loader, f"model.layers.{i}") for i in layers]
        self._norm = loader.whole("model.norm.weight")
        head = embedding
        if not config.tie_word_embeddings or loader.has(HEAD):
            head = vocabulary_part(HEAD)
            # As in transformers, a head in the files is used even if config.json says that it is tied to the embedding.
            if config.tie_word_embeddings and torch.equal(head, embedding):
                head = embedding
        self._head = Head(head, config.vocab_size, kernels, group)
        frequencies = inverse_frequencies(
            config.head_size, config.rope_theta, config.rope_scaling, config.rope_base_positions, max_total_tokens
        )
        self._rotary = rotary_tables(frequencies, max_total_tokens, device)

    def forward(self, step: StepInput, kv_cache: list[KvLayer], on_layer: Callable[[], None]) -> Tensor:
        """Returns hidden states [T, H] after the last norm. Writes keys and values into kv_cache, one per layer.

        `on_layer` is called after each block, as a sign of life.
        """
        residual = self._embed(step.ids_T)
        x = self._kernels.rms_norm(residual, self._blocks[0].attention_norm, self._eps)
        next_norms = [*(block.attention_norm for block in self._blocks[1:]), self._norm]
        for block, next_norm, kv in zip(self._blocks, next_norms, kv_cache, strict=True):
            x = block.attention(x, step, self._rotary, kv)
            x, residual = self._kernels.add_rms_norm(x, residual, block.mlp_norm, self._eps)
            x = block.mlp(x)
            x, residual = self._kernels.add_rms_norm(x, residual, next_norm, self._eps)
            on_layer()
        return x

    def logits(self, hidden_TH: Tensor) -> Tensor | None:
        """The logits [T, V] on rank 0, None on other ranks."""
        return self._head(hidden_TH)


def _features(heads: range, head_size: int) -> range:
    return range(heads.start * head_size, heads.stop * head_size)
