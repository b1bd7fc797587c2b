"""Writes goldens/*.safetensors: quantized layers as the libraries write them, and the matrices that the libraries make
of them. `make fixtures-quantized` runs it, in an environment of its own. ARGS="awq": that file
alone; "first": the first four, which share a seed.

Every case has its quantization_config, the shape of the weight, the tensors of the layer `l`, and the matrix `W` in
float32.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import bitsandbytes.functional as bnb
import torch
from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


def without_its_init(package):
    """Lets modules of a package be imported alone: AutoAWQ's own imports need a transformers of 2025."""
    module = ModuleType(package)
    module.__path__ = list(importlib.util.find_spec(package).submodule_search_locations)
    sys.modules[package] = module


for package in ("awq", "awq.modules", "awq.modules.linear"):
    without_its_init(package)
from awq.modules.linear.gemm import WQLinear_GEMM  # noqa: E402
from awq.utils.packing_utils import dequantize_gemm  # noqa: E402
from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor  # noqa: E402
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor  # noqa: E402

FOLDER = Path(__file__).parent / "goldens"
N, K = 12, 128  # outputs and inputs, where a case has no others


class File:
    def __init__(self, name: str) -> None:
        self.name, self.tensors, self.cases = name, {}, {}

    def add(self, case, settings, tensors, matrix):
        self.cases[case] = json.dumps({"settings": settings, "shape": list(matrix.shape)})
        named = {**{f"l{ending}": tensor for ending, tensor in tensors.items()}, "W": matrix.float()}
        self.tensors |= {f"{case}/{name}": tensor.contiguous().clone() for name, tensor in named.items()}

    def write(self):
        path = FOLDER / f"{self.name}.safetensors"
        save_file(self.tensors, path, self.cases)
        print(path.name, path.stat().st_size, len(self.cases))


def compressed(file, case, format, weights, tensors, shape=(N, K)):
    """`tensors`: weight, weight_scale and so on, from which the library packs what a file has."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(format)
    packed = compressor.compress(tensors, scheme)
    if format.endswith("fp4-pack-quantized"):
        matrix = four_bits(compressor, packed, scheme)
        return add_compressed(file, case, format, weights, packed, matrix)
    exact = {
        name: tensor.float() if name == "weight_scale" and tensor.dtype in (torch.float16, torch.bfloat16) else tensor
        for name, tensor in packed.items()
    }
    matrix = compressor.decompress(exact, scheme)["weight"]
    assert matrix.shape == shape
    add_compressed(file, case, format, weights, packed, matrix)


def four_bits(compressor, packed, scheme):
    """The library's matrix in float32: its compressor computes bfloat16."""
    rows, columns = packed["weight_packed"].shape
    return dequantize(
        x_q=unpack_fp4_from_uint8(packed["weight_packed"], rows, 2 * columns, dtype=torch.float32),
        scale=compressor._decompress_scale(packed["weight_scale"], torch.float32),
        args=scheme.weights,
        global_scale=packed.get("weight_global_scale"),
        dtype=torch.float32,
    )


def add_compressed(file, case, format, weights, packed, matrix):
    assert matrix.dtype == torch.float32
    group = {"targets": ["Linear"], "weights": weights}
    settings = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    file.add(case, settings, {f".{name}": tensor for name, tensor in packed.items()}, matrix)


def packed_integers():
    file = File("pack_quantized")
    for bits in (2, 3, 4, 8):
        for size in (32, 64, None):
            for symmetric in (True, False):
                weights = {"num_bits": bits, "type": "int", "symmetric": symmetric}
                weights |= {"strategy": "channel"} if size is None else {"strategy": "group", "group_size": size}
                groups = K // (size or K)
                half = 2 ** (bits - 1)
                tensors = {
                    "weight": torch.randn(N, K),
                    "weight_scale": (torch.rand(N, groups) / half + 0.01).to(torch.bfloat16),
                    "weight_zero_point": torch.randint(-half, half, (N, groups), dtype=torch.int8),
                }
                if symmetric:
                    tensors["weight_zero_point"].zero_()
                tensors["weight"] = tensors["weight"].to(torch.bfloat16)
                compressed(file, f"{bits} bits {size} {symmetric=}", "pack-quantized", weights, tensors)
    file.write()


