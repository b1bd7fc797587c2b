"""Steps of the demo model on a GPU: nothing waits for it, graphs change no bit. Without a GPU nothing is watched."""

import gc
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_check.device import DEVICE, GPU
from shard_tools import Client, make_runner, random_ids, scattered_slots  # type: ignore[import-not-found]

from text_generation_common.model_files import demo_directory
from text_generation_common.sampling import Sampling
from text_generation_server.device.graphs import DEFAULT_SIZES, MIXED_SIZES, CudaRecorder, DecodeGraphs
from text_generation_server.device.transfers import moments_of, use_own_stream
from text_generation_server.grammars.compiler import GrammarCompiler, ModelTokens
from text_generation_server.grammars.constraints import Constraints
from text_generation_server.step.warmup import EVERY_OPTION

VOCABULARY, LONGEST, SLOTS = 2048, 256, 16_384
# The grammar of EVERY_OPTION cannot be compiled: its warm-up does not read it.
OPTIONS, GREEDY = replace(EVERY_OPTION, grammar=""), Sampling()
ANY_TEXT = Sampling(grammar=r'{"grammars": [{"lark_grammar": "start: /(.|\n)*/"}]}')
# What torch warns of a call that waits. It warns once, in other words, that the watch itself is a prototype.
WAITED = "called a synchronizing CUDA operation"

pytestmark = pytest.mark.limit(60)


def client_of(graphs: bool, chunk: int, rows: int) -> Client:
    gc.collect()  # frees the memory of runners whose objects refer to each other
    use_own_stream(DEVICE)
    recording: dict[str, Any] = {"device": DEVICE, "mark": moments_of(DEVICE)}
    if graphs and GPU:
        recorder = CudaRecorder()
        recording["graphs"] = DecodeGraphs(DEFAULT_SIZES, recorder)
        recording["mixed_graphs"] = DecodeGraphs(MIXED_SIZES, recorder, unit="tokens")
    tokens = ModelTokens((demo_directory() / "tokenizer.json").read_text(), VOCABULARY, (2,))
    constraints = Constraints(GrammarCompiler(tokens), DEVICE)
    runner = make_runner(demo_directory(), torch.bfloat16, LONGEST, constraints=constraints, **recording)
    runner.warmup(chunk, LONGEST, rows, SLOTS)
    return Client(runner, scattered_slots(runner))


def test_no_step_waits_for_the_device() -> None:
    """torch.cuda.set_sync_debug_mode covers torch's own calls, such as a copy from pageable memory."""
    client = client_of(graphs=True, chunk=400, rows=10)
    sampling = {1: OPTIONS, 5: OPTIONS, 7: ANY_TEXT}

    def step(decoding: list[int], *joining: int, logprobs: int | None = None) -> Counter[str]:
        """How often each line waits for the device."""
        ids = random_ids(100)
        chunks = []
        for i in joining:
            chunks += [client.first_chunk(i, ids, parameters=sampling.get(i, GREEDY), prompt_logprobs=logprobs)]
        with warnings.catch_warnings(record=True) as caught, watched():
            pending = client.launch(decoding, chunks)
        assert not pending.wait().failures
        return Counter(f"{warned.filename}:{warned.lineno}" for warned in caught if WAITED in str(warned.message))

    # The first step of each kind loads torch's kernels, and torch may wait meanwhile.
    step([], 0, 1)
    step([0], 2)
    seen = {"two join": step([], 3, 4), "four decode, two join": step([0, 1, 2, 3], 5, 6)}
    step([0, 1, 5, 6])
    seen |= {"four decode": step([0, 1, 2, 3]), "three decode": step([0, 1, 2])}
    step([0], 8, logprobs=5)
    seen |= {"log-probabilities of a prompt": step([0], 9, logprobs=5)}
    seen |= {"one with a grammar joins": step([], 7), "it decodes": step([7]), "and again": step([7])}
    assert not {kind: lines for kind, lines in seen.items() if lines}


@contextmanager
def watched() -> Iterator[None]:
    warnings.simplefilter("always")
    if GPU:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
    yield
    if GPU:
        torch.cuda.set_sync_debug_mode("default")


# By number of rows, the tokens of a prompt. Half of the rows join first, and then the other half, whose prompts are a
# token shorter, beside them: both steps have as many tokens as a graph has. In a padded step, torch's products of other
# numbers of rows need not have the same bits.
@pytest.mark.parametrize(("rows", "prompt"), [(2, 64), (8, 32), (64, 16)] if GPU else [(2, 64)])
def test_steps_from_graphs_have_the_bits_of_launched_kernels(rows: int, prompt: int) -> None:
    (ids, logprobs), (expected_ids, expected) = (played(rows, prompt, graphs) for graphs in (True, False))
    assert torch.equal(ids, expected_ids) and torch.equal(logprobs, expected)


def played(rows: int, prompt: int, graphs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, log-probabilities) of all steps, the same in every call. Every other row draws its tokens."""
    client, half = client_of(graphs, rows * prompt, rows), rows // 2
    drawing = Sampling(do_sample=True, temperature=0.8)

    def join(request: int, length: int) -> Any:
        parameters = replace(drawing, seed=request) if request % 2 else GREEDY
        return client.first_chunk(request, random_ids(length, request), parameters=parameters)

    outputs = [client.step([], [join(i, prompt) for i in range(half)])]
    outputs += [client.step([*range(half)], [join(i, prompt - 1) for i in range(half, rows)])]
    outputs += [client.step([*range(rows)]) for _ in range(12)]
    return torch.cat([out.token_ids for out in outputs]), torch.cat([out.logprobs for out in outputs])
