"""Tiny checkpoints of all families, as transformers writes them."""

import re
from pathlib import Path
from typing import Any

import torch
from family_ranges import make_decisive

SHAPE: dict[str, Any] = dict(
    vocab_size=320, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128,
    "short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [2.0 + i for i in range(6)],
}  # fmt: skip
ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 30000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
}
GPT_OSS_YARN = {**YARN, "rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
ONE_WINDOW = {"use_sliding_window": True, "sliding_window": 20}
WINDOWS = ONE_WINDOW | {"max_window_layers": 1}
# (name of the family's model in transformers, what differs from SHAPE)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn as DeepSeek writes it": (
        "llama", {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2}},
    ),
    "llama, yarn with its own factor": (
        "llama", {"rope_parameters": YARN | {"attention_factor": 1.3, "truncate": False}},
    ),
    "mistral, windows": ("mistral", {"sliding_window": 20}),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "mistral, windows no text outgrows": ("mistral", {"sliding_window": 512}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen2, windows": ("qwen2", WINDOWS),
    "qwen3, windows": ("qwen3", WINDOWS | {"head_dim": 32}),
    "qwen3, biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "phi3, windows": ("phi3", {"original_max_position_embeddings": 512, "sliding_window": 20}),
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
    "smollm3, windows": (
        "smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 0, 1], **ONE_WINDOW},
    ),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.4, "embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 3.0,
            "rms_norm_eps": 1e-2, "attention_bias": True,
        },
    ),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma, one kv head": ("gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "sliding_window": 20, "rms_norm_eps": 0.5,
        },
    ),
    "gemma2, no caps": (
        "gemma2",
        {
            "head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True,
            "query_pre_attn_scalar": 20,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 20,
            "num_key_value_heads": 1,
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            "head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 20, "num_hidden_layers": 4,
            "rms_norm_eps": 0.5,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": ROPES,
        },
    ),
    "gemma3_text, one in six": (
        "gemma3_text",
        {
            "head_dim": 16, "sliding_window": 20, "num_hidden_layers": 7, "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 20,
        },
    ),
    "olmo2": ("olmo2", {"rms_norm_eps": 0.1}),
    "olmo2, biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "olmo3": (
        "olmo3",
        {"sliding_window": 20, "num_hidden_layers": 5, "rope_parameters": ROPES | {"full_attention": YARN}},
    ),
    "olmo3, windows no text outgrows": ("olmo3", {"sliding_window": 512, "num_hidden_layers": 4}),
    "glm": ("glm", {"head_dim": 32}),
    "glm, no biases": ("glm", {"head_dim": 16, "attention_bias": False}),
    "glm4": ("glm4", {"head_dim": 32}),
    "glm4, no biases": ("glm4", {"head_dim": 16, "attention_bias": False}),
    "cohere": ("cohere", {"logit_scale": 0.2}),
    "cohere, biases": ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
    "cohere2": ("cohere2", {"sliding_window": 512, "num_hidden_layers": 4}),
    "cohere2, windows": ("cohere2", {"sliding_window": 20, "num_hidden_layers": 4}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "hidden_size": 128}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
    "qwen3_moe, shares of the chosen": (
        "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "mlp_only_layers": [1],
            "shared_expert_intermediate_size": 96,
        },
    ),
    "qwen2_moe, shares of the chosen, windows": (
        "qwen2_moe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
            "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "qkv_bias": False, **ONE_WINDOW,
            "max_window_layers": 2,
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 48}),
    "olmoe, biases, shares of the chosen": (
        "olmoe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "norm_topk_prob": True,
            "attention_bias": True, "num_key_value_heads": 4,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 20,
            "swiglu_limit": 1.5, "rope_parameters": GPT_OSS_YARN,
        },
    ),
    "gpt_oss, no biases": (
        "gpt_oss",
        {
            "num_local_experts": 4, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 30,
            "attention_bias": False, "swiglu_alpha": 1.2, "layer_types": ["full_attention"] * 2 + ["sliding_attention"],
            "intermediate_size": 96,
        },
    ),
    "qwen3_moe, windows": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **ONE_WINDOW},
    ),
    "granitemoe": (
        "granitemoe",
        {
            "num_local_experts": 6, "num_experts_per_tok": 2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
            "attention_multiplier": 0.15,
        },
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
    "starcoder2, windows": ("starcoder2", {"sliding_window": 20}),
    "starcoder2, no biases": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode, many keys": ("gpt_bigcode", {"multi_query": False}),
    "bloom": ("bloom", {}),
    "bloom, six heads": ("bloom", {"num_attention_heads": 6, "hidden_size": 96}),
    "falcon, as 7B": ("falcon", {}),
    "falcon, as 40B": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96}),
    "falcon, as 11B": (
        "falcon",
        {
            "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
    ),
    "falcon, as RW": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "mpt": ("mpt", {}),
    "mpt, six heads": (
        "mpt", {"num_attention_heads": 6, "hidden_size": 96, "attn_config": {"softmax_scale": 0.2}},
    ),
    "opt": ("opt", {"ffn_dim": 160}),
    "opt, no biases": ("opt", {"ffn_dim": 96, "enable_bias": False, "activation_function": "gelu"}),
    "granite, tied": ("granite", {"embedding_multiplier": 12.0, "tie_word_embeddings": True, "mlp_bias": True}),
}  # fmt: skip


