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
from copy import copy

import torch
from torch import Tensor

from text_generation_common.models.architecture import AttentionRule, Branches, ModelConfig
from text_generation_common.models.names import LayerNames, QkvLayout
from text_generation_common.models.rope_config import Rope
from text_generation_common.quantized.tensors.splits import are_equal
from text_generation_common.quantized.values import Weight
from text_generation_server.device.arena import zeros
from text_generation_server.distributed import Group
from text_generation_server.kernels.interface import HeadNorms, KvLayer
from text_generation_server.layers.norm import HeadsTogether, HiddenNorm
from text_generation_server.layers.rotary import kernel_order, rotary_tables
from text_generation_server.layers.vocabulary import Embedding, Head, look_up_in, pad_rows
from text_generation_server.models.experts import MLP, Experts
from text_generation_server.models.kv_cache import KvShape, MakeTensor, bytes_per_slot, make_kv_cache
from text_generation_server.models.loading import LayerPart, Loader, stacked
from text_generation_server.models.parts import Parts, Split, split_model
from text_generation_server.platforms import Platform
from text_generation_server.step.inputs import StepInput


class Attention:
    def __init__(self, parts: Parts, rule: AttentionRule, names: LayerNames, group: Group) -> None:
        config, split, loader = parts.config, parts.split, parts.loader
        self._kernels = parts.kernels
        self._heads = (len(split.query_heads), len(split.kv_heads))
        self._options = parts.attention_options(rule, names.sinks)
        self._qkv = loader.fused(qkv_parts(config, rule.rope, split, names), config.biases.qkv)
        queries = features(split.query_heads, config.head_size)
        has_bias = config.biases.attention_output
        self._o = loader.row_split(names.attention_output, queries, has_bias, parts.linear_factor)
        self._norms: HeadNorms | None = None
        self._norm_together: HeadsTogether | None = None
        if config.heads_normed_together:
            weights = [
                parts.norm_weight(loader.rows(f"{name}.weight", features(heads, config.head_size)))
                for name, heads in ((names.query_norm, split.query_heads), (names.key_norm, split.kv_heads))
            ]
            self._norm_together = HeadsTogether(parts.kernels, group, weights, config.norm.eps)
        elif config.query_key_norm:
            order = kernel_order(rule.rope, config.head_size) or slice(None)
            query, key = (
                parts.norm_weight(loader.whole(f"{name}.weight")[order]) for name in (names.query_norm, names.key_norm)
            )
            self._norms = HeadNorms(query, key, config.norm.eps)

    def __call__(self, x_TH: Tensor, step: StepInput, rotary: tuple[Tensor, Tensor], kv: KvLayer) -> Tensor:
        kernels, qkv = self._kernels, self._qkv(x_TH)
        if self._norm_together is not None:
            self._norm_together(qkv)
        q_THD = kernels.rope_and_store_kv(
            qkv, self._heads, rotary, positions_T=step.positions_T, kv=kv, slots_T=step.slots_T, norms=self._norms
        )
        out = kernels.attend(
            q_THD,
            kv,
            step.table,
            rows_R=step.rows_R,
            lengths_R=step.lengths_R,
            segments=step.segments,
            options=self._options,
        )
        return self._o(out.flatten(1))


