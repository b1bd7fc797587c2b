"""Frames of steps, however the bytes of a connection are cut."""

import pytest

from text_generation_common.frames import HEADER, MAX_BYTES, Frame, FrameError, FrameReader, pack

FRAMES = [Frame(1, 7, b"abc"), Frame(0, 2**64 - 1, b""), Frame(255, 0, bytes(range(256)) * 3)]


@pytest.mark.parametrize("size", [1, 2, 5, 13, 14, 100, 10_000])
def test_frames_are_the_same_in_pieces_of_every_size(size: int) -> None:
    data = b"".join(pack(*frame) for frame in FRAMES)
    reader = FrameReader()
    found = [frame for at in range(0, len(data), size) for frame in reader.feed(data[at : at + size])]
    assert found == FRAMES


def test_a_piece_is_not_a_frame_because_it_looks_like_one() -> None:
    whole, reader = pack(1, 7, pack(2, 8, b"abc")), FrameReader()
    assert list(reader.feed(whole)) == [Frame(1, 7, pack(2, 8, b"abc"))]
    assert list(reader.feed(whole[: HEADER.size])) == []
    assert list(reader.feed(whole[HEADER.size :])) == [Frame(1, 7, pack(2, 8, b"abc"))]
    assert list(reader.feed(whole)) == [Frame(1, 7, pack(2, 8, b"abc"))]


def test_the_header_is_thirteen_bytes_of_little_endian_numbers() -> None:
    assert pack(4, 258, b"xy") == b"\x02\x00\x00\x00" + b"\x04" + b"\x02\x01" + bytes(6) + b"xy"


def test_a_message_beyond_the_limit_is_refused_before_it_has_come() -> None:
    assert list(FrameReader().feed(HEADER.pack(MAX_BYTES, 1, 1))) == []
    with pytest.raises(FrameError, match="the largest has"):
        list(FrameReader().feed(HEADER.pack(MAX_BYTES + 1, 1, 1)))
