"""Lets Triton's kernels run in its interpreter when there is no GPU. The variable must be set before triton is
imported, which transformers does while a test runs. pytest reads this file before all tests.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from text_generation_server.device.vector_math import choose_code

if TYPE_CHECKING:
    from collective_tasks import Ranks
    from family_tools import Checkpoints

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
choose_code()  # transformers' results must be right, too


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> "Checkpoints":
    """The tiny checkpoints of all families, of which each is made once."""
    from family_tools import Checkpoints  # imports torch's compiled kernels, which most tests do not need

    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama, which no test changes."""
    from shard_tools import make_checkpoint

    make_checkpoint(path := tmp_path_factory.mktemp("model"))
    return path


@pytest.fixture(scope="session")
def forks() -> Iterator[None]:
    """The process that forks ranks, of all modules, ends with the last one."""
    yield
    from collective_tasks import end_forks

    end_forks()


@pytest.fixture(scope="module")
def ranks(forks: None, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Ranks]":
    """Processes that take the roles of a group's ranks."""
    from collective_tasks import start_ranks

    with start_ranks(tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks
