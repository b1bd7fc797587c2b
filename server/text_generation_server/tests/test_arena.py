import gc

import torch

from text_generation_server.arena import HUGE_PAGE, empty

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
