"""Tests how a request counts and adds its tokens."""

import numpy as np
import pytest

from text_generation_router.scheduling.request import GenerationRequest
from text_generation_router.scheduling.running import Running


@pytest.mark.parametrize("read_every", [1, 3, 20])
def test_the_history_is_prompt_and_output_however_often_it_is_read(read_every: int) -> None:
    running = Running(1, GenerationRequest((7, 8, 9), 20))
    outputs = np.random.default_rng(0).integers(0, 100, 20).tolist()
    for made, token_id in enumerate(outputs, 1):
        running.add_tokens((token_id,))
        if made % read_every == 0:
            assert running.history.tolist() == [7, 8, 9, *outputs[:made]]
    assert running.num_tokens == len(running.history) == 23
