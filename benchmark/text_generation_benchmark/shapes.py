"""Sizes of the Llamas that are measured or simulated, and numbers computed from these sizes. Needs no torch."""

from dataclasses import dataclass

START_OF_TEXT, END_OF_TEXT = 1, 2  # special token ids


@dataclass(frozen=True, slots=True)
class LlamaShape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    max_positions: int = 4096
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tied: bool = True  # whether the output head is the embedding

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Number of elements in the weight matrices of one layer."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_size * self.hidden
        return attention + 3 * self.hidden * self.intermediate

    @property
    def head_weights(self) -> int:
        """Number of elements in the output head; the embedding has the same number."""
        return self.vocabulary * self.hidden

    @property
    def kv_numbers(self) -> int:
        """Number of elements in the keys and values of one token, in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_size

    def config(self, dtype: str) -> dict[str, object]:
        """The content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": dtype,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "bos_token_id": START_OF_TEXT,
            "eos_token_id": END_OF_TEXT,
        }


# Shapes of which checkpoints with random weights are written and served.
SHAPES = {
    "m100": LlamaShape(hidden=768, intermediate=2048, layers=12, heads=12, kv_heads=4, vocabulary=32000),
    "m1b": LlamaShape(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, vocabulary=32000),
    "m3b": LlamaShape(hidden=3072, intermediate=8192, layers=28, heads=24, kv_heads=8, vocabulary=128256),
}
# Llama 3.1, with the 8,192 positions that the GPU check needs.
LLAMA_8B = LlamaShape(4096, 14336, 32, 32, 8, 128256, 8192, rope_theta=500_000.0, rms_norm_eps=1e-5, tied=False)
LLAMA_70B = LlamaShape(8192, 28672, 80, 64, 8, 128256, 8192, rope_theta=500_000.0, rms_norm_eps=1e-5, tied=False)
LLAMA_405B = LlamaShape(16384, 53248, 126, 128, 8, 128256, 8192, rope_theta=500_000.0, rms_norm_eps=1e-5, tied=False)
