"""Tiny checkpoints of all families, as transformers writes them."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from family_ranges import make_decisive

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

SHAPE: dict[str, Any] = dict(
    vocab_size=320, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 30000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
}
# (name of the family's model in transformers, what differs from SHAPE)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = TABLES["variants"]


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
            draw_vector(name, parameter, config, calm)
        else:
            is_turned = model_type == "gpt2" and NORM.search(name) is None and ".h." in name  # [inputs, outputs]
            inputs = parameter.shape[0 if is_turned else -1]
            gain = next((gain for part, gain in GAINS if re.search(part, name)), 1.0)
            torch.nn.init.normal_(parameter, std=(CALM_GAIN if calm else gain) * inputs**-0.5)
    if calm:
        make_decisive(model)
    model.save_pretrained(path)
    return model


def draw_vector(
    name: str, parameter: torch.nn.Parameter, config: Any, calm: bool, numbers: torch.Tensor | None = None
) -> None:
    """Draws a bias, the weight of a norm, or the sinks of attention. `numbers`: in the place of random ones, whose
    standard deviation is 1."""

    def draw(mean: float, std: float) -> None:
        if numbers is None:
            torch.nn.init.normal_(parameter, mean=mean, std=std)
        else:
            parameter.data = mean + std * numbers

    if "sinks" in name and not calm:
        draw(20.0, 10.0)
        return
    mean = 0.0
    if NORM.search(name) and name.endswith("weight"):
        # Norms of heads alone decide how large scores are. Gemma's norms multiply by 1 + weight.
        mean = 4.0 if re.search("[qk]_norm", name) and not calm else 1.0
        if config.model_type.startswith("gemma"):
            # What MLPs add is normed, and small beside embeddings that are multiplied by the root of the hidden size.
            mean = 3.0 if "post_feedforward" in name and not calm else mean
            mean -= 1.0
    draw(mean, 0.3)
    if FINAL_NORM.search(name) and not calm:
        parameter.data *= getattr(config, "logits_scaling", 1.0) / (getattr(config, "logit_scale", None) or 1.0)
