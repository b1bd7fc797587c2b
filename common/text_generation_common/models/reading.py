"""Reads what the configs of most families have in common: the names of Llama's fields, with Llama's defaults; and which
layers have a sliding window. `family` enters a family's reader.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec

from text_generation_common.errors import ModelError
from text_generation_common.flags.kinds import Dtype
from text_generation_common.models.architecture import Activation, AttentionRule, Biases, ModelConfig, Moe, Norm
from text_generation_common.models.names import LLAMA, NAMES
from text_generation_common.models.rope_config import LLAMA_ROPE, MAX_POSITIONS, RopeFacts, read_rope
from text_generation_common.models.values import Fields, is_whole

# Further types of checkpoints, which are computed in float32; "auto" names no type.
OTHER_DTYPES = {"auto": Dtype.float32, "float64": Dtype.float32}

# Largest accepted sizes: several times those of the largest models, and small enough to check a model before memory is
# allocated.
MAX_VOCABULARY = 2**24
MAX_WIDTH = 2**20
MAX_LAYERS = 2**12
MAX_HEADS = 2**12
MIN_HEAD_SIZE, MAX_HEAD_SIZE = 4, 2**12
MAX_EXPERTS = 2**10
MAX_TOKEN_ID = 2**31 - 1
ACTIVATIONS = {
    "silu": Activation.silu,
    "swish": Activation.silu,
    "gelu": Activation.gelu,
    "gelu_new": Activation.gelu_tanh,
    "gelu_fast": Activation.gelu_tanh,
    "gelu_pytorch_tanh": Activation.gelu_tanh,
    "relu": Activation.relu,
}
# Activations of transformers that the server's own decoder lacks.
FURTHER_ACTIVATIONS = frozenset(
    {"gelu_10", "gelu_accurate", "gelu_python", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu2",
     "relu6", "sigmoid", "tanh", "xielu"}
)  # fmt: skip
EVERY_BIAS = Biases(qkv=True, attention_output=True, mlp=True)


def llama_like(
    fields: Fields, biases: Biases | None = None, rope: RopeFacts | None = LLAMA_ROPE, norm: Norm | None = None,
    **others: Any,
) -> ModelConfig:  # fmt: skip
    """Reads a config with Llama's fields. None for `biases` and `norm`: the family's fields say what they are. None for
    `rope`: there is none. The end tokens are those of config.json. `others`: further attributes of the ModelConfig."""
    longest = fields.whole("max_position_embeddings", 1, MAX_POSITIONS, 2048)
    hidden = fields.whole("hidden_size", 1, MAX_WIDTH)
    heads = fields.whole("num_attention_heads", 1, MAX_HEADS)
    head_size = _head_size(fields, hidden, heads)
    rule = AttentionRule(head_size**-0.5, None if rope is None else read_rope(fields, longest, head_size, rope))
    if biases is None:
        biases = attention_biases(fields, mlp=fields.flag("mlp_bias"))
    model_type = fields.word("model_type")
    return ModelConfig(
        model_type=model_type,
        names=NAMES.get(model_type, LLAMA),
        vocab_size=fields.whole("vocab_size", 1, MAX_VOCABULARY),
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size", 1, MAX_WIDTH),
        num_heads=heads,
        num_kv_heads=_kv_heads(fields, heads),
        head_size=head_size,
        max_positions=longest,
        rules=(rule,) * fields.whole("num_hidden_layers", 1, MAX_LAYERS),
        norm=norm or rms_norm(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        dtype=stored_dtype(fields),
        eos_token_ids=tuple(token_ids(fields, "eos_token_id")),
        biases=biases,
        activation=_activation(fields),
        **others,
    )


def gpt_like(
    fields: Fields, biases: Biases, rope: RopeFacts | None = None, norm_bias: bool = True, **others: Any
) -> ModelConfig:
    """The same for a model with LayerNorms, and with MLPs without a gate, four times as wide as the hidden state if
    config.json does not say otherwise."""
    if not fields.has("intermediate_size"):
        fields = fields.with_value("intermediate_size", 4 * fields.whole("hidden_size", 1, MAX_WIDTH))
    norm = layer_norm(fields, "layer_norm_epsilon", norm_bias)
    return llama_like(fields, biases, rope, norm, gated=False, **others)


def experts(
    fields: Fields, number: str = "num_local_experts", size: str = "intermediate_size", over_chosen: bool = True
) -> Moe:
    """`number` and `size` are the names of fields: the number of experts, and each expert's intermediate size."""
    count = fields.whole(number, 1, MAX_EXPERTS)
    chosen = fields.whole("num_experts_per_tok", 1, count)
    if fields.word("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.lacks("hidden_act", '"silu": experts with other activations are not supported yet')
    return Moe(count, chosen, fields.whole(size, 1, MAX_WIDTH), over_chosen)


def qwen_experts(fields: Fields, layers: int) -> Moe:
    step = fields.whole("decoder_sparse_step", 1, MAX_POSITIONS, 1)
    only_dense = fields.wholes("mlp_only_layers", 0, layers - 1)
    dense = frozenset(i for i in range(layers) if i in only_dense or (i + 1) % step)
    moe = experts(fields, "num_experts", "moe_intermediate_size", fields.flag("norm_topk_prob"))
    return replace(moe, dense_layers=dense)


def with_rules(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The config with changed attributes of the AttentionRule of every layer."""
    return replace(config, rules=tuple(replace(rule, **changes) for rule in config.rules))


def attention_biases(fields: Fields, **others: bool) -> Biases:
    attention = fields.flag("attention_bias")
    return Biases(qkv=attention, attention_output=attention, **others)


def rms_norm(fields: Fields, **kind: bool) -> Norm:
    return Norm(fields.number("rms_norm_eps", 1e-12, 1, 1e-6), **kind)


def layer_norm(fields: Fields, name: str, bias: bool = True) -> Norm:
    """A LayerNorm whose epsilon is the field `name`."""
    return Norm(fields.number(name, 1e-12, 1, 1e-5), centred=True, bias=bias)


def _activation(fields: Fields) -> Activation:
    name = fields.word("hidden_act", "silu")
    if name in FURTHER_ACTIVATIONS:
        raise fields.lacks("hidden_act", f"one of {', '.join(ACTIVATIONS)}")
    if name not in ACTIVATIONS:
        raise fields.error("hidden_act", f"one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def token_ids(fields: Fields, name: str) -> list[int]:
    """The ids of a field that may be null, one id or a list of ids."""
    value = fields.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_whole(id, 0, MAX_TOKEN_ID) for id in ids):
        raise fields.error(name, "a token id (a whole number from 0), or a list of them")
    return ids


def _kv_heads(fields: Fields, heads: int) -> int:
    kv_heads = fields.whole("num_key_value_heads", 1, heads, heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    return kv_heads


def _head_size(fields: Fields, hidden: int, heads: int) -> int:
    if fields.has("head_dim"):
        size = fields.whole("head_dim", MIN_HEAD_SIZE, MAX_HEAD_SIZE)
    elif hidden % heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads ({heads}) where there is no head_dim")
    else:
        size = hidden // heads
    if size % 2 or not MIN_HEAD_SIZE <= size <= MAX_HEAD_SIZE:
        allowed = f"an even number from {MIN_HEAD_SIZE} to {MAX_HEAD_SIZE} (rotary positions turn pairs)"
        raise ModelError(f"{fields.where}: the head size is {size}, and must be {allowed}")
    return size


def stored_dtype(fields: Fields) -> Dtype:
    given = [name for name in ("dtype", "torch_dtype") if fields.has(name)]
    field = given[0] if given else "dtype"
    known = {dtype.value: dtype for dtype in Dtype} | OTHER_DTYPES
    name = fields.word(field, "auto").removeprefix("torch.")
    if name not in known:
        raise fields.error(field, f"one of {', '.join(known)}")
    return known[name]


LAYER_TYPES = ("full_attention", "sliding_attention")


def with_windows(fields: Fields, config: ModelConfig, window: int | None, slides: Callable[[int], bool]) -> ModelConfig:
    """Layers that layer_types calls sliding_attention have the window, or, where config.json has no layer_types, those
    that `slides`."""
    kinds, count = fields.get("layer_types"), config.num_layers
    if kinds is None:
        kinds = ["sliding_attention" if slides(i) else "full_attention" for i in range(count)]
    if not (isinstance(kinds, list) and len(kinds) == count and all(kind in LAYER_TYPES for kind in kinds)):
        raise fields.error("layer_types", f"a list of {count} of the words {' and '.join(LAYER_TYPES)}")
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    rules = [replace(rule, window=window) for rule, window in zip(config.rules, windows, strict=True)]
    return replace(config, rules=tuple(rules))


def with_window_pattern(fields: Fields, config: ModelConfig, pattern: int) -> ModelConfig:
    """Where config.json has no layer_types, of `pattern` layers all but the last have a window."""
    window = fields.with_defaults(sliding_window=4096).whole("sliding_window", 1, MAX_POSITIONS)
    return with_windows(fields, config, window, lambda i: (i + 1) % pattern != 0)


def with_ropes(fields: Fields, config: ModelConfig, theta_in_windows: float | None = None) -> ModelConfig:
    """Sets the ropes of all layers. rope_parameters has an object for each kind of layer; older files have one for
    layers without a window, and the others have no scaling. Where these objects have no theta, it is rope_theta, or in
    layers with a window `theta_in_windows`."""
    given = fields.inner("rope_parameters")
    if given.raw.keys() - {*LAYER_TYPES}:
        raise fields.error("rope_parameters", f"an object with the fields {' and '.join(LAYER_TYPES)} only")
    if given.raw and fields.has("rope_scaling"):
        raise fields.error("rope_scaling", "null where there are rope_parameters")
    full, sliding = (given.inner(kind) for kind in LAYER_TYPES)
    sizes = config.max_positions, config.head_size
    everywhere = read_rope(fields, *sizes, rope=full if given.raw else fields.inner("rope_scaling"))
    if theta_in_windows is not None:
        fields = fields.with_value("rope_theta", theta_in_windows)
    in_windows = read_rope(fields, *sizes, rope=sliding)
    rules = [replace(rule, rope=everywhere if rule.window is None else in_windows) for rule in config.rules]
    return replace(config, rules=tuple(rules))


def with_one_window(fields: Fields, config: ModelConfig) -> ModelConfig:
    return with_rules(config, window=read_window(fields))


def with_windows_from(fields: Fields, config: ModelConfig) -> ModelConfig:
    """The layers from max_window_layers on have a window, if use_sliding_window is true."""
    fields = fields.with_defaults(sliding_window=4096, max_window_layers=28)
    first = fields.whole("max_window_layers", 0, MAX_POSITIONS, 28)
    return with_windows(fields, config, used_window(fields), lambda i: i >= first)


def used_window(fields: Fields) -> int | None:
    """The window, if use_sliding_window is true."""
    return read_window(fields if fields.flag("use_sliding_window") else fields.without("sliding_window"))


def read_window(fields: Fields) -> int | None:
    return fields.whole("sliding_window", 1, MAX_POSITIONS) if fields.has("sliding_window") else None


P = ParamSpec("P")
Reader = Callable[Concatenate[Fields, P], ModelConfig]
# The readers of all families, by the model_type of config.json.
FAMILIES: dict[str, Callable[[Fields], ModelConfig]] = {}


def family(model_type: str, **defaults: Any) -> Callable[[Reader[P]], Reader[P]]:
    """Enters a family's reader. `defaults`: the values that transformers has for fields that a file leaves out."""

    def enter(read: Reader[P]) -> Reader[P]:
        def reader(fields: Fields, /, *args: P.args, **kwargs: P.kwargs) -> ModelConfig:
            return read(fields.with_defaults(**defaults), *args, **kwargs)

        FAMILIES[model_type] = reader
        return reader

    return enter
