"""Shapes of four families, written with random weights by transformers, and the Llama of equal bytes."""

from collections.abc import Mapping
from pathlib import Path

import torch

from text_generation_benchmark.checkpoint import write_tokenizer
from text_generation_benchmark.roofline import NUMBER_BYTES
from text_generation_benchmark.shapes import END_OF_TEXT, START_OF_TEXT, LlamaShape
from text_generation_common.models.architecture import ModelConfig

HEAD_SIZE = 64  # numbers in a head of the Llamas
STEP = 32  # the intermediate sizes of the Llamas are multiples of this

# Fields of config.json; the sizes of the first three are those of the published models.
FAMILIES: Mapping[str, Mapping[str, object]] = {
    "Qwen3-0.6B": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 4096,
    },
    "Gemma-3-1B": {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
        "sliding_window": 512, "query_pre_attn_scalar": 256, "max_position_embeddings": 4096,
    },
    "BLOOM-560m": {
        "model_type": "bloom", "hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880,
        "seq_length": 4096,
    },
    # 0.91 billion parameters, of which a token uses 0.33 billion.
    "Qwen3-MoE-0.9B": {
        "model_type": "qwen3_moe", "hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "num_experts": 32,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 50304, "max_position_embeddings": 4096,
    },
}  # fmt: skip


def write_family(out: Path, fields: Mapping[str, object]) -> None:
    """Writes a checkpoint with random weights, in bfloat16, the same every time, and a tokenizer that fits it.

    Like `write_checkpoint`, it makes the embedding of the end-of-text token zero, so that no text ends early.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    ends = {"bos_token_id": START_OF_TEXT, "eos_token_id": END_OF_TEXT, "tie_word_embeddings": True}
    config = AutoConfig.for_model(**fields, **ends)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight[END_OF_TEXT] = 0
    model.save_pretrained(out)
    write_tokenizer(out, config.vocab_size)


def llama_of(config: ModelConfig, weights: int) -> LlamaShape:
    """A Llama with this model's layers, hidden size and vocabulary, whose weights take `weights` bytes: its
    intermediate size makes up for what the two differ in."""
    heads = config.hidden_size // HEAD_SIZE
    llama = LlamaShape(config.hidden_size, 0, config.num_layers, heads, heads // 2, config.vocab_size)
    missing = weights / NUMBER_BYTES - llama.head_weights - llama.layers * llama.layer_weights
    intermediate = STEP * round(missing / (3 * llama.hidden * llama.layers * STEP))
    return LlamaShape(llama.hidden, intermediate, llama.layers, llama.heads, llama.kv_heads, llama.vocabulary)