class Block:
    """A layer. Takes and returns (norm(hidden states), hidden states), so that an addition and the norm after it are
    one kernel."""

    def __init__(self, parts: Parts, layer: int, group: Group) -> None:
        names, moe = parts.config.names.layer(layer), parts.config.moe
        self._kernels = parts.kernels
        self._branches = parts.config.branches
        self._attention = Attention(parts, parts.config.rules[layer], names, group)
        has_experts = moe is not None and parts.config.has_experts(layer)
        self._mlp = Experts(parts, moe, names, group) if moe is not None and has_experts else MLP(parts, names)
        self.attention_norm = parts.norm(names.attention_norm)
        self._mlp_norm = self.attention_norm
        if self._branches is not Branches.parallel:
            self._mlp_norm = parts.norm(names.mlp_norm)
        self._post_norms: tuple[HiddenNorm, HiddenNorm] | None = None
        if parts.config.post_norms:
            self._post_norms = parts.post_norm(names.attention_post_norm), parts.post_norm(names.mlp_post_norm)

    def __call__(
        self, x: Tensor, residual: Tensor, step: StepInput, rotary: tuple[Tensor, Tensor], kv: KvLayer,
        next_norm: HiddenNorm,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        attended = self._attention(x, step, rotary, kv)
        if self._branches is Branches.sequential:
            if self._post_norms is None:
                x, residual = self._mlp_norm.of_sum(attended, residual)
                return next_norm.of_sum(self._mlp(x), residual)
            of_attention, of_mlp = self._post_norms
            x, residual = self._mlp_norm.of_sum(of_attention(attended), residual)
            return next_norm.of_sum(of_mlp(self._mlp(x)), residual)
        other = self._mlp(self._mlp_norm(residual) if self._branches is Branches.parallel_two_norms else x)
        return next_norm.of_sum(self._kernels.add(attended, other), residual)


class Decoder:
    """A `Model` whose layers keep keys and values, and nothing for a row."""

    bytes_per_row = 0

    def __init__(self, config: ModelConfig, platform: Platform, loader: Loader, max_total_tokens: int) -> None:
        kernels, group, names = platform.kernels, platform.group, config.names
        part = kernels.vocabulary_part(config.vocab_size, group.size)
        split = split_model(config, group.rank, group.size, part)

        def vocabulary_part(layer: str) -> Weight:
            return loader.table(layer, split.vocabulary, split.vocabulary_part)

        parts = Parts(
            config=config,
            split=split,
            kernels=kernels,
            loader=loader,
            device=platform.device,
            max_total_tokens=max_total_tokens,
        )
        self._config = config
        self.vocab_size = config.vocab_size
        self.vocabulary = split.vocabulary
        self.dtype = loader.dtype
        self.max_total_tokens = max_total_tokens
        self._device = platform.device
        self._kernels = kernels
        self._adapters = loader.adapters.of_step
        self._kv_shapes = [KvShape(2 * len(split.kv_heads), config.head_size)] * config.num_layers
        embedding = vocabulary_part(names.embedding)
        self._embedding_norm = parts.norm(names.embedding_norm) if config.embedding_norm else None
        self._positions: Tensor | None = None
        if config.learned_positions:
            rows = range(config.position_offset, config.position_offset + config.max_positions)
            self._positions = loader.rows(f"{names.positions}.weight", rows)
        self._blocks = [Block(parts, layer, group) for layer in range(config.num_layers)]
        self._norm = parts.norm(names.norm)
        head = embedding
        if not config.tie_word_embeddings or loader.has(names.head):
            head = vocabulary_part(names.head)
            # As in transformers, a head in the files is used even if config.json says that it is tied to the embedding.
            if config.tie_word_embeddings and are_equal(head, embedding):
                head = embedding
        head_bias = None
        if config.biases.head:
            head_bias = pad_rows(loader.rows(f"{names.head}.bias", split.vocabulary), split.vocabulary_part)
        head_weight = loader.head(head)
        self._of_vocabulary = loader.vocabulary_adapters(
            names, config.hidden_size, split.vocabulary, split.vocabulary_part
        )
        self._head = Head(
            weight=head_weight,
            bias=head_bias,
            vocab_size=config.vocab_size,
            kernels=kernels,
            group=group,
            adapters=self._of_vocabulary,
            multiplier=config.multipliers.logits,
            dtype=loader.dtype,
            softcap=config.logits_softcap,
        )
        # Where the head is the embedding, and holds it in another form, this form is the only one that is kept.
        look_up = self._head.look_up() if head_weight is embedding else None
        look_up = look_up or look_up_in(embedding, kernels, loader.dtype)
        self._embed = Embedding(look_up, split.vocabulary, group)
        tables = {
            rope: rotary_tables(rope, config.head_size, max_total_tokens, platform.device)
            for rope in dict.fromkeys(rule.rope for rule in config.rules)
        }
        self._rotary = [tables[rule.rope] for rule in config.rules]

    def one_layer_of_each_kind(self) -> "Decoder":
        sample = copy(self)
        kinds = list(
            zip(self._config.rules, map(self._config.has_experts, range(self._config.num_layers)), strict=True)
        )
        layers = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        sample._kv_shapes = [self._kv_shapes[layer] for layer in layers]
        sample._blocks = [self._blocks[layer] for layer in layers]
        sample._rotary = [self._rotary[layer] for layer in layers]
        return sample

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        return bytes_per_slot(self._kv_shapes, dtype)

    def make_cache(self, slots: int, rows: int, dtype: torch.dtype, make: MakeTensor = zeros) -> list[KvLayer]:
        return make_kv_cache(self._kv_shapes, slots, dtype, self._device, make)

    def forward(self, step: StepInput, cache: list[KvLayer], on_layer: Callable[[], None]) -> Tensor:
        self._adapters.slots_T = step.adapters_T
        residual = self._of_vocabulary.embedded(self._embed(step.ids_T), step.ids_T, step.adapters_T)
        if self._embedding_norm is not None:
            residual = self._embedding_norm(residual)
        if self._positions is not None:
            residual = self._kernels.add(residual, self._kernels.embed(step.positions_T, self._positions))
        x = self._blocks[0].attention_norm(residual)
        next_norms = [*(block.attention_norm for block in self._blocks[1:]), self._norm]
        for block, next_norm, rotary, kv in zip(self._blocks, next_norms, self._rotary, cache, strict=True):
            x, residual = block(x, residual, step, rotary, kv, next_norm=next_norm)
            on_layer()
        return x

    def logits(self, hidden_TH: Tensor, adapters_T: Tensor | None = None) -> Tensor | None:
        return self._head(hidden_TH, adapters_T)

    def own_logits(self, hidden_TH: Tensor, adapters_T: Tensor | None = None) -> Tensor:
        return self._head.of_part(hidden_TH, adapters_T)


def qkv_parts(config: ModelConfig, rope: Rope | None, split: Split, names: LayerNames) -> list[LayerPart]:
    """This rank's queries, keys and values, with the numbers of each query and key head in the kernels' order."""
    order = kernel_order(rope, config.head_size)
    if config.names.qkv is QkvLayout.groups:
        return _of_groups(config, order, split, names)
    size = config.head_size
    queries, keys, values = stacked(
        (names.queries, config.num_heads * size, features(split.query_heads, size)),
        (names.keys, config.num_kv_heads * size, features(split.kv_heads, size)),
        (names.values, config.num_kv_heads * size, features(split.kv_heads, size)),
    )
    if order is None:
        return [queries, keys, values]
    return [LayerPart(queries.name, queries.rows, order, size), LayerPart(keys.name, keys.rows, order, size), values]


def _of_groups(config: ModelConfig, order: list[int] | None, split: Split, names: LayerNames) -> list[LayerPart]:
    size, queries_of_key = config.head_size, config.num_heads // config.num_kv_heads
    group = (queries_of_key + 2) * size
    if len(split.query_heads) < queries_of_key:  # several ranks share a key head
        return _of_one_group(config, order, split, names)
    rows = features(split.kv_heads, group)
    numbers = order or list(range(size))
    queries = [head * size + number for head in range(queries_of_key) for number in numbers]
    key = [queries_of_key * size + number for number in numbers]
    value = [(queries_of_key + 1) * size + number for number in range(size)]
    return [
        LayerPart(name, rows, picks, group)
        for name, picks in ((names.queries, queries), (names.keys, key), (names.values, value))
    ]


def _of_one_group(config: ModelConfig, order: list[int] | None, split: Split, names: LayerNames) -> list[LayerPart]:
    """Some queries of a group, its key and its value."""
    size, queries_of_key = config.head_size, config.num_heads // config.num_kv_heads
    # Numbers of heads in the tensor, which has one group behind the other: queries, a key and a value. So each group
    # before this one adds two heads to its queries.
    first = split.query_heads.start + 2 * split.kv_heads.start
    key = split.kv_heads.start * (queries_of_key + 2) + queries_of_key
    queries = range(first, first + len(split.query_heads))
    return [
        LayerPart(names.queries, features(queries, size), order, size),
        LayerPart(names.keys, features(range(key, key + 1), size), order, size),
        LayerPart(names.values, features(range(key + 1, key + 2), size)),
    ]


def features(heads: range, head_size: int) -> range:
    return range(heads.start * head_size, heads.stop * head_size)
