"""Log-probabilities of the tokens of prompts: equal to transformers', however the prompts are cut, and in bounded
memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_tools import Client, make_checkpoint, random_ids, scattered_slots, warm_runner
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from text_generation_server.runner import ModelRunner
from text_generation_server.sampling import prompt_logprobs
from text_generation_server.step.results import PromptOutput, StepOutput
from text_generation_server.step.rows import PromptChunk

VOCABULARY = 320


@dataclass(frozen=True)
class Served:
    model: LlamaForCausalLM
    runner: ModelRunner

    def expected(self, ids: Tensor) -> Tensor:
        """transformers' log-probabilities [tokens - 1, vocabulary] in the places of all tokens but the first."""
        with torch.no_grad():
            return self.model(ids.unsqueeze(0)).logits[0, :-1].log_softmax(dim=-1)

    def client(self) -> Client:
        self.runner.clear(None)
        return Client(self.runner, scattered_slots(self.runner))

    def in_chunks(self, ids: Tensor, ends: Sequence[int], top_n: int, **about: Any) -> list[PromptOutput]:
        """What each chunk of a prompt gives, if it gives anything. `about`: further arguments of the first chunk."""
        client = self.client()
        first = client.first_chunk(7, ids, end=ends[0], prompt_logprobs=top_n, **about)
        outputs = [client.step([], [first])]
        outputs += [client.step([], [PromptChunk(7, a, b, b == len(ids))]) for a, b in pairwise(ends)]
        return [output.prompts for output in outputs if output.prompts is not None]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    path: Path = tmp_path_factory.mktemp("model")
    return Served(make_checkpoint(path), warm_runner(path))


def own(expected: Tensor, ids: Tensor) -> Tensor:
    return expected.gather(1, ids[1:].unsqueeze(1)).squeeze(1)


def prompts_of(output: StepOutput) -> PromptOutput:
    assert output.prompts is not None
    return output.prompts


CHUNKS = [[150], [1, 150], [64, 128, 150], [149, 150], [3, 4, 5, 20, 150]]


@pytest.mark.parametrize("ends", CHUNKS, ids=str)
def test_they_equal_transformers_and_no_cut_of_the_prompt_changes_a_bit(served: Served, ends: list[int]) -> None:
    ids, top_n = random_ids(150), 4
    expected = served.expected(ids)
    found = served.in_chunks(ids, ends, top_n)
    assert [f.counts[0] for f in found] == [min(b, 149) - a for a, b in pairwise([0, *ends]) if min(b, 149) > a]
    assert all(f.request_ids == (7,) and f.top_counts == (top_n,) for f in found)
    logprobs = torch.cat([f.logprobs for f in found])
    torch.testing.assert_close(logprobs, own(expected, ids), atol=1e-4, rtol=1e-4)
    tops = torch.cat([f.top_logprobs for f in found]).view(-1, top_n)
    torch.testing.assert_close(tops, expected.topk(top_n).values, atol=1e-4, rtol=1e-4)
    of_top_ids = expected.gather(1, torch.cat([f.top_ids for f in found]).view(-1, top_n).long())
    torch.testing.assert_close(of_top_ids, tops, atol=1e-4, rtol=1e-4)
    (whole,) = served.in_chunks(ids, [150], top_n)
    assert torch.equal(logprobs, whole.logprobs)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17])
def test_short_prompts_have_one_less_than_tokens(served: Served, length: int) -> None:
    ids = random_ids(length, seed=length)
    found = served.in_chunks(ids, [length], 0)
    if length == 1:
        assert not found
        return
    assert found[0].counts == (length - 1,) and not len(found[0].top_ids)
    torch.testing.assert_close(found[0].logprobs, own(served.expected(ids), ids), atol=1e-4, rtol=1e-4)


