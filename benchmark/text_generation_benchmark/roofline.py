"""The least time that a step can take: what each of its parts has to read and to compute, and how fast the machine does
both. A step's parts come one after the other, so their least times add up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from text_generation_benchmark.workload import Workload
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import read_config
from text_generation_common.models.tensors import expert_shapes, shapes

NUMBER_BYTES = 2  # bfloat16
LOGIT_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What all cores together were measured to reach."""

    bandwidth: float  # bytes read per second
    flops: float  # floating-point operations per second of matrix products; a product and a sum count as two

    def higher(self, other: "Ceilings") -> "Ceilings":
        return Ceilings(max(self.bandwidth, other.bandwidth), max(self.flops, other.flops))


@dataclass(frozen=True, slots=True)
class StepPart:
    """A part of a step: bytes that it has to read, and floating-point operations of its products."""

    name: str
    bytes: int
    flops: int = 0

    def least_s(self, ceilings: Ceilings) -> float:
        return max(self.bytes / ceilings.bandwidth, self.flops / ceilings.flops)

    def binds(self, ceilings: Ceilings) -> str:
        """What the least time is spent with."""
        return "memory" if self.bytes / ceilings.bandwidth >= self.flops / ceilings.flops else "products' peak"


def mean_ceilings(measured: Sequence[Ceilings]) -> Ceilings:
    return Ceilings(mean(each.bandwidth for each in measured), mean(each.flops for each in measured))


def least_s(parts: Sequence[StepPart], ceilings: Ceilings) -> float:
    return sum(part.least_s(ceilings) for part in parts)


def bound_by(parts: Sequence[StepPart], ceilings: Ceilings) -> str:
    """The part with the largest share of the least time, and what it is spent with."""
    most = max(parts, key=lambda part: part.least_s(ceilings))
    return f"{most.name}: {most.binds(ceilings)}, {most.least_s(ceilings) / least_s(parts, ceilings):.0%}"


@dataclass(frozen=True, slots=True)
class LoadWork:
    """What the requests of a load need, all of them sent at once: one step with all prompts, which makes the first
    tokens, and `steps` decode steps."""

    prompts: Sequence[StepPart]
    step: Sequence[StepPart]  # in the middle of the run
    steps: int

    def least_s(self, ceilings: Ceilings) -> float:
        return least_s(self.prompts, ceilings) + self.steps * least_s(self.step, ceilings)


def load_work(model: Path, workload: Workload, experts_read: float | None = None) -> LoadWork:
    """In bfloat16. `experts_read`: the experts of each layer that a decode step reads; None: all."""
    config, rows = read_config(model), workload.concurrency
    context = workload.input_tokens + workload.new_tokens // 2
    prompts = step_parts(config, rows, workload.input_tokens, workload.input_tokens)
    return LoadWork(prompts, step_parts(config, rows, 1, context, experts_read), workload.new_tokens - 1)


def step_parts(
    config: ModelConfig,
    rows: int,
    tokens: int,
    context: int,
    experts_read: float | None = None,
    number_bytes: int = NUMBER_BYTES,
) -> tuple[StepPart, ...]:
    """A step that computes the last `tokens` tokens of each of `rows` rows of `context` tokens, and samples a token of
    each row. A decode step computes one token of each row. `number_bytes`: of a weight, a key or a value."""
    head = config.vocab_size * config.hidden_size
    chosen = None if config.moe is None else float(config.moe.chosen)
    weights = weight_bytes(config, experts_read) // NUMBER_BYTES - head
    return (
        StepPart("weights", weights * number_bytes, 2 * rows * tokens * (matrix_numbers(config, chosen) - head)),
        attention_part(config, rows, tokens, context, number_bytes),
        StepPart("head", head * number_bytes, 2 * rows * head),
        StepPart("sampling", rows * config.vocab_size * LOGIT_BYTES),
    )


def attention_part(
    config: ModelConfig, rows: int, tokens: int, context: int, number_bytes: int = NUMBER_BYTES
) -> StepPart:
    """Each key and value that a token of a row sees is read once for the row. A query is multiplied with each key that
    it sees, and each value with its weight."""
    pairs = sum(_pairs(tokens, context, context if rule.window is None else rule.window) for rule in config.rules)
    flops = 4 * rows * config.num_heads * config.head_size * pairs
    return StepPart("attention", rows * kv_bytes(config, context, tokens) * number_bytes // NUMBER_BYTES, flops)


def _pairs(tokens: int, context: int, window: int) -> int:
    """Pairs of one of the last `tokens` tokens of `context` and a token that it sees: itself, and those before it, but
    `window` of them at most."""
    full = min(max(context - window, 0), tokens)  # tokens that see `window` tokens
    # The other tokens see first, first + 1, … tokens.
    first = context - tokens + 1
    return full * window + math.comb(first + tokens - full, 2) - math.comb(first, 2)


def weight_bytes(config: ModelConfig, experts_read: float | None = None) -> int:
    """The bytes of all weights but those embeddings of which a step reads a few rows: the input embedding, if the head
    has weights of its own, and the embedding of positions. Of a mixture's experts `experts_read` are counted in each
    layer (not rounded: it may be a mean), or all if it is None.
    """
    return round(_numbers(config, experts_read, least_dimensions=1) * NUMBER_BYTES)


def matrix_numbers(config: ModelConfig, experts: float | None) -> int:
    """The numbers that each token is multiplied with, those of the head included. Of a mixture's experts, `experts`
    compute a token."""
    return round(_numbers(config, experts, least_dimensions=2))


def _numbers(config: ModelConfig, experts: float | None, least_dimensions: int) -> float:
    every_expert = set()
    for i in range(config.num_layers):
        if config.moe is not None and config.has_experts(i):
            names = config.names.layer(i)
            every_expert |= expert_shapes(config, config.moe, names).keys() - {f"{names.router}.weight"}
    share = 1.0
    if config.moe is not None and experts is not None:
        share = experts / config.moe.experts
    looked_up = {f"{config.names.positions}.weight"} if config.learned_positions else set()
    if not config.tie_word_embeddings:
        looked_up.add(f"{config.names.embedding}.weight")
    return sum(
        math.prod(size) * (share if name in every_expert else 1)
        for name, size in shapes(config).items()
        if name not in looked_up and len(size) >= least_dimensions
    )


def kv_bytes(config: ModelConfig, context: int, tokens: int = 1) -> int:
    """The keys and values that the last `tokens` tokens of a row of `context` tokens see, in all layers."""
    seen = sum(min(context, context if rule.window is None else rule.window + tokens - 1) for rule in config.rules)
    return seen * 2 * config.num_kv_heads * config.head_size * NUMBER_BYTES
