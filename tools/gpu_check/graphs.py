"""Checks that decode steps replayed from CUDA graphs give the same results as kernels launched one by one."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from gpu_check.comparing import equal, worst
from gpu_check.findings import Case, Context, Measured
from gpu_check.model import REHEARSED
from gpu_check.runners import SPARE, Player, RunnerLoad, make_runner
from text_generation_benchmark.shapes import LLAMA_8B
from text_generation_common.sampling import Sampling

TABLE = "Steps from graphs, to the bit"
STEPS, LONGEST = 12, 256
# By number of rows, the tokens of a prompt. Half of the rows join first, and then the other half, whose prompts are a
# token shorter, beside them: both steps have as many tokens as a graph has. In a padded step, torch's products of other
# numbers of rows need not have the same bits.
PROMPTS = {2: 64, 8: 32, 64: 16}


def compare_replay(context: Context) -> Iterator[Case]:
    """Without a GPU both runs launch kernels one by one."""
    for rows, prompt in PROMPTS.items() if context.on_gpu else ((2, 64),):

        def compare(rows: int = rows, prompt: int = prompt) -> Iterable[Measured]:
            replayed, launched = (decode(context, rows, prompt, graphs) for graphs in (True, False))
            yield worst(*(equal(ours, theirs) for ours, theirs in zip(replayed, launched, strict=True)))

        yield Case(TABLE, {"steps": f"{STEPS} of {rows} rows, half of them greedy, after mixed steps"}, compare)


def decode(context: Context, rows: int, prompt: int, graphs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, log-probabilities) of all steps, for prompts of random ids, the same in every call."""
    shape = replace(LLAMA_8B, layers=2) if context.on_gpu else REHEARSED
    load = RunnerLoad(shape, rows, LONGEST, rows * prompt, rows * (prompt + SPARE), graphs=graphs)
    drawing = {i: Sampling(do_sample=True, temperature=0.8, seed=i) for i in range(1, rows, 2)}
    player = Player(make_runner(load, context.device), load, sampling=drawing)
    half = range(rows // 2)
    outputs = [player.launch([], [player.chunk(i, prompt) for i in half]).wait()]
    outputs.append(player.launch(half, [player.chunk(i, prompt - 1) for i in range(len(half), rows)]).wait())
    outputs += [player.launch(range(rows)).wait() for _ in range(STEPS)]
    return torch.cat([out.token_ids for out in outputs]), torch.cat([out.logprobs for out in outputs])
