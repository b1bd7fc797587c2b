"""The cost of a step: seconds, from what the step carries. One formula, derived from a device or fitted to a shard's
log of steps.

The devices are H200s, for Llamas. NVIDIA's data sheet of the H200 SXM: 141 GB of memory at 4.8 TB/s, 1,979 TFLOPS in
bfloat16 with sparsity, which is 989 without, NVLink 900 GB/s (450 in each direction). The shapes are from Llama 3.1's
config.json. Assumed, because no data sheet states it:

- reading weights reaches 80 % of the memory's bandwidth, reading keys and values 70 %, products 55 % and attention of
  prompts 50 % of the matrix rate, near the targets of this project's own kernels (benchmark/README.md);
- norms, rotary, SiLU and launches cost 10 µs a layer, an all-reduce 10 µs and its bytes at 70 % of NVLink's speed;
- 90 % of the memory is for weights and KV cache.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from text_generation_benchmark.shapes import LLAMA_8B, LLAMA_70B, LlamaShape
from text_generation_benchmark.simulation.trace import Floats
from text_generation_router.scheduling.costs import least_squares


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step. Each field is the cost of one unit of the thing it is named after.

    A step reads all weights and computes its matrix products at the same time, so only the slower of the two counts. In
    a fitted model `weights_s` and `product_s` are 0: its cost is linear in the contents of the step.
    """

    constant_s: float = 0.0
    weights_s: float = 0.0  # seconds to read all weights
    product_s: float = 0.0  # seconds of the matrix products of one token, in a decoding row or in a prompt
    row_s: float = 0.0  # seconds of one decoding row
    kv_token_s: float = 0.0  # seconds of one token that a decoding row attends to
    prompt_token_s: float = 0.0
    prompt_position_s: float = 0.0  # seconds of one position that a token of a prompt attends to

    def seconds(self, rows: int, kv_tokens: int, prompt_tokens: int = 0, prompt_positions: int = 0) -> float:
        products = self.product_s * (rows + prompt_tokens)
        return (
            self.constant_s
            + (products if products > self.weights_s else self.weights_s)
            + self.row_s * rows
            + self.kv_token_s * kv_tokens
            + self.prompt_token_s * prompt_tokens
            + self.prompt_position_s * prompt_positions
        )


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model on a device: the cost of its steps and the size of its KV cache."""

    name: str
    cost: StepCost
    slots: int  # number of token slots of the model's KV cache
    overhead_s: float  # seconds of a first token that are spent outside the steps: HTTP, tokenizing, gRPC
    source: str  # source of the numbers: a data sheet or a measured server

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> "SimulatedModel":
        """Reads the file. ValueError for a file that `write` did not write."""
        try:
            values = json.loads(path.read_text())
            return cls(**(values | {"cost": StepCost(**values["cost"])}))
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not what --write-model writes: {error}") from None


BYTES = 2  # bytes of a bfloat16 number
LOGIT_BYTES = 4
LOGIT_PASSES = 3  # times that the sampler reads or writes all logits

WEIGHTS_EFFICIENCY, KV_EFFICIENCY = 0.80, 0.70
PRODUCT_EFFICIENCY, ATTENTION_EFFICIENCY = 0.55, 0.50
LINK_EFFICIENCY = 0.70
LAYER_S, ALL_REDUCE_S = 10e-6, 10e-6
MEMORY_SHARE = 0.90
# Time until a first token that is spent outside the steps (HTTP, tokenizing, gRPC), measured by `replay` with this
# project's router and the demo model.
OVERHEAD_S = 0.005


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: float  # operations per second on bfloat16 matrices without sparsity
    link_bytes_per_s: float  # bandwidth to the other devices, in one direction


H200 = Device("H200", 141e9, 4.8e12, 989e12, 450e9)


def derive(name: str, about: str, shape: LlamaShape, device: Device, count: int) -> SimulatedModel:
    """The model divided over `count` devices by tensor parallelism."""
    bytes_per_s, flops_per_s = count * device.bytes_per_s, count * device.flops_per_s
    layer_weights, kv_bytes = shape.layers * shape.layer_weights, BYTES * shape.kv_numbers
    read_weights = BYTES * (layer_weights + shape.head_weights)
    # plus the embedding: it takes memory, but a step reads only its tokens' rows of it
    all_weights = read_weights + BYTES * shape.head_weights
    exchange_s, reduce_s = _all_reduces(shape, device, count)
    cost = StepCost(
        constant_s=shape.layers * LAYER_S + reduce_s,
        weights_s=read_weights / (bytes_per_s * WEIGHTS_EFFICIENCY),
        product_s=2 * layer_weights / (flops_per_s * PRODUCT_EFFICIENCY),
        row_s=exchange_s + LOGIT_PASSES * LOGIT_BYTES * shape.vocabulary / (device.bytes_per_s * WEIGHTS_EFFICIENCY),
        kv_token_s=kv_bytes / (bytes_per_s * KV_EFFICIENCY),
        prompt_token_s=exchange_s,
        prompt_position_s=4 * shape.layers * shape.hidden / (flops_per_s * ATTENTION_EFFICIENCY),
    )
    slots = int((count * device.memory_bytes * MEMORY_SHARE - all_weights) / kv_bytes)
    devices = f"{count} {device.name}s" if count > 1 else f"one {device.name}"
    return SimulatedModel(name, cost, slots, OVERHEAD_S, f"{about} in bfloat16 on {devices}, derived")


def _all_reduces(shape: LlamaShape, device: Device, count: int) -> tuple[float, float]:
    """Seconds of the all-reduces, for each token and for each step. A layer has two all-reduces. In each, a device
    sends 2 (n - 1) / n of the bytes.
    """
    if count == 1:
        return 0.0, 0.0
    sent_bytes = BYTES * shape.hidden * 2 * (count - 1) / count
    reduces = 2 * shape.layers
    return reduces * sent_bytes / (device.link_bytes_per_s * LINK_EFFICIENCY), reduces * ALL_REDUCE_S


MODELS = {
    model.name: model
    for model in (
        derive("h200-8b", "Llama 3.1 8B", LLAMA_8B, H200, 1),
        derive("h200-70b", "Llama 3.1 70B", LLAMA_70B, H200, 4),
        # Two devices are the fewest that hold the model. Its weights take half of their memory, so KV slots are scarce.
        derive("h200-70b-tp2", "Llama 3.1 70B", LLAMA_70B, H200, 2),
    )
}


COLUMNS = ("rows", "kv_tokens", "prompt_tokens", "prompt_positions")
# The first steps after a start or a pause compile, allocate and fill caches.
SKIPPED_STEPS = 20
FEWEST_STEPS = 50
REFINEMENTS = 5


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The contents of each step, and the seconds that it took."""

    loads: Floats  # array of shape [steps, COLUMNS]
    seconds: Floats