def eight_bits():
    file = File("eight_bits")
    for strategy, shape in (("channel", (N, 1)), ("tensor", (1,))):
        for symmetric in (True, False):
            weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": strategy}
            tensors = {"weight": torch.randn(N, K), "weight_scale": torch.rand(shape) / 40 + 0.001}
            tensors["weight_zero_point"] = torch.randint(-20, 20, shape, dtype=torch.int8) * (not symmetric)
            compressed(file, f"int {strategy} {symmetric=}", "int-quantized", weights, tensors)
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
        for format in ("float-quantized", "naive-quantized"):
            tensors = {"weight": torch.randn(N, K), "weight_scale": torch.rand(shape) / 40 + 0.001}
            compressed(file, f"{format} {strategy}", format, weights, tensors)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [16, 32]}
    tensors = {"weight": torch.randn(40, 80), "weight_scale": torch.rand(3, 3) / 40 + 0.001}
    compressed(file, "fp8 blocks", "float-quantized", weights, tensors, (40, 80))
    codes, scales, _ = bnb.int8_vectorwise_quant(torch.randn(N, K, dtype=torch.float16))
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    matrix = torch.ops.bitsandbytes.int8_vectorwise_dequant(codes, scales)
    file.add("bitsandbytes int8", settings, {".weight": codes, ".SCB": scales}, matrix)
    file.write()


