"""What a model is built from: its sizes, and the facts in which it differs from other models.

ModelConfig ── what config.json says
  ├─ TensorNames             where the weights are
  ├─ Norm                    the norms' kind
  ├─ Branches                what attention and MLP read
  ├─ Moe                     its mixtures of experts
  ├─ Biases                  which linear layers have one
  ├─ Multipliers             constant factors of embedding, layers and logits
  └─ AttentionRule, a layer  how it attends
       └─ Rope               how positions turn queries and keys
"""

from dataclasses import dataclass, field
from enum import Enum

from text_generation_common.flags.kinds import Dtype
from text_generation_common.models.names import TensorNames
from text_generation_common.models.rope_config import Rope


class Activation(Enum):
    """The functions between the linear layers of an MLP."""

    silu = "x / (1 + e^-x)"
    gelu_tanh = "x (1 + tanh(sqrt(2 / π) (x + 0.044715 x³))) / 2"
    gelu = "x (1 + erf(x / sqrt(2))) / 2"
    relu = "max(x, 0)"


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """What lies between the products of an expert: (up + 1) * gate / (1 + e^(-slope gate)), with gate and up cut off at
    `limit`, and up at -limit, too."""

    limit: float
    slope: float


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How one layer attends."""

    scale: float  # multiplies the scores
    rope: Rope | None  # None: positions do not turn queries and keys
    # One for each query head of the whole model: scores grow by slope * (position of the key - position of the query).
    slopes: tuple[float, ...] | None = None
    sinks: bool = False  # each query head has the score of one more key, whose value is 0
    window: int | None = None  # a token sees this many tokens, itself included; None: all tokens up to itself
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)


@dataclass(frozen=True, slots=True)
class Norm:
    """The norms of hidden states. A centred norm is a LayerNorm, any other an RMSNorm."""

    eps: float
    centred: bool = False
    bias: bool = False
    plus_one: bool = False  # the files have the weight minus 1
    rounded_last: bool = False  # an RMSNorm's product with its weight is rounded, and not what the weight multiplies


class Branches(Enum):
    """What attention and MLP of a layer read, and where their results go."""

    sequential = "x += attention(norm(x)); x += mlp(norm'(x))"
    parallel = "x += attention(norm(x)) + mlp(norm(x))"
    parallel_two_norms = "x += attention(norm(x)) + mlp(norm'(x))"


@dataclass(frozen=True, slots=True)
class Moe:
    """A mixture of experts in the place of an MLP. Each expert is a gated MLP with silu."""

    experts: int
    chosen: int  # experts that compute a token
    intermediate_size: int  # the size between the products of one expert
    over_chosen: bool  # scores are a softmax over the chosen experts; otherwise over all
    dense_layers: frozenset[int] = frozenset()  # layers with an MLP instead of experts
    clamped: ClampedGate | None = None  # the gate of experts, if it is another than silu
    shared_size: int = 0  # the size between the products of an MLP that computes every token; 0: there is none


@dataclass(frozen=True, slots=True)
class Biases:
    """Which of a layer's linear layers add a bias."""

    qkv: bool = False
    attention_output: bool = False
    mlp: bool = False
    head: bool = False
    experts: bool = False  # and the router


@dataclass(frozen=True, slots=True)
class Multipliers:
    """embedding * h0; x + residual * layer(x); logits * head(x)."""

    embedding: float = 1.0
    rounded: bool = False  # the embedding's factor is rounded to the model's type
    residual: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True, slots=True)
class Converted:
    """What the files were made of: adapters belong to these."""

    names: TensorNames
    pairs: bool  # rows of queries and keys that are turned together are neighbours in the files, and were not before


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model_type: str
    names: TensorNames
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int  # tokens of the longest sequence, rope scaling included
    rules: tuple[AttentionRule, ...]  # one for each layer
    norm: Norm
    tie_word_embeddings: bool
    dtype: Dtype
    eos_token_ids: tuple[int, ...]
    biases: Biases = Biases()
    multipliers: Multipliers = Multipliers()
    branches: Branches = Branches.sequential
    activation: Activation = Activation.silu
    gated: bool = True  # MLP: down(activation(gate(x)) * up(x)); otherwise down(activation(up(x)))
    query_key_norm: bool = False  # each head of queries and keys has an RMSNorm, before positions turn it
    heads_normed_together: bool = False  # all query heads have one RMSNorm, and all key heads another
    moe: Moe | None = None
    post_norms: bool = False  # the results of attention and MLP have norms of their own, before they are added
    logits_softcap: float | None = None  # logits become softcap * tanh(logit / softcap)
    embedding_norm: bool = False  # the embeddings of tokens are normed
    learned_positions: bool = False  # an embedding of each position is added to the token's
    position_offset: int = 0  # the row of position 0 in the embedding of positions
    converted: Converted | None = None  # set if the files were made of others
    unknown_fields: tuple[str, ...] = field(default=())  # unknown fields of config.json, which have no effect

    @property
    def num_layers(self) -> int:
        return len(self.rules)

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different ropes of the layers, in order."""
        return tuple(dict.fromkeys(rule.rope for rule in self.rules if rule.rope is not None))
