"""Lists the tensors of a model with their shapes, checks that the weights files hold exactly these, and counts their
bytes."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from text_generation_common.errors import ModelError
from text_generation_common.models.architecture import Branches, ModelConfig, Moe
from text_generation_common.models.names import ExpertLayout, LayerNames
from text_generation_common.quantized.layout import DENSE_TYPES, PASSED_OVER
from text_generation_common.weights.headers import BUFFERS, Stored

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinearSize:
    outputs: int
    inputs: int
    has_bias: bool = False
    experts: int = 0  # weights that lie one after the other in each of the layer's tensors; 0: one, without a dimension

    @property
    def shape(self) -> Shape:
        return (self.experts, self.outputs, self.inputs) if self.experts else (self.outputs, self.inputs)


# Given a linear layer's name and size: the tensors, by name, that files have in the place of its weight. None if they
# have the weight's numbers.
PackedShapes = Callable[[str, LinearSize], Mapping[str, Shape] | None]


def no_codes(layer: str, size: LinearSize) -> None:
    """The `PackedShapes` of files that have all weights as numbers."""


def shapes(config: ModelConfig, packed: PackedShapes = no_codes) -> dict[str, Shape]:
    """The shapes of all tensors of a model in the files, by name."""
    found = _other_shapes(config)
    for name, size in linear_sizes(config).items():
        found[f"{name}.weight"] = size.shape[::-1] if config.names.transposed else size.shape
        if size.has_bias:
            found[f"{name}.bias"] = (size.outputs,)
    for name, size in matrix_sizes(config).items():
        if (of_codes := packed(name, size)) is not None:
            del found[name if name in found else f"{name}.weight"]
            found |= of_codes
    return found


def weight_bytes(config: ModelConfig, number_bytes: int, codes_of: Callable[[str, LinearSize], int | None]) -> int:
    """Bytes of all weights in memory. `codes_of` a matrix: the bytes of its codes; None if it is kept as numbers, which
    have `number_bytes` each, as all other tensors."""
    found = {name: codes_of(name, size) for name, size in matrix_sizes(config).items()}
    codes = {name: size for name, size in found.items() if size is not None}
    numbers = sum(math.prod(shape) for shape in shapes(config, lambda name, _: {} if name in codes else None).values())
    return number_bytes * numbers + sum(codes.values())


def _other_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The shapes of all tensors but those of linear layers."""
    hidden, names = config.hidden_size, config.names
    found: dict[str, Shape] = {f"{names.embedding}.weight": (config.vocab_size, hidden)}
    if config.learned_positions:
        found[f"{names.positions}.weight"] = (config.position_offset + config.max_positions, hidden)
    if config.embedding_norm:
        found |= _norm_shapes(config, names.embedding_norm)
    if not config.tie_word_embeddings:
        found[f"{names.head}.weight"] = (config.vocab_size, hidden)
    if config.biases.head:
        found[f"{names.head}.bias"] = (config.vocab_size,)
    found |= _norm_shapes(config, names.norm)
    for i in range(config.num_layers):
        found |= _layer_shapes(config, names.layer(i), config.moe if config.has_experts(i) else None)
    return found


def _norm_shapes(config: ModelConfig, name: str) -> dict[str, Shape]:
    if not name:
        return {}
    kinds = ("weight", "bias") if config.norm.bias else ("weight",)
    return {f"{name}.{kind}": (config.hidden_size,) for kind in kinds}


def matrix_sizes(config: ModelConfig) -> dict[str, LinearSize]:
    """All that files may have as codes, by the names that they have in the files: linear layers, head, routers, experts
    and the embedding of tokens."""
    found, others = linear_sizes(config), _other_shapes(config)
    for name, shape in others.items():
        layer = name.removesuffix(".weight")
        if len(shape) > 2 and config.names.experts is ExpertLayout.turned:
            found[name] = LinearSize(shape[2], shape[1], experts=shape[0])
        elif layer not in (name, config.names.positions) and len(shape) > 1:
            experts = shape[0] if len(shape) > 2 else 0
            found[layer] = LinearSize(shape[-2], shape[-1], f"{layer}.bias" in others, experts)
    return found


def made_codes(config: ModelConfig) -> dict[str, LinearSize]:
    """What --quantize makes codes of: linear layers and experts."""
    names = config.names
    layers = [names.layer(number) for number in range(config.num_layers)]
    kept = {names.embedding, names.head, *(name for of in layers for name in (of.router, of.shared_score))}
    return {name: size for name, size in matrix_sizes(config).items() if name not in kept}


def linear_sizes(config: ModelConfig) -> dict[str, LinearSize]:
    """The linear layers of attention and MLPs, by the names that they have in the files: without head, routers and
    experts."""
    found: dict[str, LinearSize] = {}
    for layer in range(config.num_layers):
        for name, outputs, inputs, has_bias in _linears(config, config.names.layer(layer), config.has_experts(layer)):
            # Layers of the same name share a tensor.
            before = found[name].outputs if name in found else 0
            found[name] = LinearSize(before + outputs, inputs, has_bias)
    return found


def _linears(config: ModelConfig, names: LayerNames, has_experts: bool) -> list[tuple[str, int, int, bool]]:
    """(name, outputs, inputs, whether it has a bias)"""
    hidden, wide, biases = config.hidden_size, config.intermediate_size, config.biases
    queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    linears = [
        (names.queries, queries, hidden, biases.qkv),
        (names.keys, keys, hidden, biases.qkv),
        (names.values, keys, hidden, biases.qkv),
        (names.attention_output, hidden, queries, biases.attention_output),
    ]
    if not has_experts:
        linears += [(names.gate, wide, hidden, biases.mlp)] if config.gated else []
        linears += [(names.up, wide, hidden, biases.mlp), (names.down, hidden, wide, biases.mlp)]
    return linears


