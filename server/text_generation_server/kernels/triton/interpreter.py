"""Triton's interpreter with matrix products whose bits do not depend on a row's place. For tests and rehearsals on
CPUs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from triton.runtime import interpreter


@contextmanager
def products_in_fixed_order() -> Iterator[None]:
    """Makes `tl.dot` add up its products in the order of the inner index. No BLAS promises this order.

    numpy's own product uses OpenBLAS, whose kernels for some processors (Haswell, Zen) round a row of a tile
    differently from the same row elsewhere in the tile. The matrix units of GPUs treat all rows of a tile alike.
    """
    builder = interpreter.InterpreterBuilder
    before = builder.create_dot

    def create_dot(_: Any, a: Any, b: Any, start: Any, precision: Any, most_imprecise: Any) -> Any:
        return interpreter.TensorHandle(start.data + product(a.data, b.data, start.data.dtype), start.dtype.scalar)

    builder.create_dot = create_dot
    try:
        yield
    finally:
        builder.create_dot = before


def product(a_MK: npt.NDArray[Any], b_KN: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The product of two matrices, computed number by number, which every processor rounds in the same way."""
    total_MN = np.zeros((a_MK.shape[0], b_KN.shape[1]), dtype)
    for column_M, row_N in zip(a_MK.astype(dtype).T, b_KN.astype(dtype), strict=True):
        total_MN += column_M[:, None] * row_N
    return total_MN
