"""Memory that processes of one template map one after the other. A child of a fork tells by its exit status."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from text_generation_server.device import kept
from text_generation_server.device.arena import HUGE_PAGE
from text_generation_server.device.kept import KeptMemory, memory_for_keys

CPU = torch.device("cpu")
SHAPES = ((3, HUGE_PAGE), (5, 7))
KILLED = -signal.SIGKILL


def tensors(memory: KeptMemory, is_kept: bool = True) -> list[torch.Tensor]:
    memory.begin(is_kept)
    return [memory.tensor(shape, torch.int8, CPU) for shape in SHAPES]


def forked(act: Callable[[], object]) -> int:
    """How a child ends that calls `act`, and then kills itself: with status 1 if `act` raises."""
    if not (pid := os.fork()):
        try:
            torch.set_num_threads(1)  # OpenMP's threads are not here
            act()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def write(memory: KeptMemory) -> None:
    for number, tensor in enumerate(tensors(memory, is_kept=False)):
        memory.take(tensor[:2])
        tensor[1:] = number + 5
    memory.rename(7)


def check(memory: KeptMemory) -> None:
    assert memory.content == 7
    for number, tensor in enumerate(tensors(memory)):
        memory.take(tensor)
        assert not tensor[0].any() and bool((tensor[1:] == number + 5).all()) and tensor.data_ptr() % HUGE_PAGE == 0


def test_what_a_killed_process_has_written_is_there_for_the_next_ones() -> None:
    memory = KeptMemory()
    assert memory.content == 0
    assert [forked(lambda: write(memory)), forked(lambda: check(memory)), forked(lambda: check(memory))] == [KILLED] * 3
    assert memory.content == 7


def test_memory_that_begins_anew_is_zeros_without_a_name() -> None:
    memory = KeptMemory()
    assert forked(lambda: write(memory)) == KILLED
    assert not any(bool(tensor.any()) for tensor in tensors(memory, is_kept=False)) and memory.content == 0


def test_its_pages_are_huge_where_the_kernel_can_and_the_tests_of_old_kernels_pass_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = KeptMemory()
    large = tensors(memory)[0]
    memory.take(large)
    mapped = next(part for part in Path("/proc/self/smaps").read_text().split("memfd:tgi-keys")[1:])
    huge_kib = int(mapped.split("ShmemPmdMapped:")[1].split()[0])
    assert huge_kib == (3 * HUGE_PAGE >> 10 if memory.can_collapse else 0)
    monkeypatch.setattr(kept, "MADV_COLLAPSE", -1)
    test_what_a_killed_process_has_written_is_there_for_the_next_ones()


def test_keys_get_such_memory_where_it_is_as_fast_as_other_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for choices, is_faster in ("always [madvise] never", True), ("always madvise [never]", False), ("", False):
        monkeypatch.setattr(kept, "ENABLED", path := tmp_path / "enabled")
        path.write_text(choices) if choices else path.unlink()
        open_files = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(kept, "MADV_COLLAPSE", -1)
        assert (memory_for_keys() is None) == is_faster
        assert not is_faster or len(os.listdir("/proc/self/fd")) == open_files
        monkeypatch.setattr(kept, "MADV_COLLAPSE", 0)  # MADV_NORMAL, which no kernel refuses
        assert memory_for_keys() is not None


def test_memory_that_the_system_does_not_give_is_an_error() -> None:
    with pytest.raises(MemoryError, match="the system gives no"):
        KeptMemory().tensor((1 << 50,), torch.int8, CPU)


def test_memory_is_unmapped_with_its_last_tensor() -> None:
    memory = KeptMemory()
    view = tensors(memory)[0][1:]
    assert "memfd:tgi-keys" in Path("/proc/self/maps").read_text()
    del view
    assert "memfd:tgi-keys" not in Path("/proc/self/maps").read_text()
