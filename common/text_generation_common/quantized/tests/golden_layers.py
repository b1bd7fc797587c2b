"""Layers for tests: the golden files, which `make_goldens.py` writes with the libraries, and layers made of tensors."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from text_generation_common.quantized.announcement import announcement_of
from text_generation_common.quantized.layout import find_scheme
from text_generation_common.quantized.methods import description_of
from text_generation_common.quantized.tensors.reading import read_layer

TYPES = {
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}


@dataclass(frozen=True)
class Description:
    type: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    settings: dict
    shape: tuple[int, ...]
    tensors: dict[str, torch.Tensor]  # without W
    matrix: torch.Tensor

    def find(self, name):
        tensor = self.tensors.get(name)
        return None if tensor is None else Description(TYPES[tensor.dtype], tuple(tensor.shape))

    def scheme(self, layer="l"):
        return find_scheme(description_of(announcement_of(self.settings, "config.json")), layer, self.find)

    def read(self, layer="l"):
        return read_layer(self.scheme(layer), layer, self.shape, self.find, self.tensors.__getitem__)

    @property
    def stored_bytes(self):
        return sum(tensor.nbytes for tensor in self.tensors.values())


def golden_cases():
    """{name: case} of all golden files."""
    found = {}
    for path in sorted((Path(__file__).parent / "goldens").glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            # In one order: metadata come in another one in each process, and workers must collect the same tests.
            for case, text in sorted(file.metadata().items()):
                names = [name for name in file.keys() if name.startswith(f"{case}/")]  # noqa: SIM118
                tensors = {name.removeprefix(f"{case}/"): file.get_tensor(name) for name in names}
                said = json.loads(text)
                matrix = tensors.pop("W")
                found[case] = Case(said["settings"], tuple(said["shape"]), tensors, matrix)
    return found


GOLDEN = golden_cases()
