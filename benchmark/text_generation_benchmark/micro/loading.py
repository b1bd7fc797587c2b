"""The memory and the seconds that a shard takes to load quantized weights: a model of random codes in each format,
whose file is in the page cache, is loaded in two processes on compiled kernels. The memory of one is sampled."""

import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from text_generation_benchmark.output import columns
from text_generation_benchmark.shapes import LlamaShape
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import read_config
from text_generation_common.models.quantized_layers import QuantizedLayers, quantized_layers
from text_generation_common.models.tensors import linear_sizes, shapes, weight_bytes
from text_generation_server.distributed import Alone, Group
from text_generation_server.kernels import select_backend
from text_generation_server.models import get_model
from text_generation_server.models.model import Model
from text_generation_server.models.stored_codes import StoredCodes
from text_generation_server.platforms import Platform
from text_generation_server.weights.files import SafetensorsFiles

MIB, GB = 2**20, 10**9
EVERY_S = 0.001
Tensors = Mapping[str, Tensor]  # by their endings


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).int()


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape) / 100).to(dtype)


def codes(*shape: int) -> Tensor:
    """Bytes that are also numbers of fp8."""
    return torch.randint(0, 120, shape, dtype=torch.uint8)


def gptq(outputs: int, inputs: int) -> Tensors:
    groups, half = inputs // 128, torch.float16
    zeros = words(groups, outputs // 8)
    return {".qweight": words(inputs // 8, outputs), ".qzeros": zeros, ".scales": numbers(groups, outputs, dtype=half)}


def act_order(outputs: int, inputs: int) -> Tensors:
    return {**gptq(outputs, inputs), ".g_idx": (torch.randperm(inputs) // 128).int()}


def awq(outputs: int, inputs: int) -> Tensors:
    return {**gptq(outputs, inputs), ".qweight": words(inputs, outputs // 8)}


def fp8(outputs: int, inputs: int) -> Tensors:
    scales = numbers(-(-outputs // 128), -(-inputs // 128))
    return {".weight": codes(outputs, inputs).view(torch.float8_e4m3fn), ".weight_scale_inv": scales}


def nvfp4(outputs: int, inputs: int) -> Tensors:
    scales = codes(outputs, inputs // 16).view(torch.float8_e4m3fn)
    return {".weight": codes(outputs, inputs // 2), ".weight_scale": scales, ".weight_scale_2": torch.tensor(1e-4)}


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


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}
FORMATS: Mapping[str, tuple[Callable[[int, int], Tensors], Mapping[str, Any]]] = {
    "gptq": (gptq, GPTQ),
    "act-order": (act_order, {**GPTQ, "desc_act": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
}


def load(formats: tuple[str, ...] = tuple(FORMATS), hidden: int = 2048, layers: int = 8) -> str:
    if unknown := set(formats) - set(FORMATS):
        raise ValueError(f"{', '.join(sorted(unknown))} is not a format that is measured: choose {', '.join(FORMATS)}")
    shape = LlamaShape(hidden, hidden // 128 * 352, layers, heads=hidden // 64, kv_heads=hidden // 256, vocabulary=4096)
    return columns(_row(name, shape) for name in formats)


def _row(name: str, shape: LlamaShape) -> Mapping[str, str]:
    with TemporaryDirectory() as folder:
        tensors = write(Path(folder), name, shape)
        stored = (Path(folder) / "model.safetensors").stat().st_size
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as process:
            seconds = process.submit(seconds_of, Path(folder)).result()
            packed, peak, kept = process.submit(memory_of, Path(folder)).result()
    allowed = packed + sum(sorted(tensors)[-2:])
    return {
        "format": name,
        "packed, MiB": f"{packed / MIB:.1f}",
        "packed + 2 largest tensors": f"{allowed / MIB:.1f}",
        "peak, MiB": f"{peak / MIB:.1f}",
        "kept, MiB": f"{kept / MIB:.1f}",
        "seconds": f"{seconds:.2f}",
        "seconds for each GB of the file": f"{seconds / stored * GB:.2f}",
    }


def write(folder: Path, name: str, shape: LlamaShape) -> list[int]:
    """Writes the model, and returns the bytes of each tensor."""
    made, settings = FORMATS[name]
    (folder / "config.json").write_text(json.dumps(shape.config("bfloat16") | {"quantization_config": settings}))
    config = read_config(folder)
    tensors, layers = dict[str, Tensor](), linear_sizes(config)
    for layer, size in layers.items():
        tensors |= {layer + ending: tensor for ending, tensor in made(size.outputs, size.inputs).items()}
    others = shapes(config, lambda name, _: {} if name in layers else None)
    tensors |= {key: numbers(*its, dtype=torch.bfloat16) for key, its in others.items()}
    save_file(tensors, folder / "model.safetensors")
    return [tensor.nbytes for tensor in tensors.values()]


@dataclass(frozen=True)
class LoadedFolder:
    """A model in a folder, and what loads it."""

    config: ModelConfig
    files: SafetensorsFiles
    layers: QuantizedLayers
    platform: Platform

    @classmethod
    def of(cls, folder: Path) -> "LoadedFolder":
        files, device = SafetensorsFiles(folder), torch.device("cpu")
        layers = quantized_layers(folder, files.describe)
        assert isinstance(layers, QuantizedLayers)
        platform = Platform(device, select_backend(device).kernels, Group(0, 1, Alone()))
        return cls(read_config(folder), files, layers, platform)

    def load(self) -> Model:
        return get_model(
            self.files,
            self.config,
            self.platform,
            dtype=torch.bfloat16,
            max_total_tokens=512,
            on_tensor=lambda: None,
            packed=StoredCodes(self.layers, self.files),
        )


def seconds_of(folder: Path) -> float:
    source, started_s = LoadedFolder.of(folder), time.monotonic()
    source.load()
    return time.monotonic() - started_s


def memory_of(folder: Path) -> tuple[int, int, int]:
    """Bytes of the weights as they are counted, and what this process takes more than before while it loads them, and
    afterwards."""
    source, before = LoadedFolder.of(folder), taken()
    with sampled() as samples:
        model = source.load()
    samples.append(taken())
    del model
    weights = weight_bytes(source.config, 2, source.layers.code_bytes)
    return weights, max(samples) - before, samples[-1] - before


@contextmanager
def sampled() -> Iterator[list[int]]:
    samples, has_ended = [taken()], threading.Event()

    def sample() -> None:
        while not has_ended.is_set():
            samples.append(taken())
            time.sleep(EVERY_S)

    thread = threading.Thread(target=sample)
    thread.start()
    yield samples
    has_ended.set()
    thread.join()


def taken() -> int:
    """Bytes of memory that are not pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))
