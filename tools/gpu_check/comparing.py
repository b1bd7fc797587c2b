"""Compares numbers within a tolerance. Cosine similarity is not used, because it does not notice a wrong factor."""

import torch
from torch import Tensor

from gpu_check.findings import Measured

# A number is right if |difference| <= tolerance + tolerance * |expected|. The tolerance depends on the type of the
# arithmetic.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> Measured:
    tolerance = TOLERANCE[dtype]
    return within(actual, expected, tolerance + tolerance * expected.double().abs())


def equal(actual: Tensor, expected: Tensor) -> Measured:
    """Compares two tensors, which must be equal to the bit. A NaN equals nothing."""
    if torch.equal(actual, expected):
        return Measured({"largest difference": "0"})
    said = f"{float(_differences(actual, expected).max()):.2e}"
    return Measured({"largest difference": said}, failure=f"not equal to the bit: up to {said} apart")


def within(actual: Tensor, expected: Tensor, allowed: Tensor) -> Measured:
    """`allowed`: the largest accepted difference of each number."""
    difference = _differences(actual, expected)
    share = float((difference / allowed).max())
    cells = {"largest difference": f"{float(difference.max()):.2e}", "of tolerance": f"{share:.0%}"}
    return Measured(cells, failure="" if share <= 1 else f"{share:.1f} times the tolerance")


def worst(*all_measured: Measured) -> Measured:
    """The first with a failure, else the first."""
    return next((measured for measured in all_measured if measured.failure), all_measured[0])


def _differences(actual: Tensor, expected: Tensor) -> Tensor:
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} where {tuple(expected.shape)} is expected"
    return (actual.double() - expected.double()).abs().nan_to_num(nan=float("inf"))
