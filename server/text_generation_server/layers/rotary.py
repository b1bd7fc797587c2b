"""Tables of rotary positions, with every kind of scaling that Llama models use. A token's angles depend only on its
position.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary positions are scaled. `kind` is default, linear, dynamic or llama3. Only llama3 uses the last three
    fields.
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


def inverse_frequencies(
    head_size: int, theta: float, scaling: RopeScaling, max_positions: int, max_total_tokens: int
) -> Tensor:
    """The inverse frequencies, float32 [head_size / 2]."""
    theta = stretched_theta(head_size, theta, scaling, max_positions, max_total_tokens)
    frequencies = 1.0 / theta ** (torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    return frequencies


def stretched_theta(
    head_size: int, theta: float, scaling: RopeScaling, max_positions: int, max_total_tokens: int
) -> float:
    """The base theta of the tables. `dynamic` (NTK) raises theta once, for the longest history that this server will
    hold, `max_total_tokens`. Up to `max_positions`, the trained length, and for all other kinds it is config.json's
    theta.
    """
    if scaling.kind != "dynamic" or max_total_tokens <= max_positions:
        return theta
    stretch = scaling.factor * max_total_tokens / max_positions - (scaling.factor - 1)
    return float(theta * stretch ** (head_size / (head_size - 2)))


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: divides the frequency of long waves by the factor, keeps short waves, and interpolates in
    between.
    """
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((scaling.original_max_positions / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def rotary_tables(frequencies: Tensor, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [length, head_size / 2]."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies.cpu())
    return angles.cos().to(device), angles.sin().to(device)
