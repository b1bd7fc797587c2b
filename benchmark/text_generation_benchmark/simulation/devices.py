"""Llamas on H200s: the cost of a step, derived from public facts about both and from assumed efficiencies.

NVIDIA's data sheet of the H200 SXM: 141 GB of memory at 4.8 TB/s, 1,979 TFLOPS in bfloat16 with sparsity, which is 989
without, NVLink 900 GB/s (450 in each direction). The shapes are from Llama 3.1's config.json. Assumed, because no data
sheet states it:

- reading weights reaches 80 % of the memory's bandwidth, reading keys and values 70 %, products 55 % and attention of
  prompts 50 % of the matrix rate, near the targets of this project's own kernels (benchmark/README.md);
- norms, rotary, SiLU and launches cost 10 µs a layer, an all-reduce 10 µs and its bytes at 70 % of NVLink's speed;
- 90 % of the memory is for weights and KV cache.
"""

from dataclasses import dataclass

from text_generation_benchmark.shapes import LLAMA_8B, LLAMA_70B, LlamaShape
from text_generation_benchmark.simulation.cost import SimulatedModel, StepCost

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
