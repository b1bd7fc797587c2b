"""Rotary position tables, with every scaling of the Llama family. A token's angles depend on its position only.

The kernels turn number i of a head together with number i + D / 2. Where a checkpoint pairs other numbers, or turns
only a part of a head, the numbers of each query and key head are loaded in another order (`kernel_order`). The products
of queries and keys stay the same.
"""

import math

import torch
from torch import Tensor

from text_generation_common.models.rope_config import Rope, RopeScaling


def inverse_frequencies(rope: Rope, max_total_tokens: int) -> Tensor:
    """The inverse frequencies, float32 [rope.size / 2]."""
    size, scaling = rope.size, rope.scaling
    theta = stretched_theta(rope, max_total_tokens)
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    if scaling.kind == "longrope":
        factors = scaling.long_factors if is_beyond_training(rope, max_total_tokens) else scaling.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponents)
    wavelengths = theta**exponents  # divided by 2π
    if scaling.kind == "linear":
        return 1.0 / wavelengths / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(1.0 / wavelengths, scaling)
    if scaling.kind == "yarn":
        return _yarn(wavelengths, rope)
    return 1.0 / wavelengths


def stretched_theta(rope: Rope, max_total_tokens: int) -> float:
    """theta of the tables. `dynamic` (NTK) raises theta once, for the longest history that this server will hold,
    `max_total_tokens`. Up to the trained length, and for all other kinds, it is config.json's theta."""
    longest = rope.base_positions
    if rope.scaling.kind != "dynamic" or max_total_tokens <= longest:
        return rope.theta
    stretch = rope.scaling.factor * max_total_tokens / longest - (rope.scaling.factor - 1)
    return float(rope.theta * stretch ** (rope.size / (rope.size - 2)))


def is_beyond_training(rope: Rope, max_total_tokens: int) -> bool:
    """Whether `longrope` takes its long factors, for all texts of this server: it chooses by the longest history."""
    return rope.scaling.kind == "longrope" and max_total_tokens > rope.scaling.original_max_positions


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: stretches long waves by the factor, keeps short waves, and interpolates in between."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((scaling.original_max_positions / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def _yarn(wavelengths: Tensor, rope: Rope) -> Tensor:
    """YaRN (arXiv 2309.00071): as llama3, with another bound between long and short waves."""
    scaling, size = rope.scaling, rope.size

    def dimension(rotations: float) -> float:
        """The dimension whose wave makes `rotations` full turns over the trained length."""
        waves = scaling.original_max_positions / (rotations * 2 * math.pi)
        return size * math.log(waves) / (2 * math.log(rope.theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    # Where both bounds are one dimension, the ramp is a step.
    ramp = (torch.arange(size // 2, dtype=torch.float32) - first) / (last - first if last != first else 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return 1.0 / (scaling.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


def rotary_tables(
    rope: Rope | None, head_size: int, max_total_tokens: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [max_total_tokens, head_size / 2]. Numbers that are not turned have cos 1 and sin 0."""
    cos = torch.ones((max_total_tokens, head_size // 2), dtype=torch.float32)
    sin = torch.zeros_like(cos)
    if rope is not None:
        frequencies, factor = inverse_frequencies(rope, max_total_tokens), rope.scaling.attention_factor
        angles = torch.outer(torch.arange(max_total_tokens, dtype=torch.float32), frequencies)
        cos[:, : len(frequencies)], sin[:, : len(frequencies)] = angles.cos() * factor, angles.sin() * factor
    return cos.to(device), sin.to(device)


def kernel_order(rope: Rope | None, head_size: int) -> list[int] | None:
    """The numbers of a head in the order in which the kernels want them: number i of the result is number order[i] in
    the checkpoint. None if that is the checkpoint's own order."""
    if rope is None or (rope.size == head_size and not rope.interleaved):
        return None
    half, pairs = head_size // 2, rope.size // 2
    firsts = [2 * i if rope.interleaved else i for i in range(pairs)]
    seconds = [2 * i + 1 if rope.interleaved else i + pairs for i in range(pairs)]
    still = list(range(rope.size, head_size))
    return [*firsts, *still[: half - pairs], *seconds, *still[half - pairs :]]