def four_bit_floats():
    file = File("four_bit_floats")
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    scales = (torch.rand(N, K // 16) * 200 + 1).to(torch.float8_e4m3fn).float()
    tensors = {"weight": torch.randn(N, K), "weight_scale": scales, "weight_global_scale": torch.tensor([317.7])}
    compressed(file, "nvfp4", "nvfp4-pack-quantized", weights, tensors)
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    weights["scale_dtype"] = "torch.uint8"
    tensors = {"weight": torch.randn(N, K), "weight_scale": 2.0 ** torch.randint(-6, 3, (N, K // 32)).float()}
    compressed(file, "mxfp4 packed", "mxfp4-pack-quantized", weights, tensors)
    blocks = torch.randint(0, 256, (2, 8, 3, 16), dtype=torch.uint8)
    scales = torch.randint(110, 136, (2, 8, 3), dtype=torch.uint8)
    matrix = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    file.add("mxfp4 experts", {"quant_method": "mxfp4"}, {"_blocks": blocks, "_scales": scales}, matrix)
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            for shape in ((12, 128), (6, 96)):
                bitsandbytes(file, kind, nested, shape)
    bitsandbytes(file, "nf4", True, (264, 64))  # more than 256 scales, so that nested scales have two blocks
    file.write()


def bitsandbytes(file, kind, nested, shape):
    codes, state = bnb.quantize_4bit(
        torch.randn(shape, dtype=torch.float32), blocksize=64, compress_statistics=nested, quant_type=kind
    )
    tensors = {f".weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    # bitsandbytes 0.50.2 errs on CPUs where a block has numbers of two outputs, so rows are as long as blocks here.
    state.shape = torch.Size((codes.numel() * 2 // 64, 64))
    matrix = bnb.dequantize_4bit(codes, state).reshape(shape)
    file.add(f"{kind} {nested=} {shape[0]}x{shape[1]}", settings, {".weight": codes, **tensors}, matrix)


def words():
    """GPTQ's two formats, packed by AutoRound."""
    file = File("auto_round")
    for module, packing in ((qlinear_torch_zp, "auto_round:auto_gptq"), (qlinear_torch, "auto_round")):
        for bits in (2, 3, 4, 8):
            for size, symmetric in ((32, True), (64, False)):
                auto_round(file, f"{packing} {bits} bits {symmetric=}", module, packing, bits, size, symmetric)
    file.write()


def auto_round(file, case, module, packing, bits, size, symmetric, shape=(32, 64)):
    """The matrix is the formula, and AutoRound's own layer agrees with it as far as its float16 is exact."""
    outputs, inputs = shape
    q, zeros, scales = integers(bits, outputs, inputs, size)
    if symmetric:
        zeros.fill_(2 ** (bits - 1))
    by_column = scales.repeat_interleave(size, 1), zeros.repeat_interleave(size, 1)
    matrix = by_column[0] * (q - by_column[1])
    linear = torch.nn.Linear(inputs, outputs, bias=False)
    linear.weight.data = matrix
    layer = module.QuantLinear(bits, size, inputs, outputs, bias=False)
    layer.device = torch.device("cpu")  # which `pack` asks for
    layer.pack(linear, scales, zeros)
    own = layer(torch.eye(inputs)).t()
    assert torch.allclose(own.float(), matrix, rtol=2**-9), (bits, size, packing)
    tensors = {f".{name}": getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    settings = {"quant_method": "auto-round", "bits": bits, "group_size": size, "sym": symmetric}
    file.add(case, {**settings, "packing_format": packing}, tensors, matrix)


def integers(bits, outputs, inputs, size):
    """Integers, and their zero points and scales in float32, which float16 holds."""
    q = torch.randint(0, 2**bits, (outputs, inputs))
    zeros = torch.randint(1, 2**bits, (outputs, inputs // size)).float()
    return q, zeros, (torch.rand(outputs, inputs // size) / 2**bits + 0.01).half().float()


def awq():
    """AutoAWQ's matrix is float16 for the scales of a file, and float32 for the same scales in float32."""
    file = File("awq")
    for size in (32, 64, 128):
        q, zeros, scales = integers(4, 32, 256, size)
        linear = torch.nn.Linear(256, 32, bias=False)
        linear.weight.data = scales.repeat_interleave(size, 1) * (q - zeros.repeat_interleave(size, 1))
        layer = WQLinear_GEMM.from_linear(linear, 4, size, scales=scales.t(), zeros=zeros.t())
        matrix = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, size).t()
        tensors = {f".{name}": getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
        assert torch.equal(matrix, linear.weight.data)
        settings = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": size, "zero_point": True}
        file.add(f"awq {size}", settings, tensors, matrix)
    file.write()


def groups_of_128():
    file = File("groups_of_128")
    shape = (16, 256)
    for symmetric in (True, False):
        for bits in (4, 8):
            half = 2 ** (bits - 1)
            weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": 128}
            zeros = torch.randint(-half, half, (16, 2), dtype=torch.int8) * (not symmetric)
            tensors = {
                "weight": torch.randn(shape).to(torch.bfloat16),
                "weight_scale": (torch.rand(16, 2) / half + 0.01).to(torch.bfloat16),
                "weight_zero_point": zeros,
            }
            compressed(file, f"packed {bits} bits 128 {symmetric=}", "pack-quantized", weights, tensors, shape)
            case, module = f"auto_round:auto_gptq {bits} bits 128 {symmetric=}", qlinear_torch_zp
            auto_round(file, case, module, "auto_round:auto_gptq", bits, 128, symmetric, (32, 256))
    file.write()


def modelopt():
    """NVIDIA's packing of a weight, with the settings that its export writes."""
    file = File("modelopt")
    weight, settings = torch.randn(N, K), {"quant_method": "modelopt"}
    packed, scale, second = NVFP4QTensor.quantize(weight, 16)
    matrix = packed.dequantize(torch.float32, scale=scale, double_scale=second, block_sizes={-1: 16})
    tensors = {".weight": packed._quantized_data, ".weight_scale": scale, ".weight_scale_2": second}
    file.add("modelopt nvfp4", {**settings, "quant_algo": "NVFP4", "group_size": 16}, tensors, matrix)
    for algorithm, axis in (("FP8", None), ("FP8_PER_CHANNEL_PER_TOKEN", 0)):
        packed, scale = FP8QTensor.quantize(weight, axis=axis)
        matrix = packed.dequantize(torch.float32, scale=scale)
        tensors = {".weight": packed._quantized_data, ".weight_scale": scale.squeeze()}
        file.add(f"modelopt {algorithm.lower()}", {**settings, "quant_algo": algorithm}, tensors, matrix)
    file.write()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    wanted = sys.argv[1:]
    if not wanted or wanted == ["first"]:
        torch.manual_seed(35)
        for write in (packed_integers, eight_bits, four_bit_floats, words):
            write()
    for seed, write in enumerate((awq, groups_of_128, modelopt)):
        torch.manual_seed(seed)
        if not wanted or write.__name__ in wanted:
            write()
