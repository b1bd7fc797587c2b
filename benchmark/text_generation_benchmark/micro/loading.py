"""The memory and the seconds that a shard takes to load quantized weights: a model of random codes in each format,
whose file is in the page cache, is loaded in two processes on compiled kernels. The memory of one is sampled."""

import multiprocessing
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from text_generation_benchmark.micro.random_files import FORMATS, write_model
from text_generation_benchmark.output import columns
from text_generation_benchmark.shapes import LlamaShape
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import read_config
from text_generation_common.models.quantized_layers import AnyLayers, quantized_layers
from text_generation_common.models.tensors import weight_bytes
from text_generation_server.distributed import Alone, Group
from text_generation_server.kernels import select_backend
from text_generation_server.models import get_model
from text_generation_server.models.loading import Files
from text_generation_server.models.model import Model
from text_generation_server.models.stored_codes import packed_layers
from text_generation_server.platforms import Platform
from text_generation_server.weights.gguf_files import open_files

MIB, GB = 2**20, 10**9
EVERY_S = 0.001


def load(formats: tuple[str, ...] = FORMATS, hidden: int = 2048, layers: int = 8) -> str:
    if unknown := set(formats) - set(FORMATS):
        raise ValueError(f"{', '.join(sorted(unknown))} is not a format that is measured: choose {', '.join(FORMATS)}")
    shape = LlamaShape(hidden, hidden // 128 * 352, layers, heads=hidden // 64, kv_heads=hidden // 256, vocabulary=4096)
    return columns(_row(name, shape) for name in formats)


def _row(name: str, shape: LlamaShape) -> Mapping[str, str]:
    with TemporaryDirectory() as folder:
        model, tensors = write_model(Path(folder), name, shape)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as process:
            first, again = process.submit(seconds_of, model).result()
            packed, peak, kept = process.submit(memory_of, model).result()
    return {
        "format": name,
        "packed, MiB": f"{packed / MIB:.1f}",
        "packed + 2 largest tensors": f"{allowed(packed, tensors) / MIB:.1f}",
        "peak, MiB": f"{peak / MIB:.1f}",
        "kept, MiB": f"{kept / MIB:.1f}",
        "seconds": f"{first:.2f}",
        "seconds for each GB of the file": f"{first / sum(tensors) * GB:.2f}",
        "in memory touched before": f"{again / sum(tensors) * GB:.2f}",
    }


def allowed(packed: int, tensors: list[int]) -> int:
    """Bytes that loading may take: the weights, and the two largest tensors of the files."""
    return packed + sum(sorted(tensors)[-2:])


@dataclass(frozen=True)
class StoredModel:
    """A model in a folder or a GGUF file, and what loads it."""

    config: ModelConfig
    files: Files
    layers: AnyLayers
    platform: Platform

    @classmethod
    def of(cls, path: Path) -> "StoredModel":
        files, device = open_files(path), torch.device("cpu")
        layers = quantized_layers(path, files.describe)
        assert layers is not None
        platform = Platform(device, select_backend(device).kernels, Group(0, 1, Alone()))
        return cls(read_config(path), files, layers, platform)

    def load(self) -> Model:
        return get_model(
            self.files,
            self.config,
            self.platform,
            dtype=torch.bfloat16,
            max_total_tokens=512,
            on_tensor=lambda: None,
            packed=packed_layers(self.layers, self.files),
        )


def seconds_of(path: Path) -> tuple[float, float]:
    """Seconds that two loads take. The host of a virtual machine gives memory when it is first touched, by the first
    load."""

    def once() -> float:
        source, started_s = StoredModel.of(path), time.monotonic()
        source.load()
        return time.monotonic() - started_s

    return once(), once()


def memory_of(path: Path) -> tuple[int, int, int]:
    """Bytes of the weights as they are counted, and what this process takes more than before while it loads them, and
    afterwards."""
    source, before = StoredModel.of(path), taken()
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
