"""Compares numbers of the backends within a tolerance. Cosine similarity is not used, because it does not notice a
wrong factor.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from gpu_check.findings import Finding
from text_generation_server.kernels.interface import Kernels

# A number is right if |difference| <= tolerance + tolerance * |expected|. The tolerance depends on the type of the
# arithmetic.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class Comparison:
    largest: float  # difference
    share: float  # largest difference divided by its tolerance: above 1 is wrong, infinite for NaN


Check = Callable[[], Comparison]


def backends() -> tuple[Kernels, Kernels]:
    """The two backends (Triton, reference)."""
    from text_generation_server.kernels import reference, triton

    return cast(Kernels, triton), cast(Kernels, reference)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> Comparison:
    tolerance = TOLERANCE[dtype]
    return within(actual, expected, tolerance + tolerance * expected.double().abs())


def within(actual: Tensor, expected: Tensor, allowed: Tensor) -> Comparison:
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} where {tuple(expected.shape)} is expected"
    difference = (actual.double() - expected.double()).abs().nan_to_num(nan=float("inf"))
    return Comparison(float(difference.max()), float((difference / allowed).max()))


def equal(actual: Tensor, expected: Tensor) -> Comparison:
    """Compares two tensors, which must be equal to the bit."""
    same = torch.equal(actual, expected)
    largest = 0.0 if same else float((actual.double() - expected.double()).abs().nan_to_num(nan=float("inf")).max())
    return Comparison(largest, 0.0 if same else float("inf"))


def worst(*comparisons: Comparison) -> Comparison:
    return Comparison(max(c.largest for c in comparisons), max(c.share for c in comparisons))


def findings(table: str, cases: Iterator[tuple[Mapping[str, str], Check]]) -> Iterator[Finding]:
    """One finding for each case. A case that raises becomes a failure, and the next case runs."""
    for cells, check in cases:
        try:
            comparison = check()
        except Exception as error:  # any error of a kernel is reported as a result of the check
            nothing = {"largest difference": "–", "of tolerance": "–"}
            yield Finding(table, {**cells, **nothing}, failure=reason(error))
            continue
        said = {"largest difference": f"{comparison.largest:.2e}", "of tolerance": f"{comparison.share:.0%}"}
        failure = "" if comparison.share <= 1 else f"{comparison.share:.1f} times the tolerance"
        yield Finding(table, {**cells, **said}, failure=failure)


def reason(error: Exception) -> str:
    """The error in one line; its traceback goes into the stage's log."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
