"""Writes `peft_goldens.json`: what PEFT makes of the adapters of `peft_fixtures.json`. Run by `make goldens-peft`, in
an environment with PEFT.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft_fixtures import CASES, GOLDENS, NEW, PICKED, PROMPT, drawn, make_base
from safetensors.torch import load_file


def golden(case: str) -> dict[str, Any]:
    base = make_base(case)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **CASES[case][2])).eval()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = drawn(name.replace(".default", ""), parameter.shape)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        of_base = name.removeprefix("base_model.model.").replace(".base_layer", "")
        expected = before[of_base] if name.endswith("base_layer.weight") else drawn(name, tensor.shape)
        assert torch.equal(tensor, expected), name
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


if __name__ == "__main__":
    lines = [f"{json.dumps(case)}: {json.dumps(golden(case), sort_keys=True)}" for case in CASES]
    GOLDENS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
