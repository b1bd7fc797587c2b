"""Writes `peft_goldens.json`: what PEFT makes of the adapters of `peft_fixtures.json`. Run by `make goldens-peft`, in
an environment with PEFT.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft_fixtures import CASES, GOLDENS, NEW, PICKED, PROMPT, drawn, make_base
from safetensors.torch import load_file, save_file

# Modules within a layer that were linear layers of each expert, before version 5 of transformers.
APART = {"w1", "w2", "w3"}


def golden(case: str) -> dict[str, Any]:
    base, settings = make_base(case), CASES[case][2]
    with TemporaryDirectory() as folder:
        if set(settings["target_modules"]) >= APART:
            model = read_apart(Path(folder), base, settings)
        else:
            model = written(Path(folder), base, settings)
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(NEW):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        rows = model(torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    return {
        "config": config,
        "tensors": {name: list(tensor.shape) for name, tensor in sorted(tensors.items())},
        "tokens": ids[len(PROMPT) :],
        "logprobs": [[round(value, 6) for value in row] for row in rows[:, PICKED].tolist()],
    }


def written(folder: Path, base: torch.nn.Module, settings: dict[str, Any]) -> torch.nn.Module:
    """The model with the adapter, which PEFT has written."""
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = drawn(name.replace(".default", ""), parameter.shape)
    model.save_pretrained(folder)
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        of_base = name.removeprefix("base_model.model.").replace(".base_layer", "")
        expected = before[of_base] if name.endswith("base_layer.weight") else drawn(name, tensor.shape)
        assert torch.equal(tensor, expected), name
    return model


def read_apart(folder: Path, base: torch.nn.Module, settings: dict[str, Any]) -> torch.nn.Module:
    """The model with an adapter as older versions wrote it: with matrices for each expert of a Mixtral, which PEFT
    reads as matrices of its parameters."""
    config, rank = base.config, settings["r"]
    width, inner = config.hidden_size, config.intermediate_size
    block = "block_sparse_moe.experts"
    sizes = {"self_attn.q_proj": (width, width)}
    for expert in range(config.num_local_experts):
        sizes |= {f"{block}.{expert}.{name}": (inner, width) for name in ("w1", "w3")}
        sizes[f"{block}.{expert}.w2"] = (width, inner)
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for module, (outputs, inputs) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            for end, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                tensors[f"{name}.lora_{end}.weight"] = drawn(f"{name}.lora_{end}.weight", shape)
    save_file(tensors, folder / "adapter_model.safetensors")
    LoraConfig(task_type="CAUSAL_LM", **settings).save_pretrained(folder)
    return PeftModel.from_pretrained(base, folder).eval()


if __name__ == "__main__":
    lines = [f"{json.dumps(case)}: {json.dumps(golden(case), sort_keys=True)}" for case in CASES]
    GOLDENS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
