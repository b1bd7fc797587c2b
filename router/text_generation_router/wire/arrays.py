"""The arrays of the wire: little-endian numbers in `bytes`."""

from typing import Any

import numpy as np
import numpy.typing as npt

from text_generation_router.wire.errors import WireError

INT32, UINT32, UINT64, FLOAT32 = (np.dtype(name) for name in ("<i4", "<u4", "<u8", "<f4"))

Array = npt.NDArray[Any]


def packed(values: Any, dtype: np.dtype[Any]) -> bytes:
    return np.asarray(values, dtype).tobytes()


def unpacked(name: str, data: bytes, dtype: np.dtype[Any], count: int | None = None) -> Array:
    """The array in `data`, without a copy. Raises WireError if it has not `count` whole numbers. `name` is for the
    error's text."""
    if len(data) % dtype.itemsize:
        raise WireError(f"`{name}` has {len(data)} bytes, not a multiple of {dtype.itemsize}")
    if count is not None and len(data) != count * dtype.itemsize:
        raise WireError(f"`{name}` has {len(data) // dtype.itemsize} numbers, and {count} are expected")
    return np.frombuffer(data, dtype)
