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
FP4 = torch.tensor([0, 1 / 16, 8, 12, 4, 6, 2, 3, -0.0, -1 / 16, -8, -12, -4, -6, -2, -3]) / 12
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


def gptq(
    n: int, k: int, *, bits: int, size: int | None, symmetric: bool = False, act_order: bool = False, version: int = 1
) -> Written:
    """`size`: None for one group."""
    groups = torch.arange(k) // (size or k)
    groups = groups[torch.randperm(k, generator=GENERATOR)] if act_order else groups
    q, count = whole(0, 2**bits, n, k), -(-k // (size or k))
    z = torch.full((n, count), 2 ** (bits - 1)) if symmetric else whole(1, 2**bits, n, count)
    scales = scales_of(bits, n, count).half()
    tensors = {
        ".qweight": words(q, bits).T,
        ".qzeros": words((z.T - int(version == 1)) % 2**bits, bits),
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


def int8(n: int, k: int, *, symmetric: bool = True) -> Written:
    q, scales = whole(-128, 128, n, k), scales_of(8, n, 1)
    tensors = {".weight": q.to(torch.int8), ".weight_scale": scales}
    if symmetric:
        return Written(tensors, scales * q)
    z = whole(-100, 101, n, 1)
    return Written({**tensors, ".weight_zero_point": z.to(torch.int8)}, scales * (q - z))


def fp8_codes(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=GENERATOR).to(torch.float8_e4m3fn)


def fp8(n: int, k: int, *, of_outputs: bool = False) -> Written:
    """With a scale of each output or of all, beside which libraries write those of activations."""
    q, scales = fp8_codes(n, k), scales_of(2, n, 1) if of_outputs else torch.tensor(0.15)
    notes = {f".{name}": torch.tensor(0.3) for name in ("input_scale", "activation_scale", "input_scale_ub")}
    return Written({".weight": q, ".weight_scale": scales, **notes}, scales * q.float())


def fp8_blocks(n: int, k: int, *, block: tuple[int, int], powers: bool = False) -> Written:
    """With partial last blocks. `powers`: scales are powers of 2, in e8m0."""
    q, shape = fp8_codes(n, k), (-(-n // block[0]), -(-k // block[1]))
    scales = (2.0 ** whole(-4, -1, *shape)).to(torch.float8_e8m0fnu) if powers else scales_of(2, *shape)
    by_block = scales.float().repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    return Written({".weight": q, ".weight_scale_inv": scales}, by_block * q.float())


def bnb4(n: int, k: int, *, kind: str = "nf4", nested: bool = False) -> Written:
    """`nested`: scales are codes of 8 bits themselves."""
    table, state = {"nf4": NF4, "fp4": FP4}[kind], {"quant_type": kind, "blocksize": 64, "shape": [n, k]}
    q, count = whole(0, 16, n * k), n * k // 64
    tensors = {".weight": (q[0::2] << 4 | q[1::2]).to(torch.uint8).unsqueeze(1), ".weight.quant_map": table.clone()}
    if nested:
        codes, factors, of_codes = whole(0, 256, count), scales_of(0, -(-count // 256)), torch.linspace(-0.5, 0.5, 256)
        state |= {"nested_blocksize": 256, "nested_offset": 0.5}
        scales = of_codes[codes] * factors.repeat_interleave(256)[:count] + 0.5
        absmax = codes.to(torch.uint8)
        tensors |= {".weight.nested_absmax": factors, ".weight.nested_quant_map": of_codes}
    else:
        absmax = scales = scales_of(0, count)
    state_bytes = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors |= {".weight.absmax": absmax, f".weight.quant_state.bitsandbytes__{kind}": state_bytes}
    return Written(tensors, (scales.repeat_interleave(64) * table[q]).view(n, k))


def bnb8(n: int, k: int) -> Written:
    q, largest = whole(-127, 128, n, k), scales_of(1, n)
    return Written({".weight": q.to(torch.int8), ".SCB": largest}, q * largest.unsqueeze(1) / 127)


def mxfp4(n: int, k: int) -> Written:
    q, powers = whole(0, 16, n, k), whole(122, 126, n, k // 32)
    pairs = (q[:, 0::2] | q[:, 1::2] << 4).to(torch.uint8)
    matrix = by_input(2.0 ** (powers - 127), 32, k) * E2M1[q]
    return Written({".weight_packed": pairs, ".weight_scale": powers.to(torch.uint8)}, matrix)


def nvfp4(n: int, k: int, *, of_modelopt: bool = False) -> Written:
    """ModelOpt multiplies scales by the number by which compressed-tensors divides them."""
    q, scales = whole(0, 16, n, k), (scales_of(0, n, k // 16) * 200).to(torch.float8_e4m3fn)
    pairs = (q[:, 0::2] | q[:, 1::2] << 4).to(torch.uint8)
    if of_modelopt:
        factor = torch.tensor(1 / 1500)
        tensors = {".weight": pairs, ".weight_scale": scales, ".weight_scale_2": factor, ".input_scale": 2 * factor}
        return Written(tensors, by_input(scales.float() * factor, 16, k) * E2M1[q])
    divisor = torch.tensor([1500.0])
    tensors = {".weight_packed": pairs, ".weight_scale": scales, ".weight_global_scale": divisor}
    return Written(tensors, by_input(scales.float() / divisor, 16, k) * E2M1[q])


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
# Settings of mixed formats, for the layers of MIXED.
EIGHT_BITS = {"bits": 8, "group_size": 64}
EXTRA = {r".*v_proj": EIGHT_BITS, "model.layers.1.mlp.down_proj": {"bits": 2}, r".*o_proj": {"bits": 16}}
GROUPS = {
    "group_0": {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
    "group_1": {"targets": ["re:.*v_proj$"], "weights": FLOAT8, "format": "float-quantized"},
    "group_2": {"targets": ["model.layers.1.mlp.down_proj"], "weights": INT8, "format": "int-quantized"},
}
Write = Callable[[int, int], Written]
# By name: how layers are written, and the settings in config.json.
FORMATS: Mapping[str, tuple[Write, Mapping[str, Any]]] = {
    **{f"gptq {bits} bits": (partial(gptq, bits=bits, size=32), GPTQ | {"bits": bits}) for bits in (2, 3, 4, 8)},
    "gptq symmetric": (partial(gptq, bits=4, size=32, symmetric=True), {"bits": 4, "group_size": 32, "sym": True}),
    "gptq act-order": (partial(gptq, bits=4, size=32, act_order=True), GPTQ | {"desc_act": True}),
    "gptq v2 of one group": (
        partial(gptq, bits=4, size=None, version=2),
        GPTQ | {"group_size": -1, "checkpoint_format": "gptq_v2"},
    ),
    "gptq of mixed bits": (
        partial(gptq, bits=4, size=32),
        GPTQ | {"dynamic": {r"+:.*\.v_proj$": EIGHT_BITS, r".*down_proj": {"bits": 3}, r"-:.*o_proj$": {}}},
    ),
    "awq": (partial(awq, size=32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "auto-round": (partial(gptq, bits=4, size=32), ROUND),
    "auto-round as awq": (partial(awq, size=32), ROUND | {"packing_format": "auto_round:auto_awq", "sym": False}),
    "auto-round of mixed bits": (
        partial(gptq, bits=4, size=32, version=2),
        ROUND | {"packing_format": "auto_round", "extra_config": EXTRA},
    ),
    "packed": (partial(packed, bits=4, size=32, symmetric=True), compressed("pack-quantized", **INT4)),
    "packed with zeros": (
        partial(packed, bits=4, size=32, symmetric=False),
        compressed("pack-quantized", **INT4, symmetric=False),
    ),
    "packed 8 bits": (
        partial(packed, bits=8, size=32, symmetric=False),
        compressed("pack-quantized", **INT4 | {"num_bits": 8}, symmetric=False),
    ),
    "packed of mixed formats": (
        partial(packed, bits=4, size=32, symmetric=True),
        compressed("mixed-precision") | {"config_groups": GROUPS, "ignore": ["lm_head", "re:.*o_proj"]},
    ),
    "int8": (int8, compressed("int-quantized", **INT8)),
    "int8 with zeros": (partial(int8, symmetric=False), compressed("int-quantized", **INT8, symmetric=False)),
    "fp8 blocks": (partial(fp8_blocks, block=(48, 32)), {"quant_method": "fp8", "weight_block_size": [48, 32]}),
    "fp8 blocks of e8m0": (
        partial(fp8_blocks, block=(48, 32), powers=True),
        {"quant_method": "fp8", "weight_block_size": [48, 32], "scale_fmt": "ue8m0"},
    ),
    "fp8 of fbgemm": (partial(fp8, of_outputs=True), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "fp8 of modelopt": (fp8, {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}),
    "nf4": (bnb4, BNB4 | {"bnb_4bit_quant_type": "nf4"}),
    "nf4 twice": (
        partial(bnb4, nested=True),
        BNB4 | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    ),
    "fp4": (partial(bnb4, kind="fp4"), BNB4 | {"bnb_4bit_quant_type": "fp4"}),
    "bitsandbytes int8": (bnb8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "mxfp4": (mxfp4, compressed("mxfp4-pack-quantized", **FLOAT4, strategy="group", group_size=32)),
    "nvfp4": (nvfp4, compressed("nvfp4-pack-quantized", **FLOAT4, strategy="tensor_group", group_size=16)),
    "nvfp4 of modelopt": (
        partial(nvfp4, of_modelopt=True),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
    ),
}
# Ends of the names of layers that a format writes in another way than the others; None: as numbers.
MIXED: Mapping[str, Mapping[str, Write | None]] = {
    "gptq of mixed bits": {
        "v_proj": partial(gptq, bits=8, size=64),
        "down_proj": partial(gptq, bits=3, size=32),
        "o_proj": None,
    },
    "auto-round of mixed bits": {
        "v_proj": partial(gptq, bits=8, size=64, version=2),
        "1.mlp.down_proj": partial(gptq, bits=2, size=32, version=2),
        "o_proj": None,
    },
    "packed of mixed formats": {"v_proj": partial(fp8, of_outputs=True), "1.mlp.down_proj": int8, "o_proj": None},
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
        layer, others = key.removesuffix(".weight"), MIXED.get(name, {})
        its = next((each for end, each in others.items() if layer.endswith(end)), write)
        if its is None:
            continue
        shape = codes.pop(key).shape[:: -1 if turned else 1]
        written = its(*shape) if len(shape) == 2 else stacked(its, *shape)
        codes = {layer + ending: tensor.contiguous() for ending, tensor in written.tensors.items()} | codes
        numbers[key] = written.matrix.T.contiguous() if turned else written.matrix
    if "kv_cache_quant_algo" in settings:
        codes["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
    for folder, tensors, changes in ((packed, codes, {"quantization_config": settings}), (exact, numbers, {})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | changes))
        save_file(tensors, folder / "model.safetensors")
    return numbers
