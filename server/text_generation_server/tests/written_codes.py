"""Writes random layers in each format of quantized checkpoints, by the format's definition, and their matrices."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GENERATOR = torch.Generator()
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = torch.linspace(-1, 1, 16) ** 3  # any table: the file has it
# Ends of the names of layers that are quantized, and of those of experts in some families.
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "put_linear")


@dataclass(frozen=True)
class Written:
    tensors: Mapping[str, Tensor]  # by their endings
    matrix: Tensor  # [N, K]


def whole(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=GENERATOR)


def scales_of(bits: int, *shape: int) -> Tensor:
    """Scales with which random integers of `bits` bits become weights that deviate by about 0.15."""
    return (torch.rand(shape, generator=GENERATOR) + 0.5) * 0.5 / 2**bits


def words(rows: Tensor, bits: int) -> Tensor:
    """Rows of numbers as words of 32 bits, the first number in the lowest bits."""
    stream = (rows.unsqueeze(-1) >> torch.arange(bits) & 1).flatten(1)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 32))
    return (stream.view(len(rows), -1, 32) << torch.arange(32)).sum(-1).to(torch.int32)


def by_input(numbers: Tensor, size: int, inputs: int) -> Tensor:
    return numbers.float().repeat_interleave(size, dim=1)[:, :inputs]


def gptq(n: int, k: int, *, bits: int, size: int, symmetric: bool = False, act_order: bool = False) -> Written:
    groups = torch.arange(k) // size
    groups = groups[torch.randperm(k, generator=GENERATOR)] if act_order else groups
    q, count = whole(0, 2**bits, n, k), -(-k // size)
    z = torch.full((n, count), 2 ** (bits - 1)) if symmetric else whole(1, 2**bits, n, count)
    scales = scales_of(bits, n, count).half()
    tensors = {
        ".qweight": words(q, bits).T,
        ".qzeros": words((z.T - 1) % 2**bits, bits),
        ".scales": scales.T,
        ".g_idx": groups.int(),
        ".bias": torch.zeros(n, dtype=torch.float16),  # as old files have
    }
    return Written(tensors, scales.float()[:, groups] * (q - z[:, groups]))


def awq(n: int, k: int, *, size: int) -> Written:
    q, z, scales = whole(0, 16, n, k), whole(0, 16, n, k // size), scales_of(4, n, k // size).half()
    columns = torch.arange(n).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
    tensors = {".qweight": words(q.T[:, columns], 4), ".qzeros": words(z.T[:, columns], 4), ".scales": scales.T}
    return Written(tensors, by_input(scales, size, k) * (q - by_input(z, size, k)))


def packed(n: int, k: int, *, bits: int, size: int, symmetric: bool) -> Written:
    q, scales = whole(0, 2**bits, n, k), scales_of(bits, n, k // size).bfloat16()
    z = torch.full((n, k // size), 2 ** (bits - 1)) if symmetric else whole(0, 2**bits, n, k // size)
    tensors = {".weight_packed": words(q, bits), ".weight_scale": scales, ".weight_shape": torch.tensor([n, k])}
    tensors |= {} if symmetric else {".weight_zero_point": words(z.T, bits).T}
    return Written(tensors, by_input(scales, size, k) * (q - by_input(z, size, k)))


def int8(n: int, k: int) -> Written:
    q, scales = whole(-128, 128, n, k), scales_of(8, n, 1)
    return Written({".weight": q.to(torch.int8), ".weight_scale": scales}, scales * q)


def fp8(n: int, k: int, *, block: tuple[int, int] | None = None) -> Written:
    """In blocks with partial last ones; or with one scale of all, beside which libraries write that of activations."""
    q = torch.randn(n, k, generator=GENERATOR).to(torch.float8_e4m3fn)
    if block is None:
        scale = torch.tensor(0.15)
        notes = {f".{kind}_scale": torch.tensor(0.3) for kind in ("input", "activation")}
        return Written({".weight": q, ".weight_scale": scale, **notes}, scale * q.float())
    scales = scales_of(2, -(-n // block[0]), -(-k // block[1]))
    by_block = scales.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    return Written({".weight": q, ".weight_scale_inv": scales}, by_block * q.float())


def nf4(n: int, k: int) -> Written:
    q, scales = whole(0, 16, n * k), scales_of(0, n * k // 64)
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": [n, k]}).encode()
    tensors = {
        ".weight": (q[0::2] << 4 | q[1::2]).to(torch.uint8).unsqueeze(1),
        ".weight.absmax": scales,
        ".weight.quant_map": NF4.clone(),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8),
    }
    return Written(tensors, (scales.repeat_interleave(64) * NF4[q]).view(n, k))


def bnb8(n: int, k: int) -> Written:
    q, largest = whole(-127, 128, n, k), scales_of(1, n)
    return Written({".weight": q.to(torch.int8), ".SCB": largest}, q * largest.unsqueeze(1) / 127)


def mxfp4(n: int, k: int) -> Written:
    q, powers = whole(0, 16, n, k), whole(122, 126, n, k // 32)
    pairs = (q[:, 0::2] | q[:, 1::2] << 4).to(torch.uint8)
    matrix = by_input(2.0 ** (powers - 127), 32, k) * E2M1[q]
    return Written({".weight_packed": pairs, ".weight_scale": powers.to(torch.uint8)}, matrix)


def nvfp4(n: int, k: int) -> Written:
    q, scales = whole(0, 16, n, k), (scales_of(0, n, k // 16) * 200).to(torch.float8_e4m3fn)
    pairs = (q[:, 0::2] | q[:, 1::2] << 4).to(torch.uint8)
    divisor = torch.tensor([1500.0])
    tensors = {".weight_packed": pairs, ".weight_scale": scales, ".weight_global_scale": divisor}
    return Written(tensors, by_input(scales.float() / divisor, 16, k) * E2M1[q])


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
Write = Callable[[int, int], Written]
# By name: how layers are written, and the settings in config.json.
FORMATS: Mapping[str, tuple[Write, Mapping[str, Any]]] = {
    **{
        f"gptq {bits} bits": (
            partial(gptq, bits=bits, size=32),
            {"quant_method": "gptq", "bits": bits, "group_size": 32},
        )
        for bits in (2, 3, 4, 8)
    },
    "gptq symmetric": (partial(gptq, bits=4, size=32, symmetric=True), {"bits": 4, "group_size": 32, "sym": True}),
    "gptq act-order": (
        partial(gptq, bits=4, size=32, act_order=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    ),
    "awq": (partial(awq, size=32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "auto-round": (partial(gptq, bits=4, size=32), {"quant_method": "auto-round", "bits": 4, "group_size": 32}),
    "packed": (partial(packed, bits=4, size=32, symmetric=True), compressed("pack-quantized", **INT4)),
    "packed with zeros": (
        partial(packed, bits=4, size=32, symmetric=False),
        compressed("pack-quantized", **INT4, symmetric=False),
    ),
    "int8": (int8, compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    "fp8 blocks": (partial(fp8, block=(48, 32)), {"quant_method": "fp8", "weight_block_size": [48, 32]}),
    "fp8 of modelopt": (fp8, {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "bitsandbytes int8": (bnb8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "mxfp4": (mxfp4, compressed("mxfp4-pack-quantized", **FLOAT4, strategy="group", group_size=32)),
    "nvfp4": (nvfp4, compressed("nvfp4-pack-quantized", **FLOAT4, strategy="tensor_group", group_size=16)),
}


def stacked(write: Write, experts: int, n: int, k: int) -> Written:
    """As compressed-tensors packs weights of three dimensions: each slice alone."""
    slices = [write(n, k) for _ in range(experts)]
    tensors = {name: torch.stack([each.tensors[name] for each in slices]) for name in slices[0].tensors}
    if ".weight_shape" in tensors:
        tensors[".weight_shape"] = torch.tensor([experts, n, k])
    return Written(tensors, torch.stack([each.matrix for each in slices]))


def quantize(
    dense: Path, name: str, packed: Path, exact: Path, also: tuple[str, ...] = (), turned: bool = False
) -> dict[str, Tensor]:
    """Makes of a dense checkpoint two others with new linear layers: `packed` in the format, and `exact` with the same
    numbers in float32, whose tensors are returned. `also`: the ends of the names of further layers. `turned`: dense
    weights are [inputs, outputs]."""
    write, settings = FORMATS[name]
    settings = json.loads(json.dumps(settings))
    if also and "config_groups" in settings:
        settings["config_groups"]["group_0"]["targets"].append("Embedding")
        settings["ignore"] = []
    GENERATOR.manual_seed(0)
    config = json.loads((dense / "config.json").read_text())
    codes, numbers = load_file(dense / "model.safetensors"), load_file(dense / "model.safetensors")
    for key in [key for key in codes if key.removesuffix(".weight").endswith(LINEAR + also)]:
        shape = codes.pop(key).shape[:: -1 if turned else 1]
        written = write(*shape) if len(shape) == 2 else stacked(write, *shape)
        layer = key.removesuffix(".weight")
        codes = {layer + ending: tensor.contiguous() for ending, tensor in written.tensors.items()} | codes
        numbers[key] = written.matrix.T.contiguous() if turned else written.matrix
    if "kv_cache_quant_algo" in settings:
        codes["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
    for folder, tensors, changes in ((packed, codes, {"quantization_config": settings}), (exact, numbers, {})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | changes))
        save_file(tensors, folder / "model.safetensors")
    return numbers
