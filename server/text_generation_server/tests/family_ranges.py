"""Measures how large the scores of attention, the inputs of activations and the logits of a model become."""

from pathlib import Path
from typing import Any, cast

import torch
from shard_tools import Client, random_ids, scattered_slots, warm_runner
from torch import Tensor

from text_generation_server.kernels import reference
from text_generation_server.kernels.interface import (
    AttentionOptions,
    Choices,
    ExpertWeights,
    Kernels,
    KvLayer,
    Routes,
    Segments,
)

TOKENS = 150


class MeasuringKernels:
    """The reference, which notes the largest numbers that it meets in prompts."""

    def __init__(self) -> None:
        self.largest = dict.fromkeys(("scores", "gates", "logits"), 0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    def attend(
        self, q_THD: Tensor, kv: KvLayer, table: Tensor, rows_R: Tensor, lengths_R: Tensor, segments: Segments | None,
        options: AttentionOptions,
    ) -> Tensor:  # fmt: skip
        for first, row, start, end in segments.runs() if segments is not None else ():
            keys_LGD = kv.heads[table[row, :end].long(), : kv.kv_heads]
            keys_LHD = keys_LGD.repeat_interleave(q_THD.shape[1] // kv.kv_heads, dim=1)
            scores_HTL = torch.einsum("thd,lhd->htl", q_THD[first : first + end - start], keys_LHD) * options.scale
            self._note("scores", scores_HTL.tril(start))
        return reference.attend(q_THD, kv, table, rows_R, lengths_R, segments, options)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        self._note("gates", gate_up.chunk(2, dim=-1)[0])
        return reference.silu_mul(gate_up)

    def activate(self, x: Tensor, activation: Any, gated: bool) -> Tensor:
        self._note("gates", x.chunk(2, dim=-1)[0] if gated else x)
        return reference.activate(x, activation, gated)

    def experts(self, x_TH: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        self._note("gates", torch.einsum("th,enh->ten", x_TH, weights.gate_up).chunk(2, dim=-1)[0])
        return reference.experts(x_TH, routes, weights)

    def sample(self, logits_RV: Tensor, choices: Choices) -> Any:
        self._note("logits", logits_RV)
        return reference.sample(logits_RV, choices)

    def _note(self, what: str, numbers: Tensor) -> None:
        self.largest[what] = max(self.largest[what], numbers.abs().max().item())


def ranges(path: Path) -> dict[str, float]:
    """The largest score, gate and logit, by absolute value, of texts of TOKENS tokens and fewer."""
    kernels = MeasuringKernels()
    runner = warm_runner(path, kernels=cast(Kernels, kernels), max_total_tokens=TOKENS + 8)
    kernels.largest = dict.fromkeys(kernels.largest, 0.0)
    client = Client(runner, scattered_slots(runner))
    client.step([], [client.first_chunk(n, random_ids(n, n)) for n in (TOKENS, 40, 17, 9)])
    return kernels.largest