def _layer_shapes(config: ModelConfig, names: LayerNames, moe: Moe | None) -> dict[str, Shape]:
    """The shapes of a layer's tensors but those of linear layers."""
    queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    found = {} if moe is None else expert_shapes(config, moe, names)
    found |= _norm_shapes(config, names.attention_norm)
    if config.branches is not Branches.parallel:
        found |= _norm_shapes(config, names.mlp_norm)
    if config.post_norms:
        found |= _norm_shapes(config, names.attention_post_norm) | _norm_shapes(config, names.mlp_post_norm)
    if any(rule.sinks for rule in config.rules):
        found[names.sinks] = (config.num_heads,)
    if config.heads_normed_together:
        found |= {f"{names.query_norm}.weight": (queries,), f"{names.key_norm}.weight": (keys,)}
    elif config.query_key_norm:
        found |= {f"{name}.weight": (config.head_size,) for name in (names.query_norm, names.key_norm)}
    return found


def expert_shapes(config: ModelConfig, moe: Moe, names: LayerNames) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's tensors that belong to experts, by name."""
    hidden, wide, count = config.hidden_size, moe.intermediate_size, moe.experts
    found: dict[str, tuple[int, ...]] = {f"{names.router}.weight": (count, hidden)}
    gate_up, down = names.expert_up, names.expert_down
    match config.names.experts:
        case ExpertLayout.apart:
            for i in range(count):
                found |= {f"{name.format(i)}.weight": (wide, hidden) for name in (names.expert_gate, gate_up)}
                found[f"{down.format(i)}.weight"] = (hidden, wide)
        case ExpertLayout.merged:
            found |= {f"{name}.weight": (count, wide, hidden) for name in (names.expert_gate, gate_up)}
            found[f"{down}.weight"] = (count, hidden, wide)
        case ExpertLayout.stacked:
            found |= {f"{gate_up}.weight": (count, 2 * wide, hidden), f"{down}.weight": (count, hidden, wide)}
        case ExpertLayout.turned:
            found |= {gate_up: (count, hidden, 2 * wide), down: (count, wide, hidden)}
    if config.biases.experts:
        found |= _expert_biases(config, moe, names)
    if moe.shared_size:
        found |= {f"{name}.weight": (moe.shared_size, hidden) for name in (names.shared_gate, names.shared_up)}
        found |= {f"{names.shared_down}.weight": (hidden, moe.shared_size), f"{names.shared_score}.weight": (1, hidden)}
    return found


def _expert_biases(config: ModelConfig, moe: Moe, names: LayerNames) -> dict[str, Shape]:
    hidden, wide, count = config.hidden_size, moe.intermediate_size, moe.experts
    found: dict[str, Shape] = {f"{names.router}.bias": (count,)}
    if config.names.experts is ExpertLayout.merged:
        found |= {f"{name}.bias": (count, wide) for name in (names.expert_gate, names.expert_up)}
        return found | {f"{names.expert_down}.bias": (count, hidden)}
    return found | {f"{names.expert_up}_bias": (count, 2 * wide), f"{names.expert_down}_bias": (count, hidden)}


def with_checked_tensors(
    config: ModelConfig,
    names: Collection[str],
    describe: Callable[[str], Stored | None],
    packed: PackedShapes = no_codes,
) -> ModelConfig:
    """The config with the names that tensors have in these files. ModelError for the first tensor that is missing, has
    another shape, or belongs to another kind of model. Reads no weights. Every rank checks whole tensors, of which it
    later reads a part."""
    config = replace(config, names=config.names.as_in(lambda name: describe(name) is not None))
    of_codes: set[str] = set()

    def noted(layer: str, size: LinearSize) -> Mapping[str, Shape] | None:
        found = packed(layer, size)
        of_codes.update(found or ())
        return found

    # A tied model may have been saved with its head: see Decoder.
    of_head = [name for name in names if name.startswith(f"{config.names.head}.")]
    is_tied = config.tie_word_embeddings and all(name.endswith((".bias", *PASSED_OVER)) for name in of_head)
    expected = shapes(replace(config, tie_word_embeddings=is_tied), noted)
    for name, shape in expected.items():
        _check_shape(config, name, shape, describe(name))
        if name not in of_codes:
            _check_numbers(name, describe(name))
    passed_over = PASSED_OVER if of_codes else ()
    for name in names:
        if name.endswith(passed_over):
            continue
        if name not in expected and name.startswith(config.names.within) and not BUFFERS.search(name):
            raise ModelError(
                f"the weights files have a tensor {ascii(name)[1:-1]}, which a {config.model_type} with this"
                " config.json does not have: the weights belong to another config.json, or to another kind of model"
            )
    return config


def _check_numbers(name: str, stored: Stored | None) -> None:
    """ModelError if a tensor of numbers, such as the weight of a norm, is stored as codes."""
    if stored is not None and stored.type not in DENSE_TYPES:
        raise ModelError(
            f"the tensor {name} is stored as {ascii(stored.type)[1:-1]}, and only linear layers, their experts and the"
            " embedding of tokens may be quantized: choose a checkpoint whose other weights are not"
        )


def _check_shape(config: ModelConfig, name: str, expected: Shape, stored: Stored | None) -> None:
    if stored is None:
        raise ModelError(
            f"the weights files have no tensor {name}, which a {config.model_type} with this config.json has: do they"
            " belong to it?"
        )
    if stored.shape != expected:
        raise ModelError(
            f"the tensor {name} has the shape {list(stored.shape)} in the weights files, and config.json makes it"
            f" {list(expected)} in this {config.model_type}: do the weights belong to this config.json?"
        )