def test_prompts_in_one_step_get_theirs_and_only_those_that_ask(served: Served) -> None:
    prompts = {i: random_ids(n, seed=i) for i, n in enumerate((20, 9, 40, 5))}
    client = served.client()
    client.step([], [client.first_chunk(9, random_ids(30))])
    asked = {0: 3, 1: None, 2: 0, 3: VOCABULARY + 5}
    output = client.step([9], [client.first_chunk(i, prompts[i], prompt_logprobs=n) for i, n in asked.items()])
    assert output.request_ids == [9, 0, 1, 2, 3]
    found = prompts_of(output)
    assert (found.request_ids, found.counts, found.top_counts) == ((0, 2, 3), (19, 39, 4), (3, 0, VOCABULARY))
    for i, logprobs in zip((0, 2, 3), found.logprobs.split(found.counts), strict=True):
        torch.testing.assert_close(logprobs, own(served.expected(prompts[i]), prompts[i]), atol=1e-4, rtol=1e-4)
    of_three, of_all = found.top_logprobs.split([19 * 3, 4 * VOCABULARY])
    torch.testing.assert_close(of_three.view(19, 3), served.expected(prompts[0]).topk(3).values, atol=1e-4, rtol=1e-4)
    assert of_all.view(4, VOCABULARY).exp().sum(dim=1).tolist() == pytest.approx([1.0] * 4, abs=1e-4)


def test_the_output_of_a_resumed_request_has_none_and_neither_has_a_step_without_such_requests(served: Served) -> None:
    ids = random_ids(50)
    found = served.in_chunks(ids, [20, 45, 50], 1, prompt_length=30)
    assert [f.counts for f in found] == [(20,), (9,)]
    client = served.client()
    assert client.step([], [client.first_chunk(7, ids)]).prompts is None and client.step([7]).prompts is None
    # A row is used again by a request that asks for nothing.
    assert not [chunk for chunk in (client.step([7]), client.step([7])) if chunk.prompts is not None]


def test_a_chunk_that_samples_no_token_gives_them(served: Served) -> None:
    client, ids = served.client(), random_ids(20)
    first = client.first_chunk(7, ids, prompt_logprobs=0)
    output = client.step([], [PromptChunk(7, 0, 20, False, first.ids, first.slots, 20, first.sampling, 0)])
    assert output.request_ids == [] and not client.tokens
    torch.testing.assert_close(prompts_of(output).logprobs, own(served.expected(ids), ids), atol=1e-4, rtol=1e-4)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size of the largest tensor that torch makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(made, Tensor) and not func.is_view:
                self.bytes = max(self.bytes, made.nbytes)
        return result


def test_a_longer_prompt_takes_no_more_memory_at_a_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 20 tokens give the same bits as all at once."""
    ids = random_ids(400)
    (whole,) = served.in_chunks(ids, [400], 2)
    limit = 20 * VOCABULARY * 4
    monkeypatch.setattr(prompt_logprobs, "MAX_LOGITS_BYTES", limit)
    assert prompt_logprobs.tokens_at_a_time(VOCABULARY) == 20
    chunk = served.client().first_chunk(7, ids, prompt_logprobs=2)
    state, model = served.runner.row_state, served.runner._model
    with torch.inference_mode():
        step = state.planner.prepare([], torch.empty(0, dtype=torch.int32), 1, [chunk])
        assert step.scored is not None
        hidden_TH, history = torch.randn(400, 64), state.batches.rows.history
        with LargestTensor() as largest:
            prompt_logprobs.score_prompts(
                step.scored, history, lambda tokens_P: model.logits(hidden_TH[tokens_P]), VOCABULARY, 16, lambda: None
            )
    assert VOCABULARY * 16 * 4 < largest.bytes <= limit
    (in_parts,) = served.in_chunks(ids, [400], 2)
    assert torch.equal(in_parts.logprobs, whole.logprobs) and torch.equal(in_parts.top_logprobs, whole.top_logprobs)


def test_progress_is_reported_after_each_part(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    signs: list[None] = []
    monkeypatch.setattr(served.runner, "_on_progress", lambda: signs.append(None))
    served.in_chunks(random_ids(101), [101], 0)
    at_once = len(signs)
    monkeypatch.setattr(prompt_logprobs, "MAX_LOGITS_BYTES", 20 * VOCABULARY * 4)
    served.in_chunks(random_ids(101), [101], 0)
    assert len(signs) - at_once == at_once + 4
