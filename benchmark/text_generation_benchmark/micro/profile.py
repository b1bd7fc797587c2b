"""Where the time of a step goes on a CPU: one shard in this process, with a clock around each kernel."""

import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch

from text_generation_benchmark.ceilings import Meter
from text_generation_benchmark.output import table
from text_generation_benchmark.roofline import Ceilings, StepPart, least_s, step_parts
from text_generation_common.flags.kinds import ActivationType, CpuTarget, Dtype, KvCacheDtype, Quantize
from text_generation_common.flags.model import ComputeFlags
from text_generation_common.model_files import demo_directory
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import read_config
from text_generation_common.models.quantized_layers import quantized_layers
from text_generation_common.models.tensors import matrix_sizes
from text_generation_common.sampling import Sampling
from text_generation_server.config import ShardConfig
from text_generation_server.kernels import Backend
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.cpu.library import Argument, Call, Library, choose_target, require_target
from text_generation_server.load import load_shard
from text_generation_server.runner import ModelRunner
from text_generation_server.step.rows import PromptChunk, StepBatch
from text_generation_server.weights.gguf_files import open_files
from text_generation_server.worker import Worker

PREFILL_TOKENS = 4096
WARM_STEPS = 3
NO_SLOTS = torch.empty(0, dtype=torch.int32)
PRODUCTS, ATTENTION, SAMPLING = "matrix products", "attention", "sampling"
# Names of kernels, and the row of the table in which their time is counted.
PARTS = {
    "gemm": PRODUCTS,
    "gemm_f32": PRODUCTS,
    "gemm_codes": PRODUCTS,
    "gemm_ints": PRODUCTS,
    "attend": ATTENTION,
    "attend_runs": ATTENTION,
    "attend_chunk": ATTENTION,
    "rope_and_store": "rotary, storing keys and values",
    "rms_norm": "norms",
    "rms_norm_part": "norms",
    "layer_norm": "norms",
    "silu_mul": "activations",
    "activate": "activations",
    "add": "residuals",
    "add_scored": "experts: sums",
    "route": "experts: choice",
    "experts_up": "experts: products",
    "experts_down": "experts: products",
    "experts_codes": "experts: products",
    "experts_sum": "experts: sums",
    "check_finite": SAMPLING,
    "draw": SAMPLING,
    "embed": "embedding, places, advance",
    "embed_panels": "embedding, places, advance",
    "embed_codes": "embedding, places, advance",
    "place": "embedding, places, advance",
    "advance": "embedding, places, advance",
}
REST = "everything else: Python, torch"
WEIGHT_BYTES = {"int8": 1.0, "int4": 4.5 / 8}  # bytes of a weight, by the value of --quantize
# What each row of the table has to do, by the names of the roofline's parts.
WORK = {PRODUCTS: ("weights", "head"), ATTENTION: ("attention",), SAMPLING: ("sampling",)}


@dataclass(frozen=True, slots=True)
class StepProfile:
    about: str  # what the step computes, and the kernels
    step_s: float  # mean seconds of a step
    parts: dict[str, float]  # mean seconds of a step, by the names in PARTS and REST
    work: tuple[StepPart, ...]  # what the step has to read and to compute
    mixes_experts: bool  # whether the products of `work` are several parts of the table


