"""Checks that decode steps replayed from CUDA graphs give the same results as kernels launched one by one."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from gpu_check.comparing import equal, worst
from gpu_check.findings import Case, Context, Measured
from gpu_check.model import REHEARSED
from gpu_check.runners import SPARE, Load, Player, make_runner
from text_generation_benchmark.shapes import LLAMA_8B
from text_generation_common.sampling import Sampling

TABLE = "Decode steps from graphs, to the bit"
PROMPT, STEPS, LONGEST = 40, 12, 256


def compare_replay(context: Context) -> Iterator[Case]:
    """Without a GPU both runs launch kernels one by one."""
    for rows in (1, 8, 64) if context.on_gpu else (2,):

        def compare(rows: int = rows) -> Iterable[Measured]:
            replayed, launched = (decode(context, rows, graphs) for graphs in (True, False))
            yield worst(*(equal(ours, theirs) for ours, theirs in zip(replayed, launched, strict=True)))

        yield Case(TABLE, {"steps": f"{STEPS} of {rows} rows, half of them greedy"}, compare)


def decode(context: Context, rows: int, graphs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, log-probabilities) of STEPS decode steps after prompts of random ids, the same in every call."""
    shape = replace(LLAMA_8B, layers=2) if context.on_gpu else REHEARSED
    load = Load(shape, rows, LONGEST, rows * PROMPT, rows * (PROMPT + SPARE), graphs=graphs)
    drawing = {i: Sampling(do_sample=True, temperature=0.8, seed=i) for i in range(1, rows, 2)}
    player = Player(make_runner(load, context.device), load, sampling=drawing)
    outputs = [player.launch([], [player.chunk(i, PROMPT) for i in range(rows)]).wait()]
    outputs += [player.launch(range(rows)).wait() for _ in range(STEPS)]
    return torch.cat([out.token_ids for out in outputs]), torch.cat([out.logprobs for out in outputs])
