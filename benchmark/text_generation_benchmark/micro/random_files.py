"""Writes models of random codes in each format of quantized weights: the files that `loading.py` measures."""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from text_generation_benchmark.shapes import END_OF_TEXT, LlamaShape
from text_generation_common.gguf.container import ARRAY, KINDS, MAGIC, TEXT
from text_generation_common.gguf.types import BY_NAME, TYPES
from text_generation_common.models.config import read_config
from text_generation_common.models.gguf_names import NAMES
from text_generation_common.models.tensors import linear_sizes, matrix_sizes, shapes

Tensors = Mapping[str, Tensor]  # by their endings


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).int()


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape) / 100).to(dtype)


def codes(*shape: int) -> Tensor:
    """Bytes that are also finite numbers of fp8, and halves of finite float16."""
    return torch.randint(0, 120, shape, dtype=torch.uint8)


def gptq(outputs: int, inputs: int) -> Tensors:
    groups, half = inputs // 128, torch.float16
    zeros = words(groups, outputs // 8)
    return {".qweight": words(inputs // 8, outputs), ".qzeros": zeros, ".scales": numbers(groups, outputs, dtype=half)}


def act_order(outputs: int, inputs: int) -> Tensors:
    return {**gptq(outputs, inputs), ".g_idx": (torch.randperm(inputs) // 128).int()}


def awq(outputs: int, inputs: int) -> Tensors:
    return {**gptq(outputs, inputs), ".qweight": words(inputs, outputs // 8)}


def int8(outputs: int, inputs: int) -> Tensors:
    return {".weight": codes(outputs, inputs).view(torch.int8), ".weight_scale": numbers(outputs, 1)}


def fp8(outputs: int, inputs: int) -> Tensors:
    scales = numbers(-(-outputs // 128), -(-inputs // 128))
    return {".weight": codes(outputs, inputs).view(torch.float8_e4m3fn), ".weight_scale_inv": scales}


def nvfp4(outputs: int, inputs: int) -> Tensors:
    scales = codes(outputs, inputs // 16).view(torch.float8_e4m3fn)
    return {".weight": codes(outputs, inputs // 2), ".weight_scale": scales, ".weight_scale_2": torch.tensor(1e-4)}


def mxfp4(experts: int, outputs: int, inputs: int) -> Tensors:
    groups = inputs // 32
    return {"_blocks": codes(experts, outputs, groups, 16), "_scales": codes(experts, outputs, groups)}


def nf4(outputs: int, inputs: int) -> Tensors:
    blocks = outputs * inputs // 64
    state = {"blocksize": 64, "shape": [outputs, inputs], "nested_blocksize": 256, "nested_offset": 0.01}
    return {
        ".weight": codes(outputs * inputs // 2, 1),
        ".weight.quant_map": torch.linspace(-1, 1, 16),
        ".weight.absmax": codes(blocks),
        ".weight.nested_absmax": numbers(-(-blocks // 256)),
        ".weight.nested_quant_map": torch.linspace(-1, 1, 256),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False}
WHOLE_NUMBERS = {"num_bits": 8, "type": "int", "symmetric": True}
PER_OUTPUT = {"targets": ["Linear"], "weights": {**WHOLE_NUMBERS, "strategy": "channel"}}
PER_TOKEN = {"input_activations": {**WHOLE_NUMBERS, "strategy": "token", "dynamic": True}}
INT8 = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": PER_OUTPUT}}
W8A8 = {**INT8, "config_groups": {"group_0": {**PER_OUTPUT, **PER_TOKEN}}}
SAFETENSORS: Mapping[str, tuple[Callable[..., Tensors], Mapping[str, Any]]] = {
    "gptq": (gptq, GPTQ),
    "act-order": (act_order, {**GPTQ, "desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}),
    "int8": (int8, INT8),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "mxfp4": (mxfp4, {"quant_method": "mxfp4"}),
}
BLOCKS = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
FORMATS = (*SAFETENSORS, *BLOCKS)
# What vLLM's build for CPUs serves, too.
OF_VLLM = {"GPTQ": (gptq, {**GPTQ, "sym": True}), "AWQ": SAFETENSORS["awq"], "w8a8": (int8, W8A8)}
EXPERTS = 4
# What config.json of gpt-oss has beside the fields of Llama. Its MLPs are experts, the only layers in MXFP4.
GPT_OSS = {
    "model_type": "gpt_oss", "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "head_dim": 64,
    "sliding_window": 128,
}  # fmt: skip


def write_model(folder: Path, name: str, shape: LlamaShape) -> tuple[Path, list[int]]:
    """The model, and the bytes of each of its tensors."""
    if name not in BLOCKS:
        return folder, _write_codes(folder, name, shape)
    file = folder / "model.gguf"
    return file, _write_blocks(file, name, shape)


def _write_codes(folder: Path, name: str, shape: LlamaShape) -> list[int]:
    made, settings = {**SAFETENSORS, **OF_VLLM}[name]
    family = GPT_OSS if name == "mxfp4" else {}
    fields = shape.config("bfloat16") | family | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(fields))
    config = read_config(folder)
    found = linear_sizes(config) if not family else {n: s for n, s in matrix_sizes(config).items() if s.experts}
    tensors = {n + ending: part for n, size in found.items() for ending, part in made(*size.shape).items()}
    others = shapes(config, lambda layer, _: {} if layer in found else None)
    tensors |= {key: numbers(*its, dtype=torch.bfloat16) for key, its in others.items()}
    tensors[f"{config.names.embedding}.weight"][END_OF_TEXT] = 0  # never the likeliest token
    save_file(tensors, folder / "model.safetensors")
    return [tensor.nbytes for tensor in tensors.values()]


def _write_blocks(file: Path, kind: str, shape: LlamaShape) -> list[int]:
    """All matrices, the embedding too, are blocks of one type."""
    (file.parent / "config.json").write_text(json.dumps(shape.config("bfloat16")))
    found = shapes(replace(read_config(file.parent), names=NAMES))
    number = next(number for number, type in TYPES.items() if type.name == kind)
    entries, data, sizes = b"", list[bytes](), list[int]()
    for name, its in found.items():
        is_matrix = len(its) > 1
        tensor = codes(*its[:-1], BY_NAME[kind].row_bytes(its[-1])) if is_matrix else numbers(*its)
        content = tensor.view(torch.uint8).numpy().tobytes()
        entries += _text(name) + struct.pack(f"<I{len(its)}Q", len(its), *reversed(its))
        entries += struct.pack("<IQ", number if is_matrix else 0, sum(map(len, data)))
        sizes.append(len(content))
        data.append(content + bytes(-len(content) % 32))
    keys = {
        "general.architecture": "llama", "llama.block_count": shape.layers, "llama.context_length": shape.max_positions,
        "llama.embedding_length": shape.hidden, "llama.feed_forward_length": shape.intermediate,
        "llama.attention.head_count": shape.heads, "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": shape.rms_norm_eps, "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [f"token{id}" for id in range(shape.vocabulary)],
        "tokenizer.ggml.scores": [0.0] * shape.vocabulary,
    }  # fmt: skip
    start = MAGIC + struct.pack("<IQQ", 3, len(found), len(keys))
    start += b"".join(_text(name) + _value(value) for name, value in keys.items()) + entries
    file.write_bytes(b"".join([start, bytes(-len(start) % 32), *data]))
    return sizes


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _value(value: object) -> bytes:
    """A value of a key, behind the number of its kind. All elements of a list have the kind of the first."""
    if isinstance(value, list):
        each = [_value(element) for element in value]
        return struct.pack("<I", ARRAY) + each[0][:4] + struct.pack("<Q", len(each)) + b"".join(e[4:] for e in each)
    if isinstance(value, str):
        return struct.pack("<I", TEXT) + _text(value)
    kind = next(number for number, letter in KINDS.items() if letter == ("I" if isinstance(value, int) else "f"))
    return struct.pack(f"<I{KINDS[kind]}", kind, value)
