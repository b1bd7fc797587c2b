"""Frames: how a step and its answer lie on a shard's socket for steps. Standard library only.

A frame is a header of 13 bytes and a message. The header, little-endian: number of bytes of the message (uint32), kind
(uint8), number of the step (uint64). proto/generate.proto says what the kinds and the messages are.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

HEADER = struct.Struct("<IBQ")
MAX_BYTES = 64 * 2**20  # size of the largest message


class FrameError(Exception):
    """The bytes of a connection are not frames."""


class Frame(NamedTuple):
    kind: int
    step: int
    message: bytes


def pack(kind: int, step: int, message: bytes) -> bytes:
    return HEADER.pack(len(message), kind, step) + message


class FrameReader:
    """Cuts the bytes of one connection into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes. FrameError: a message is too large; the connection cannot be used any
        more."""
        if not self._bytes and len(data) >= HEADER.size:
            size, kind, step = HEADER.unpack_from(data)
            if HEADER.size + size == len(data):  # exactly one frame: nearly always
                return iter((Frame(kind, step, data[HEADER.size :]),))
        return self._cut(data)

    def _cut(self, data: bytes) -> Iterator[Frame]:
        self._bytes += data
        while len(self._bytes) >= HEADER.size:
            size, kind, step = HEADER.unpack_from(self._bytes)
            if size > MAX_BYTES:
                raise FrameError(f"a message of {size} bytes: the largest has {MAX_BYTES}")
            end = HEADER.size + size
            if len(self._bytes) < end:
                return
            message = bytes(self._bytes[HEADER.size : end])
            del self._bytes[:end]
            yield Frame(kind, step, message)
