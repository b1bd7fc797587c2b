import gc
import re
from pathlib import Path

import pytest
import torch

from text_generation_server.device.arena import (
    HUGE_PAGE,
    SHARED_BYTES,
    SharedPages,
    empty,
    take_in_pieces,
    take_memory,
    zeros,
)

CPU = torch.device("cpu")


def test_large_tensors_begin_where_a_huge_page_does() -> None:
    tensor = empty((3, HUGE_PAGE), torch.bfloat16, CPU)
    assert tensor.shape == (3, HUGE_PAGE) and tensor.dtype == torch.bfloat16 and tensor.is_contiguous()
    assert tensor.data_ptr() % HUGE_PAGE == 0


def test_a_tensor_keeps_its_memory_as_long_as_a_view_of_it_lives() -> None:
    view = empty((HUGE_PAGE,), torch.float32, CPU).fill_(7)[5:]
    gc.collect()
    assert bool((view == 7).all())


def test_small_tensors_and_odd_types_work_too() -> None:
    assert empty((3,), torch.int8, CPU).shape == (3,)
    assert empty((HUGE_PAGE + 1,), torch.float8_e4m3fn, CPU).zero_().float().sum() == 0


@pytest.mark.parametrize("numbers", [5, 3 * HUGE_PAGE + 5], ids=["small", "large"])
def test_every_page_of_zeros_can_be_taken_at_once(numbers: int) -> None:
    tensor = zeros((numbers,), torch.int8, CPU)
    take_memory(tensor)
    if numbers > HUGE_PAGE:
        assert resident_bytes(tensor) >= numbers
    assert not tensor.any()


def test_only_the_pages_of_the_first_rows_may_be_taken() -> None:
    tensor = zeros((16, HUGE_PAGE), torch.int8, CPU)
    take_memory(tensor[:2])
    assert 2 * HUGE_PAGE <= resident_bytes(tensor) < 8 * HUGE_PAGE
    assert not tensor.any()


def test_memory_may_be_taken_in_pieces_and_what_is_written_stays() -> None:
    one, other = (zeros((rows, HUGE_PAGE), torch.int8, CPU) for rows in (8, 16))
    one[3], other[9] = 7, 9
    pieces = take_in_pieces([one[1:], other[2:]])
    for _ in range(4):
        next(pieces)
    assert resident_bytes(other) < 8 * HUGE_PAGE
    assert len(list(pieces)) == 7 + 14 - 4
    assert resident_bytes(one) >= 7 * HUGE_PAGE and resident_bytes(other) >= 14 * HUGE_PAGE
    assert one.sum() == 7 * HUGE_PAGE and other.sum() == 9 * HUGE_PAGE


def resident_bytes(tensor: torch.Tensor) -> int:
    """Bytes in memory of the mapping in which the tensor lies."""
    mappings = Path("/proc/self/smaps").read_text().split("VmFlags")
    (own,) = [text for text in mappings if _holds(text, tensor.data_ptr())]
    resident = re.search(r"^Rss:\s+(\d+) kB", own, re.MULTILINE)
    assert resident is not None
    return int(resident[1]) << 10


def test_the_system_may_put_them_on_huge_pages() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("needs a system with transparent huge pages: they are off here")
    tensor = empty((4 * HUGE_PAGE,), torch.uint8, CPU).zero_()
    mappings = Path("/proc/self/smaps").read_text().split("VmFlags")
    (own,) = [text for text in mappings if _holds(text, tensor.data_ptr())]
    assert re.search(r"THPeligible:\s+1$", own, re.MULTILINE), own


def test_tensors_share_a_mapping_and_no_bytes() -> None:
    pages = SharedPages()
    sizes = [(3,), (1000, 7), (64,), (HUGE_PAGE // 4 - 1,), (2 * HUGE_PAGE,), (SHARED_BYTES // HUGE_PAGE, 5)]
    tensors = [pages.empty(sizes[i % len(sizes)], torch.float32) for i in range(60)]
    for i, tensor in enumerate(tensors):
        assert tensor.shape == sizes[i % len(sizes)] and tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
        tensor.fill_(i)
    gc.collect()
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(tensors))
    assert tensors[1].data_ptr() - tensors[0].data_ptr() == 64
    pages, size = SharedPages(), HUGE_PAGE + HUGE_PAGE // 2
    large = [pages.empty((size,), torch.uint8) for _ in range(2)]
    assert large[1].data_ptr() - large[0].data_ptr() == size


def _holds(mapping: str, address: int) -> bool:
    place = re.search(r"^([0-9a-f]+)-([0-9a-f]+) ", mapping, re.MULTILINE)
    return place is not None and int(place[1], 16) <= address < int(place[2], 16)
