"""The functions between the linear layers of an MLP."""

from dataclasses import dataclass
from enum import Enum


class Activation(Enum):
    """The functions between the linear layers of an MLP."""

    silu = "x / (1 + e^-x)"
    gelu_tanh = "x (1 + tanh(sqrt(2 / π) (x + 0.044715 x³))) / 2"
    gelu = "x (1 + erf(x / sqrt(2))) / 2"
    relu = "max(x, 0)"


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """What lies between the products of an expert: (up + 1) * gate / (1 + e^(-slope gate)), with gate and up cut off at
    `limit`, and up at -limit, too."""

    limit: float
    slope: float
