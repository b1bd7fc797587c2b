"""Whether flags fit a model: the number of shards, its longest sequence, the type of its numbers, the memory of its
tokens. A shard asks before it loads the model; the launcher asks before it starts a shard.
"""

from dataclasses import dataclass

from text_generation_common.errors import ModelError
from text_generation_common.flags.kinds import ActivationType, Dtype, KvCacheDtype, LoadFormat, Quantize
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.quantized_layers import AnyLayers, QuantizedLayers
from text_generation_common.quantized.agreement import Use, use_of


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of heads of the whole model."""

    queries: int
    keys: int  # each with values

    def fit(self, shards: int) -> bool:
        """Whether all shards get the same number of heads. Several shards may have the same key head."""
        return self.queries % shards == 0 and (self.keys % shards == 0 or shards % self.keys == 0)

    def refusal(self, shards: int) -> str | None:
        """One line with the numbers of shards that fit, or None if `shards` does."""
        if self.fit(shards):
            return None
        fitting = ", ".join(str(count) for count in range(1, self.queries + 1) if self.fit(count))
        return (
            f"--num-shard {shards} cannot divide the {self.queries} attention heads and {self.keys} key and value heads"
            f" of this model evenly: choose one of {fitting}"
        )


def one_shard_only(model_type: str, shards: int) -> str:
    """Refuses several shards for a model that transformers computes."""
    return (
        f"--num-shard {shards} is not supported for model type {ascii(model_type)[1:-1][:60]}, which transformers"
        " computes, in one process: choose --num-shard 1"
    )


NUMBER_BYTES = {
    Dtype.float32: 4, Dtype.bfloat16: 2, Dtype.float16: 2, KvCacheDtype.fp8_e4m3fn: 1, KvCacheDtype.int8: 1,
}  # fmt: skip
SCALE_BYTES = 4  # each key and each value of 8 bits has a scale, in each head


def check_length(longest: int, max_positions: int) -> None:
    """ModelError if the model was not made for sequences of `longest` tokens, prompt and answer together."""
    if longest > max_positions:
        raise ModelError(
            f"`max_total_tokens` must be <= {max_positions}, the longest sequence this model was made for. Given:"
            f" {longest}: choose a smaller --max-total-tokens, or stretch the positions with --rope-scaling and"
            " --rope-factor"
        )


def choose_dtype(wanted: Dtype | None, stored: Dtype, on_cpu: bool) -> Dtype:
    """The type to compute in. CPUs do not compute float16: a checkpoint of it is served in bfloat16. ModelError if
    float16 is asked for."""
    if not on_cpu or (wanted or stored) is not Dtype.float16:
        return wanted or stored
    if wanted:
        raise ModelError("--dtype float16 is not supported on CPUs: choose bfloat16 or float32")
    return Dtype.bfloat16


def check_quantize(quantize: Quantize | None, method: str | None, on_cpu: bool) -> Use:
    """What becomes of weights that `method` has quantized (None: that are numbers)."""
    use = use_of(quantize, method)
    if use is Use.fp8_on_load and on_cpu:
        raise ModelError(
            f"--quantize {quantize} makes fp8 of this model's weights on GPUs only: choose --quantize int8, which errs"
            " less in as much memory, or a checkpoint in fp8"
        )
    return use


def check_activations(activations: ActivationType, use: Use, method: str | None, on_cpu: bool) -> None:
    """ModelError if this model's weights cannot be multiplied by such activations. The kernels refuse the forms of
    weights that they do not multiply so."""
    if activations is ActivationType.model:
        return
    if not on_cpu:
        raise ModelError(f"--activations {activations} is computed on CPUs only: start without it")
    if method is None and use is Use.as_stored:
        raise ModelError(not_quantized("this model's"))


def not_quantized(weights: str) -> str:
    return (
        f"--activations int8 multiplies quantized weights, and {weights} are not quantized: add --quantize int8 or"
        " int4, or start without it"
    )


def refuse_dummy(layers: AnyLayers | None, load_format: LoadFormat) -> None:
    if load_format is LoadFormat.dummy and not isinstance(layers, QuantizedLayers | None):
        raise ModelError(
            f"--load-format dummy makes no weights quantized as {layers.description.method}: leave it out, or choose a"
            " model with a config.json"
        )


def refuse_quantized_experts(config: ModelConfig, quantize: Quantize | None) -> None:
    if config.moe is not None:
        raise ModelError(
            f"--quantize {quantize} is not supported on GPUs for the experts of this {config.model_type}: start without"
            " it"
        )


def slot_bytes(config: ModelConfig, num_shard: int, numbers: Dtype | KvCacheDtype) -> int:
    """Bytes of the keys and values of one token on one of `num_shard` shards. `numbers` is the cache's type."""
    vectors = 2 * max(1, config.num_kv_heads // num_shard)
    scale = SCALE_BYTES if isinstance(numbers, KvCacheDtype) else 0
    return config.num_layers * vectors * (config.head_size * NUMBER_BYTES[numbers] + scale)