# (a part of a matrix's name, its gain): numbers of the matrix have the standard deviation gain / sqrt(inputs). So
# scores of attention reach about ±60, inputs of activations ±10 and logits ±40, as in trained models: with small
# weights a missing soft-cap, or a norm in the wrong place, would hardly change the logits.
GAINS = (
    ("q_proj|k_proj|qkv|query_key_value|c_attn", 4.0),
    ("gate_proj|up_proj|gate_up|fc1|fc_in|c_fc|h_to_4h|input_linear|router|[.]gate[.]", 3.0),
    ("embed|lm_head|wte|wpe", 9.0),
)
CALM_GAIN = 1.6  # the gain of every matrix of a calm model
NORM = re.compile("norm|ln_")
FINAL_NORM = re.compile("^[^0-9]*(final_layer_?norm|ln_f|norm_f|model[.]norm)[.]")


def first_variant(model_type: str) -> str:
    return next(name for name, (family, _) in VARIANTS.items() if family == model_type)


def make_family(path: Path, variant: str, calm: bool = False) -> torch.nn.Module:
    """Writes a tiny checkpoint under `path`, and returns transformers' own model of it, in float32. No parameter has
    its default. `calm`: weights so small that bfloat16 chooses nearly the tokens of float32, and the same experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, changes = VARIANTS[variant]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SHAPE, **changes})
    # transformers' eager attention adds Falcon's slopes twice: to the mask and to the scores.
    attention = "sdpa" if model_type == "falcon" else "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            _draw_vector(name, parameter, config, calm)
        else:
            is_turned = model_type == "gpt2" and NORM.search(name) is None and ".h." in name  # [inputs, outputs]
            inputs = parameter.shape[0 if is_turned else -1]
            gain = next((gain for part, gain in GAINS if re.search(part, name)), 1.0)
            torch.nn.init.normal_(parameter, std=(CALM_GAIN if calm else gain) * inputs**-0.5)
    if calm:
        make_decisive(model)
    model.save_pretrained(path)
    return model


def _draw_vector(name: str, parameter: torch.nn.Parameter, config: Any, calm: bool) -> None:
    """Draws a bias, the weight of a norm, or the sinks of attention."""
    if "sinks" in name and not calm:
        torch.nn.init.normal_(parameter, mean=20.0, std=10.0)
        return
    mean = 0.0
    if NORM.search(name) and name.endswith("weight"):
        # Norms of heads alone decide how large scores are. Gemma's norms multiply by 1 + weight.
        mean = 4.0 if re.search("[qk]_norm", name) and not calm else 1.0
        if config.model_type.startswith("gemma"):
            # What MLPs add is normed, and small beside embeddings that are multiplied by the root of the hidden size.
            mean = 3.0 if "post_feedforward" in name and not calm else mean
            mean -= 1.0
    torch.nn.init.normal_(parameter, mean=mean, std=0.3)
    if FINAL_NORM.search(name) and not calm:
        parameter.data *= getattr(config, "logits_scaling", 1.0) / (getattr(config, "logit_scale", None) or 1.0)