class TimedLibrary(Library):
    """Adds up the seconds of each part of a step, in single calls and in recorded programs."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.seconds: dict[str, float] = defaultdict(float)
        self._programs: dict[bytes, list[Call]] = {}

    def call(self, threads: int, kernel: str, /, **arguments: Argument) -> None:
        started = time.perf_counter()
        super().call(threads, kernel, **arguments)
        self._add(kernel, time.perf_counter() - started)

    def pack(self, calls: Sequence[Call]) -> bytes:
        packed = super().pack(calls)
        self._programs[packed] = list(calls)
        return packed

    def run(self, packed: bytes, threads: int, ends: int | None = None) -> None:
        calls = self._programs[packed]
        times = np.empty(len(calls) + 1)
        times[0] = time.monotonic()
        super().run(packed, threads, times[1:].ctypes.data)
        for call, seconds in zip(calls, np.diff(times).tolist(), strict=True):
            self._add(call.kernel, seconds)

    def _add(self, kernel: str, seconds: float) -> None:
        self.seconds[PARTS.get(kernel, kernel)] += seconds


def profile_step(
    model: str = "",
    rows: int = 64,
    context: int = 1000,
    prompt: int = 0,
    depth: int = 0,
    steps: int = 20,
    dtype: str = "bfloat16",
    cpu_target: str = "",
    quantize: str = "",
    activations: str = "model",
    kv_cache: str = "",
) -> StepProfile:
    """One shard in this process, on the folder `model`; by default the demo model. Decode steps with `rows` rows of
    about `context` tokens each or, if `prompt` is not 0, steps that compute `prompt` tokens of a row behind `depth`
    tokens, whose keys and values are there already. `cpu_target`: the kernels; by default the best. `quantize`,
    `activations` and `kv_cache`: as the flags. RuntimeError if no kernels were compiled."""
    choice = require_target(CpuTarget(cpu_target)) if cpu_target else choose_target()
    if choice.target is None:
        raise RuntimeError(f"no kernels to profile: {choice.reason}")
    library, folder = TimedLibrary(choice.target), Path(model) if model else demo_directory()
    if prompt:
        what, rows, tokens, context = f"{prompt} tokens of a prompt behind {depth}", 1, prompt, depth + prompt
    else:
        what, tokens, depth = f"{rows} rows of {context} tokens", 1, context
    longest = context + (1 if prompt else steps + WARM_STEPS + 2)
    config = ShardConfig(
        model_path=folder, uds_path="", rank=0, world_size=1, epoch=1, max_total_tokens=longest,
        compute=ComputeFlags(
            dtype=Dtype(dtype), quantize=Quantize(quantize) if quantize else None,
            activations=ActivationType(activations), kv_cache_dtype=KvCacheDtype(kv_cache) if kv_cache else None,
        ),
    )  # fmt: skip
    kernels = CpuKernels(library, torch.get_num_threads(), ActivationType(activations))
    shard = load_shard(config, Worker(1), lambda device: Backend(kernels.name, kernels, library.wake))
    runner: ModelRunner = shard.runner
    runner.warmup(max(PREFILL_TOKENS, longest), longest, rows, rows * longest)
    first = [row * longest for row in range(rows)]
    for row, slot in enumerate(first if depth else ()):
        _compute(runner, row, slot, 0, depth)

    def step(number: int) -> None:
        if prompt:
            runner.clear(None)
            _compute(runner, 0, 0, depth, context)
        else:
            slots = torch.tensor([slot + context + number for slot in first], dtype=torch.int32)
            runner.step([StepBatch(0, list(range(rows)))], slots, 0, []).wait()

    seconds, parts = _measure(library, step, steps)
    facts = read_config(folder)
    work = step_parts(facts, rows, tokens, context, number_bytes=shard.dtype.itemsize)
    smaller = {"weights": WEIGHT_BYTES.get(quantize), "attention": 1 + 4 / facts.head_size if kv_cache else None}
    less = saved_bytes(folder, facts, shard.dtype.itemsize)
    work = tuple(_with_numbers_of(part, smaller.get(part.name), shard.dtype.itemsize) for part in work)
    work = tuple(replace(part, bytes=part.bytes - less[part.name]) for part in work)
    return StepProfile(f"{what}, kernels {shard.kernels}", seconds, parts, work, facts.moe is not None)


def saved_bytes(path: Path, config: ModelConfig, number_bytes: int) -> Counter[str]:
    """How many bytes fewer the parts of a step read, by name, because the model's files have codes for numbers of
    `number_bytes`."""
    saved = Counter[str]()
    if (layers := quantized_layers(path, open_files(path).describe)) is not None:
        embedding = config.names.embedding
        head = embedding if config.tie_word_embeddings else config.names.head
        for name, size in matrix_sizes(config).items():
            part = "head" if name == head else "rows" if name == embedding else "weights"
            if (kept := layers.code_bytes(name, size)) is not None:
                saved[part] += math.prod(size.shape) * number_bytes - kept
    return saved


def _with_numbers_of(part: StepPart, number_bytes: float | None, instead_of: int) -> StepPart:
    return part if number_bytes is None else replace(part, bytes=round(part.bytes * number_bytes / instead_of))


def _measure(library: TimedLibrary, step: Callable[[int], object], steps: int) -> tuple[float, dict[str, float]]:
    """Mean seconds of the middle half of some steps, and of their parts. `step` computes the step of a number."""
    measured: list[tuple[float, dict[str, float]]] = []
    for number in range(WARM_STEPS + steps):
        library.seconds.clear()
        started = time.perf_counter()
        step(number)
        measured.append((time.perf_counter() - started, dict(library.seconds)))
    measured = sorted(measured[WARM_STEPS:], key=lambda step: step[0])
    middle = measured[len(measured) // 4 : len(measured) - len(measured) // 4]
    seconds = statistics.mean(step_s for step_s, _ in middle)
    parts = {part: statistics.mean(of[part] for _, of in middle) for part in middle[0][1]}
    parts[REST] = parts.get(REST, 0) + seconds - sum(parts.values())
    return seconds, parts


def _compute(runner: ModelRunner, row: int, slot: int, start: int, end: int) -> None:
    """Computes the tokens from `start` to `end` of a new request, whose slots begin with `slot`."""
    ids = torch.randint(10, 1000, (end,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    slots = torch.arange(slot, slot + end, dtype=torch.int32)
    chunk = PromptChunk(row, start, end, True, ids, slots=slots, prompt_length=end, sampling=Sampling())
    runner.step([StepBatch(0, [])] if row else [], NO_SLOTS, 0, [chunk]).wait()


@wraps(profile_step)
def profile(**settings: Any) -> str:
    activations = ActivationType(settings.get("activations", "model"))
    meter = Meter(getattr(torch, Dtype(settings.get("dtype", "bfloat16")).value), activations)
    before = meter.measure()
    profiled = profile_step(**settings)
    return as_markdown(profiled, before.higher(meter.measure()))


def as_markdown(profile: StepProfile, ceilings: Ceilings) -> str:
    about = f"{profile.about}: {profile.step_s * 1e3:.2f} ms a step."
    about += f" Memory reads {ceilings.bandwidth / 1e9:.1f} GB/s, products make {ceilings.flops / 1e9:,.0f} GFLOPS."
    lines = []
    for part, seconds in sorted(profile.parts.items(), key=lambda item: -item[1]):
        work = [each for each in profile.work if each.name in WORK.get(part, ())]
        if profile.mixes_experts and part == PRODUCTS:
            work = []
        share = f"{seconds / profile.step_s:.1%}"
        lines.append((part, f"{seconds * 1e3:.2f}", share, *_speeds(work, seconds, ceilings)))
    whole = _speeds(profile.work, profile.step_s, ceilings)
    lines.append(("the step", f"{profile.step_s * 1e3:.2f}", "100.0%", *whole))
    return f"{about}\n\n{table(('part', 'ms', 'share', 'reads GB/s', 'GFLOPS', 'of limit'), lines)}"


def _speeds(work: Sequence[StepPart], seconds: float, ceilings: Ceilings) -> tuple[str, str, str]:
    """Bytes and operations per second, and the share of the limit, of a part that took `seconds`."""
    if not work:
        return "", "", ""
    flops = sum(part.flops for part in work)
    made = f"{flops / seconds / 1e9:,.0f}" if flops else ""
    read = sum(part.bytes for part in work) / seconds / 1e9
    return f"{read:.1f}", made, f"{least_s(work, ceilings) / seconds:.1%}"