@dataclass(frozen=True, slots=True)
class Fit:
    cost: StepCost
    num_steps: int
    error: float  # median of the relative error, |predicted - measured| / measured


def read_log(lines: list[str]) -> StepTimes:
    """Reads a shard's log of steps. ValueError if the log is too short.

    A step's time is the time since the previous step ended, the router's delay included, because rows had to wait for
    it. If no row was running, the gap before the step was idle time, and is left out.
    """
    steps = [json.loads(line) for line in lines[SKIPPED_STEPS:]]
    if len(steps) < FEWEST_STEPS:
        raise ValueError(f"the log has {len(steps)} steps, and a fit needs {FEWEST_STEPS}: run more requests")
    loads = np.array([[step[column] for column in COLUMNS] for step in steps], dtype=np.float64)
    at_s = np.array([step["at_ns"] for step in steps]) / 1e9
    idle_s = np.array([0 if step["rows"] else step["gap_ns"] for step in steps]) / 1e9
    return StepTimes(loads[1:], np.diff(at_s) - idle_s[1:])


def joined(parts: list[StepTimes]) -> StepTimes:
    return StepTimes(np.concatenate([part.loads for part in parts]), np.concatenate([part.seconds for part in parts]))


def fit(times: StepTimes) -> Fit:
    """Minimizes the errors of all steps relative to their predicted times. With absolute errors, a few long steps would
    outweigh many short steps. The sum of all predicted times is still right.
    """
    loads = np.column_stack([np.ones(len(times.seconds)), times.loads])
    predicted = np.ones(len(times.seconds))
    for _ in range(REFINEMENTS):
        solution = least_squares(loads / predicted[:, None], times.seconds / predicted)
        predicted = loads @ solution
    names = ("constant_s", "row_s", "kv_token_s", "prompt_token_s", "prompt_position_s")
    cost = StepCost(**dict(zip(names, solution.tolist(), strict=True)))
    return Fit(cost, len(times.seconds), float(np.median(np.abs(predicted / times.seconds - 1))))
