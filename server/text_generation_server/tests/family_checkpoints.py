"""Tiny checkpoints of all families, as transformers writes them."""

from pathlib import Path
from typing import Any

import torch

SHAPE: dict[str, Any] = dict(
    vocab_size=320, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128,
    "short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [2.0 + i for i in range(6)],
}  # fmt: skip
# (name of the family's model in transformers, what differs from SHAPE)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn as DeepSeek writes it": (
        "llama", {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2}},
    ),
    "llama, yarn with its own factor": (
        "llama", {"rope_parameters": YARN | {"attention_factor": 1.3, "truncate": False}},
    ),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "mistral, windows no text outgrows": ("mistral", {"sliding_window": 512}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3, biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "phi3": ("phi3", {"original_max_position_embeddings": 512}),
    "phi3, partial rope": ("phi3", {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 512}),
    "phi3, longrope": (
        "phi3",
        {
            "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 128,
            "max_position_embeddings": 512,
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 0, 1]}),
    "smollm3, every fourth": ("smollm3", {"num_hidden_layers": 4, "tie_word_embeddings": False}),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.4, "embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 3.0,
            "rms_norm_eps": 1e-2, "attention_bias": True,
        },
    ),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma, one kv head": ("gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "glm4": ("glm4", {"head_dim": 32}),
    "glm4, no biases": ("glm4", {"head_dim": 16, "attention_bias": False}),
    "cohere": ("cohere", {"logit_scale": 0.2}),
    "cohere, biases": ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
    "cohere2": ("cohere2", {"sliding_window": 512, "num_hidden_layers": 4}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "hidden_size": 128}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
    "qwen3_moe, shares of the chosen": (
        "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "granitemoe": (
        "granitemoe",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4},
    ),
    "gpt2": ("gpt2", {}),
    "gpt2, scaled by layer": (
        "gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 96, "activation_function": "relu"},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, sequential": (
        "gpt_neox", {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"},
    ),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "phi": ("phi", {}),
    "phi, most of each head is turned": (
        "phi", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "starcoder2": ("starcoder2", {}),
    "starcoder2, no biases": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode, many keys": ("gpt_bigcode", {"multi_query": False}),
    "granite, tied": ("granite", {"embedding_multiplier": 12.0, "tie_word_embeddings": True, "mlp_bias": True}),
}  # fmt: skip


def make_family(path: Path, variant: str) -> torch.nn.Module:
    """Writes a tiny checkpoint under `path`, and returns transformers' own model of it, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, changes = VARIANTS[variant]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SHAPE, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    return model
