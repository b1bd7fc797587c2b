"""Where the time of a decode step goes on a CPU: one shard in this process, and a clock around each of its kernels."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from text_generation_server.batch import PromptChunk, StepBatch
from text_generation_server.config import ShardConfig
from text_generation_server.kernels import Backend, select_backend
from text_generation_server.kernels.interface import Kernels
from text_generation_server.load import load_shard
from text_generation_server.runner import ModelRunner
from text_generation_server.sampling.parameters import Parameters
from text_generation_server.worker import Worker

PREFILL_TOKENS = 4096
WARM_STEPS = 3
NO_SLOTS = torch.empty(0, dtype=torch.int32)
# What the table says of each kernel.
PARTS = {
    "linear": "matrix products",
    "attend_decode": "attention",
    "rope_and_store_kv": "rotary, storing keys and values",
    "rms_norm": "norms",
    "add_rms_norm": "norms",
    "sample": "sampling",
    "embed": "embedding, places, advance",
    "place": "embedding, places, advance",
    "advance": "embedding, places, advance",
}
REST = "everything else: Python, torch"


@dataclass(frozen=True, slots=True)
class StepProfile:
    kernels: str
    rows: int
    context: int
    step_s: float  # the median
    parts: dict[str, float]  # seconds of a step, by PARTS and REST
    weight_bytes: int  # what a step has to read: weights of the products, and keys and values
    kv_bytes: int


class Stopwatch:
    """Seconds by part, of what is called through `timed`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            self.seconds[part] += time.perf_counter() - started
            return result

        return call


class TimedKernels:
    """`interface.Kernels` with a stopwatch in hand."""

    def __init__(self, kernels: Kernels, stopwatch: Stopwatch) -> None:
        self._kernels = kernels
        self._stopwatch = stopwatch
        self.weight_bytes = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._kernels, name)
        return self._stopwatch.timed(PARTS[name], function) if name in PARTS else function

    def linear(self, weight: torch.Tensor, *how: Any) -> Callable[..., Any] | None:
        self.weight_bytes += weight.nbytes
        product = self._kernels.linear(weight, *how)
        return product and self._stopwatch.timed(PARTS["linear"], product)


def profile_step(model: Path, rows: int, context: int, steps: int, dtype: str) -> StepProfile:
    """The median step of `steps`, in which so many rows see about so many tokens each."""
    stopwatch = Stopwatch()
    timed: list[TimedKernels] = []

    def select(device: torch.device) -> Backend:
        backend = select_backend(device)
        timed.append(TimedKernels(backend.kernels, stopwatch))
        return Backend(backend.name, cast(Kernels, timed[0]))

    longest = context + steps + WARM_STEPS + 2
    config = ShardConfig(
        model_path=model, uds_path="", rank=0, world_size=1, generation=1, dtype=dtype, max_total_tokens=longest,
        rope_scaling=None, rope_factor=None, watermark_gamma=0.5, watermark_delta=2.0,
    )  # fmt: skip
    shard = load_shard(config, Worker(1), select)
    shard.runner.warmup(max(PREFILL_TOKENS, longest), longest, rows, rows * longest)
    first = [row * longest for row in range(rows)]
    _prefill(shard.runner, first, context)
    times: list[tuple[float, dict[str, float]]] = []
    for step in range(WARM_STEPS + steps):
        stopwatch.seconds.clear()
        slots = torch.tensor([slot + context + step for slot in first], dtype=torch.int32)
        started = time.perf_counter()
        shard.runner.step([StepBatch(0, list(range(rows)))], slots, 0, []).wait()
        times.append((time.perf_counter() - started, dict(stopwatch.seconds)))
    times = sorted(times[WARM_STEPS:], key=lambda measured: measured[0])
    seconds, parts = times[len(times) // 2]
    config_ = shard.model_config
    kv_bytes = rows * context * config_.num_layers * 2 * config_.num_kv_heads * config_.head_size * shard.dtype.itemsize
    parts[REST] = seconds - sum(parts.values())
    return StepProfile(shard.kernels, rows, context, seconds, parts, timed[0].weight_bytes, kv_bytes)


def _prefill(runner: ModelRunner, first: list[int], context: int) -> None:
    ids = torch.randint(10, 1000, (context,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    for row, slot in enumerate(first):
        slots = torch.arange(slot, slot + context, dtype=torch.int32)
        chunk = PromptChunk(row, 0, context, True, ids, slots, context, Parameters())
        runner.step([StepBatch(0, [])] if row else [], NO_SLOTS, 0, [chunk]).wait()


def as_markdown(profile: StepProfile) -> str:
    reads = {"matrix products": profile.weight_bytes, "attention": profile.kv_bytes}
    lines = [
        f"{profile.rows} rows of {profile.context} tokens, kernels {profile.kernels}:"
        f" {profile.step_s * 1e3:.2f} ms a step.",
        "",
        "| part | ms | share | reads GB/s |",
        "|---|---|---|---|",
    ]
    for part, seconds in sorted(profile.parts.items(), key=lambda item: -item[1]):
        speed = f"{reads[part] / seconds / 1e9:.1f}" if part in reads else ""
        lines.append(f"| {part} | {seconds * 1e3:.2f} | {seconds / profile.step_s:.1%} | {speed} |")
    return "\n".join(lines)
