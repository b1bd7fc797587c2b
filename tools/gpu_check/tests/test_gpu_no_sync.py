"""What torch warns of is counted where it says that a call waited, and nowhere else."""

import warnings
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from gpu_check import no_sync

# torch's words, of its c10/cuda/CUDAFunctions.cpp.
WAITS = "called a synchronizing CUDA operation"
PROTOTYPE = (
    "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
    " (function operator())"
)


def pending(failures: dict[int, str]) -> Any:
    return SimpleNamespace(wait=lambda: SimpleNamespace(failures=failures))


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: warnings.warn(PROTOTYPE, stacklevel=1))


def test_the_notice_of_the_prototype_does_not_count():
    (measured,) = no_sync._warned(lambda: pending({}))
    assert measured.cells == {"waits": "none"} and not measured.failure


def test_each_line_that_waits_is_a_failure():
    def step() -> Any:
        for _ in range(2):
            warnings.warn(WAITS, stacklevel=1)
        return pending({})

    (measured,) = no_sync._warned(step)
    assert "test_gpu_no_sync.py" in measured.cells["waits"] and "2 times" in measured.failure


def test_a_request_that_fails_fails_the_case():
    with pytest.raises(RuntimeError, match="its grammar"):
        no_sync.finished(cast(Any, pending({7: "its grammar cannot be followed"})))
