"""The version of proto/engine.proto that this build speaks, and which versions of its peer it understands."""

from typing import Any

import numpy as np
import numpy.typing as npt

# The arrays of the wire: little-endian numbers in `bytes`.

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


# The error of a peer that does not keep to proto/engine.proto.


class WireError(Exception):
    """A message breaks a rule of the protocol. Its sender is to be disconnected with this text."""


VERSION = 2
# Since this version an engine tells which requests have begun, takes suspects of one loss only, and gives running
# requests back.
WITH_BEGUN = 2


def check_version(peer: int) -> int:
    """The version that both sides speak. `peer`: the other side's newest. Raises WireError."""
    if peer < 1 or peer < VERSION - 1:
        raise WireError(
            f"the peer speaks version {peer} of engine.v1, and this build {VERSION}: upgrade the peer first"
        )
    return min(peer, VERSION)
