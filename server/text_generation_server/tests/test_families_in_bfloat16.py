"""Every family in bfloat16 on the CPU: its decode steps are recorded as programs, and its texts have nearly the scores
of float32. Experts are not chosen at ties: another choice would be another computation, not a less precise one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_checkpoints import VARIANTS
from family_ranges import least_gap
from family_tools import EVERYTHING, Checkpoints, teacher_forced
from shard_tools import CPU, Client, make_runner, random_ids, scattered_slots

from text_generation_server.device.graphs import no_graphs
from text_generation_server.kernels import select_backend
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.cpu.programs import DecodePrograms
from text_generation_server.runner import ModelRunner

# Tolerance of the mean log-probability of a token: four roundings to bfloat16, of 2^-8 each.
SCORE_TOLERANCE = 2.0**-6
# Least distance of an expert that is chosen from one that is not, as a share of a token's largest logit: 32 roundings.
LEAST_GAP = 2.0**-3
PROMPTS = (5, 70, 33)  # lengths; the last one joins the others
BEFORE, AFTER = 4, 33  # steps before and after it joins
TOKENS = 3 * (AFTER + 1) + 2 * (BEFORE + 1)  # the tokens of all texts
QUICK = ("bloom", "qwen3_moe", "starcoder2")


def written(runner: ModelRunner) -> tuple[Client, list[torch.Tensor]]:
    """Texts of two requests that start together, and of one that joins them. The log-probabilities of all tokens."""
    runner.warmup(256, None, 8, None)
    client = Client(runner, scattered_slots(runner))
    first, second, joining = (
        client.first_chunk(i, random_ids(n, n), parameters=EVERYTHING) for i, n in enumerate(PROMPTS)
    )
    outputs = [client.step([], [first, second]), *(client.step([0, 1]) for _ in range(BEFORE))]
    outputs += [client.step([0, 1], [joining]), *(client.step([0, 1, 2]) for _ in range(AFTER))]
    return client, [output.top_logprobs for output in outputs]


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=() if name in QUICK else pytest.mark.models) for name in VARIANTS]
)
def test_recorded_steps_give_the_bits_of_single_calls_and_nearly_the_scores_of_float32(
    checkpoints: Checkpoints, variant: str, record_property: Callable[[str, Any], None]
) -> None:
    kernels = select_backend(CPU).kernels
    if not isinstance(kernels, CpuKernels) or not kernels.library.has("gemm"):
        pytest.skip("needs compiled matrix products: a C compiler (cc) at install and a processor with avx512_bf16")
    made, programs = checkpoints(variant, calm=True), DecodePrograms(kernels.library, kernels.threads)
    options = {"max_total_tokens": made.longest, "kernels": kernels}
    single, _ = plain = written(make_runner(made.path, torch.bfloat16, graphs=no_graphs(), **options))
    recorded, _ = fast = written(make_runner(made.path, torch.bfloat16, graphs=programs, **options))
    assert set(programs._programs) == {1, 2, 3}
    assert recorded.tokens == single.tokens and recorded.logprobs == single.logprobs
    assert all(torch.equal(a, b) for a, b in zip(fast[1], plain[1], strict=True))

    ours, theirs = [], []
    for i, length in enumerate(PROMPTS):
        tokens = torch.tensor(recorded.tokens[i])
        prompt = random_ids(length, length)
        assert least_gap(made.model, torch.cat([prompt, tokens])) >= LEAST_GAP
        forced = teacher_forced(made.model, prompt, recorded.tokens[i])
        theirs.append(forced.gather(1, tokens.unsqueeze(1)).squeeze(1))
        ours.append(torch.tensor(recorded.logprobs[i]))
    difference = (torch.cat(ours).mean() - torch.cat(theirs).mean()).abs().item()
    assert len(torch.cat(ours)) == TOKENS
    record_property("bfloat16", difference)
    assert difference <= SCORE_TOLERANCE
