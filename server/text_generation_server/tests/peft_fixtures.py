"""Tiny models, and the adapters that PEFT makes of them.

`peft_goldens.json` has what PEFT wrote and computed: adapter_config.json, the names and shapes of the tensors, and a
text with some log-probabilities. All numbers come from a generator of their own, so a test makes the same files again.
"""

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

TABLE = json.loads(Path(__file__).with_suffix(".json").read_text())
CASES: dict[str, list[Any]] = TABLE["cases"]  # the model's type, what differs from `shape`, settings of LoraConfig
GOLDENS = Path(__file__).with_name("peft_goldens.json")
PROMPT = [5, 17, 230, 99, 42, 7, 301, 64, 12]
NEW = 8
PICKED = list(range(0, 320, 20))  # ids whose log-probabilities are kept


def make_base(case: str) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, changes, _ = CASES[case]
    config = AutoConfig.for_model(model_type, **{**TABLE["shape"], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        parameter.data = drawn(name, parameter.shape)
    return model.eval()


def drawn(name: str, shape: Any) -> Tensor:
    """Numbers that every version of every library draws alike: whole ones, of which few bits are kept."""
    whole = np.random.default_rng(crc32(name.encode())).integers(-127, 128, tuple(shape), dtype=np.int8)
    numbers = torch.from_numpy(whole).float() / 73  # a standard deviation of 1
    if len(shape) == 1:
        return 0.3 * numbers + (name.endswith("weight") and 1.0)  # weights of norms, and biases
    if name.endswith("lora_embedding_A"):
        return numbers * shape[0] ** -0.5
    return numbers if "embed" in name or ".wte" in name else numbers * shape[-1] ** -0.5


def write_golden_adapter(folder: Path, golden: dict[str, Any], base: torch.nn.Module) -> None:
    """What PEFT wrote."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(golden["config"]))
    own, copied = base.state_dict(), ".base_layer.weight"
    tensors = {}
    for name, shape in golden["tensors"].items():
        if name.endswith(copied):
            tensors[name] = own[name.removeprefix("base_model.model.").replace(copied, ".weight")].clone()
        else:
            tensors[name] = drawn(name, shape)
    save_file(tensors, folder / "adapter_model.safetensors")
