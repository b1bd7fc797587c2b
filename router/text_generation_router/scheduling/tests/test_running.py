"""Tests how a request counts and adds its tokens."""

import numpy as np
import pytest

from text_generation_router.scheduling.request import EndReason, GenerationRequest
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


@pytest.mark.parametrize(
    ("tokens", "added", "reason"),
    [
        ((5, 6), (5, 6), None),
        ((5, 9, 6), (5, 9), EndReason.EOS_TOKEN),
        ((5, 6, 7, 8), (5, 6, 7), EndReason.LENGTH),
        ((5, 6, 9), (5, 6, 9), EndReason.LENGTH),
        ((5, 6, 7, 9), (5, 6, 7), EndReason.LENGTH),
    ],
)
def test_of_several_tokens_a_request_takes_none_after_the_one_that_ends_it(
    tokens: tuple[int, ...], added: tuple[int, ...], reason: EndReason | None
) -> None:
    running = Running(1, GenerationRequest((1, 2), 3))
    assert running.add_tokens(tokens, frozenset({9})) == (added, reason)
    assert tuple(running.output_ids) == added and running.history.tolist() == [1, 2, *added]


@pytest.mark.parametrize(("ignores_eos", "ends"), [(False, {7, 8, 9}), (True, {7, 8})])
def test_a_requests_own_stop_tokens_end_it_as_the_models_end_tokens_do(ignores_eos: bool, ends: set[int]) -> None:
    for token_id in (6, 7, 8, 9):
        stops = frozenset({7, 8})
        running = Running(1, GenerationRequest((1, 7), 3, ignore_eos=ignores_eos, stop_token_ids=stops))
        reason = EndReason.EOS_TOKEN if token_id in ends else None
        assert running.add_tokens((token_id,), frozenset({9})) == ((token_id,), reason)
