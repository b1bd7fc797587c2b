"""Llama: embed → blocks of attention and a gated MLP → norm → logits, on flat batches of tokens.

Legend: T tokens of a step, H hidden size. One fused product gives the queries, keys and values of a token, and another
gives gate and up. Each rank of a group computes its own heads and its own part of the MLP; the results of attention and
MLP are summed over the ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from text_generation_server.kernels.interface import Kernels, KvLayer
from text_generation_server.layers.rotary import inverse_frequencies, rotary_tables
from text_generation_server.layers.vocabulary import Embedding, Head, pad_rows
from text_generation_server.models.architecture import ModelConfig
from text_generation_server.models.kv_cache import KvShape, bytes_per_slot, make_kv_cache
from text_generation_server.models.loading import Loader
from text_generation_server.models.names import LayerNames
from text_generation_server.models.split import Split, split_model
from text_generation_server.platforms import Platform
from text_generation_server.step.inputs import StepInput


class LlamaAttention:
    def __init__(self, config: ModelConfig, split: Split, kernels: Kernels, loader: Loader, names: LayerNames) -> None:
        self._kernels = kernels
        self._heads = (len(split.query_heads), len(split.kv_heads))
        self._scale = config.head_size**-0.5
        queries, keys = _features(split.query_heads, config.head_size), _features(split.kv_heads, config.head_size)
        parts = {names.queries: queries, names.keys: keys, names.values: keys}
        self._qkv = loader.fused(parts, config.attention_bias)
        self._o = loader.row_split(names.attention_output, queries, config.attention_bias)

    def __call__(self, x_TH: Tensor, step: StepInput, rotary: tuple[Tensor, Tensor], kv: KvLayer) -> Tensor:
        kernels = self._kernels
        q_THD = kernels.rope_and_store_kv(self._qkv(x_TH), self._heads, rotary, step.positions_T, kv, step.slots_T)
        if step.segments is None:
            out = kernels.attend_decode(q_THD, kv, step.table, step.rows_R, step.lengths_R, self._scale)
        else:
            out = kernels.attend_prefill(q_THD, kv, step.table, step.segments, self._scale)
        return self._o(out.flatten(1))


class LlamaMLP:
    def __init__(self, config: ModelConfig, split: Split, loader: Loader, names: LayerNames) -> None:
        part = split.intermediate
        self._gated = loader.fused({names.gate: part, names.up: part}, config.mlp_bias, gated=True)
        self._down = loader.row_split(names.down, part, config.mlp_bias)

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self._down(self._gated(x_TH))


class LlamaBlock:
    def __init__(self, config: ModelConfig, split: Split, kernels: Kernels, loader: Loader, names: LayerNames) -> None:
        self.attention = LlamaAttention(config, split, kernels, loader, names)
        self.mlp = LlamaMLP(config, split, loader, names)
        self.attention_norm = loader.whole(f"{names.attention_norm}.weight")
        self.mlp_norm = loader.whole(f"{names.mlp_norm}.weight")


class Llama:
    """A `Model` whose layers keep keys and values of tokens, and no state of rows."""

    bytes_per_row = 0

    def __init__(self, config: ModelConfig, platform: Platform, loader: Loader, max_total_tokens: int) -> None:
        kernels, group, names = platform.kernels, platform.group, config.names
        split = split_model(config, group.rank, group.size)

        def vocabulary_part(name: str) -> Tensor:
            return pad_rows(loader.rows(name, split.vocabulary), split.vocabulary_part)

        self.vocab_size = config.vocab_size
        self.dtype = loader.dtype
        self.max_total_tokens = max_total_tokens
        self._device = platform.device
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        self._kv_shapes = [KvShape(2 * len(split.kv_heads), config.head_size)] * config.num_layers
        embedding = vocabulary_part(f"{names.embedding}.weight")
        self._embed = Embedding(embedding, split.vocabulary, kernels, group)
        layers = range(config.num_layers)
        self._blocks = [LlamaBlock(config, split, kernels, loader, names.layer(i)) for i in layers]
        self._norm = loader.whole(f"{names.norm}.weight")
        head = embedding
        if not config.tie_word_embeddings or loader.has(f"{names.head}.weight"):
            head = vocabulary_part(f"{names.head}.weight")
            # As in transformers, a head in the files is used even if config.json says that the head is tied to the
            # embedding.
            if config.tie_word_embeddings and torch.equal(head, embedding):
                head = embedding
        self._head = Head(head, config.vocab_size, kernels, group)
        frequencies = inverse_frequencies(
            config.head_size, config.rope_theta, config.rope_scaling, config.rope_base_positions, max_total_tokens
        )
        self._rotary = rotary_tables(frequencies, max_total_tokens, platform.device)

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        return bytes_per_slot(self._kv_shapes, dtype)

    def make_cache(self, slots: int, rows: int, dtype: torch.dtype, on_layer: Callable[[], None]) -> list[KvLayer]:
        return make_kv_cache(self._kv_shapes, slots, dtype, self._device, on_layer)

    def forward(self, step: StepInput, cache: list[KvLayer], on_layer: Callable[[], None]) -> Tensor:
        residual = self._embed(step.ids_T)
        x = self._kernels.rms_norm(residual, self._blocks[0].attention_norm, self._eps)
        # One kernel adds a layer's result to the residual and applies the norm of the next layer.
        next_norms = [*(block.attention_norm for block in self._blocks[1:]), self._norm]
        for block, next_norm, kv in zip(self._blocks, next_norms, cache, strict=True):
            x = block.attention(x, step, self._rotary, kv)
            x, residual = self._kernels.add_rms_norm(x, residual, block.mlp_norm, self._eps)
            x = block.mlp(x)
            x, residual = self._kernels.add_rms_norm(x, residual, next_norm, self._eps)
            on_layer()
        return x

    def logits(self, hidden_TH: Tensor) -> Tensor | None:
        return self._head(hidden_TH)


def _features(heads: range, head_size: int) -> range:
    return range(heads.start * head_size, heads.stop * head_size)
