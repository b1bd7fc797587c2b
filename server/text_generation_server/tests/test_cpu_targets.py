"""On every target that this processor can run: where bits may depend on the number of rows, as csrc/README.md says."""

from pathlib import Path

import pytest
import torch
from shard_tools import Client, make_checkpoint, make_runner, random_ids, scattered_slots

from text_generation_common.cpu_features import NEEDS
from text_generation_server.kernels.cpu import load_kernels
from text_generation_server.runner import ModelRunner

# Numbers of rows of a decode step, in groups within which a row has the same bits.
ANY_NUMBER = [[1, 2, 4, 5, 12, 13, 33]]
WITH_MATRIX_UNIT = [[1, 2, 4], [5, 12, 13, 33]]


def first_row(runner: ModelRunner, rows: int) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of a request that decodes among `rows` requests, its own included."""
    runner.clear(None)
    client = Client(runner, scattered_slots(runner))
    client.step([], [client.first_chunk(i, random_ids(70 - i, i)) for i in range(rows)])
    for _ in range(3):
        client.step(list(range(rows)))
    return client.tokens[0], client.logprobs[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", NEEDS)
def test_a_row_has_the_same_bits_among_as_many_rows_as_the_page_says(
    tmp_path: Path, target: str, dtype: torch.dtype
) -> None:
    kernels = load_kernels(target)
    if kernels is None:
        pytest.skip(f"needs a C compiler when the package is installed, and of the processor: {NEEDS[target]}")
    make_checkpoint(tmp_path)
    runner = make_runner(tmp_path, dtype, kernels=kernels)
    runner.warmup(2048, None, 40, None)
    two_kinds = target == "amx" and dtype == torch.bfloat16
    for numbers in WITH_MATRIX_UNIT if two_kinds else ANY_NUMBER:
        found = [first_row(runner, rows) for rows in numbers]
        assert found == found[:1] * len(numbers)
