"""Tiny checkpoints of the model types that transformers computes, as transformers writes them."""

from pathlib import Path
from typing import Any

import torch

SHAPE: dict[str, Any] = dict(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
WINDOW = 20
BOTH: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
HEADS = {"head_dim": 16}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
SECOND = {"mlp_layer_types": ["dense", "sparse"]}
# Keys of 48 numbers and values of 32.
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}  # fmt: skip
SCALES = {
    "embedding_multiplier": 6.0, "logits_scaling": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.4,
}  # fmt: skip
# What differs from SHAPE. Families of the server are here too: transformers computes them if it is told to.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {},
    "qwen3": {**HEADS, **BOTH, "use_sliding_window": True},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    "qwen3_moe": {**EXPERTS, **HEADS},
    "gemma": HEADS,
    "gemma2": {**HEADS, **BOTH, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 9},
    "gemma3_text": {**HEADS, **BOTH, "query_pre_attn_scalar": 9},
    "phi": {},
    "phi3": {"sliding_window": WINDOW},
    "phimoe": {
        **LOCAL, "sliding_window": WINDOW, "attention_bias": True, "lm_head_bias": True,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 256, "short_mscale": 1.24,
            "long_mscale": 1.3, "short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [2.0] * 8,
        },
    },
    "gpt_neox": {"rotary_pct": 0.25},
    "gpt_bigcode": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "starcoder2": {"sliding_window": WINDOW},
    "cohere": {"use_qk_norm": True},
    "cohere2": {**HEADS, **BOTH},
    "granite": SCALES,
    "granitemoe": {**LOCAL, **SCALES},
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm4": HEADS,
    "ministral": {**HEADS, **BOTH},
    "ministral3": {
        **HEADS,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
        },
    },
    "olmo": {"clip_qkv": 2.0},
    "olmo2": {},
    "olmo3": BOTH,
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {**LOCAL, **HEADS, **BOTH},
    "glm": HEADS,
    "glm4_moe": {**ROUTED, **HEADS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "glm4_moe_lite": {**ROUTED, **LATENT, **SECOND, "n_group": 1, "topk_group": 1},
    "exaone4": {**BOTH, "sliding_window_pattern": "LG"},
    "exaone_moe": {**EXPERTS, **BOTH, **SECOND},
    "seed_oss": HEADS,
    "nemotron": {},
    "arcee": {},
    "apertus": {},
    "helium": HEADS,
    "ernie4_5": HEADS,
    "ernie4_5_moe": {"moe_intermediate_size": 32, "moe_k": 2, "moe_num_experts": 8, "moe_num_shared_experts": 1},
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": {**HEADS, "num_experts": 8, "moe_topk": 2},
    "dots1": {**ROUTED, **BOTH, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "granitemoeshared": {**LOCAL, **SCALES, "shared_intermediate_size": 32},
    "granitemoehybrid": {
        **SCALES, "shared_intermediate_size": 96, "num_local_experts": 0, "position_embedding_type": "rope",
        "layer_types": ["attention", "attention"],
    },
    "granite_swa": {**SCALES, **BOTH},
    "granitemoe_swa": {**LOCAL, **SCALES, **BOTH, "shared_intermediate_size": 32},
    "vaultgemma": {**HEADS, **BOTH, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 9},
    "deepseek_v2": {**ROUTED, **LATENT, "first_k_dense_replace": 1},
    "deepseek_v3": {**ROUTED, **LATENT, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    "minicpm3": LATENT,
    "cwm": {**HEADS, **BOTH},
    "minimax_m2": {**LOCAL, **HEADS},
    "persimmon": {},
    "jais2": {},
    "hyperclovax": {},
    "solar_open": {**ROUTED, **HEADS},
    "mellum": {**EXPERTS, **HEADS, **BOTH},
    "nanochat": {},
    "gpt2": {},
    "bitnet": {},
    "afmoe": {**EXPERTS, **HEADS, **BOTH},
    "cohere2_moe": {**EXPERTS, **HEADS, **BOTH},
    "flint": {**EXPERTS, **HEADS, **BOTH, "shared_expert_intermediate_size": 32},
    "laguna": {**EXPERTS, **HEADS, **BOTH, "shared_expert_intermediate_size": 32},
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "mimo_v2_flash": {**ROUTED, **HEADS, **BOTH, "v_head_dim": 8},
}  # fmt: skip
# A sink as large as the scores of some keys, so that it takes a part of a query's weight.
MEANS = {"norm": 1.0, "sinks": 4.0}


def make_model(path: Path, model_type: str, **changes: Any) -> torch.nn.Module:
    """Writes a tiny checkpoint under `path`, with no parameter at its default, and returns transformers' own model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**SHAPE, **MODELS.get(model_type, {}), **changes})
    return drawn(path, AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def drawn(path: Path, model: torch.nn.Module) -> torch.nn.Module:
    """Draws all parameters, and writes the model under `path`."""
    torch.manual_seed(0)
    model.eval()
    corrections = [(name, buffer) for name, buffer in model.named_buffers() if "correction_bias" in name]
    for name, parameter in [*model.named_parameters(), *corrections]:
        if parameter.dim() == 1:
            mean = next((mean for part, mean in MEANS.items() if part in name), 0.0)
            torch.nn.init.normal_(parameter, mean=mean, std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    return model


def expected_logprobs(model: torch.nn.Module, prompt: torch.Tensor, output: list[int]) -> torch.Tensor:
    """transformers' log-probabilities [new, V] for each step of our text."""
    with torch.no_grad():
        logits = model(torch.cat([prompt, torch.tensor(output)]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(dim=-1)
