"""Measures how large the scores of attention, the inputs of activations and the logits of a model become."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
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

    def experts(self, x_TH: Tensor, routes: Routes, weights: ExpertWeights, adapted: Any = None) -> Tensor:
        self._note("gates", torch.einsum("th,enh->ten", x_TH, weights.gate_up.values).chunk(2, dim=-1)[0])
        return reference.experts(x_TH, routes, weights, adapted)

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


# Routers whose choice of experts no rounding changes.
#
# A router with random weights often finds two experts nearly equally good. Where one of them is chosen and the other is
# not, rounding to bfloat16 exchanges them, and the token gets other numbers, by as much as experts differ. A text's
# score would then tell of ties, not of the precision of the computation.
#
# Here the router sees the kind of a token: the first numbers of an embedding, of which one is large, and which no layer
# changes. The router of each layer prefers the experts in an order that depends on the kind.
LARGE = 8.0  # the number of an embedding that says its kind; the others are about 0.2
STEP = 0.5  # the difference between the weights of one expert and the next, for the number that says the kind
OTHERS = 0.02  # what the random weights and biases of the router are multiplied by
# The last matrices and biases of branches: what they write is added to the hidden states.
WRITES = re.compile(r"(o_proj|down_proj)(\.weight|\.bias|_bias)?$")


def routers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Transformers' routers, one for each layer that has experts."""
    return (module for module in model.modules() if type(module).__name__.endswith("Router"))


@torch.no_grad()
def make_decisive(model: torch.nn.Module) -> None:
    """Rewrites the weights of a model, if it has experts. A token's kind is the rest of its id divided by the number of
    experts."""
    found = list(routers(model))
    if not found:
        return
    experts = len(found[0].weight)
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    embedding[:, :experts] = LARGE * F.one_hot(torch.arange(len(embedding)) % experts, experts)
    for name, parameter in model.named_parameters():
        if WRITES.search(name):
            # gpt-oss has the weights of its experts as [experts, inputs, outputs].
            is_turned = name.endswith("bias") or (parameter.dim() == 3 and model.config.model_type == "gpt_oss")  # type: ignore[union-attr]
            parameter.narrow(-1 if is_turned else -2, 0, experts).zero_()
    for layer, router in enumerate(found):
        kinds, places = torch.arange(experts), torch.arange(experts).unsqueeze(1)
        for parameter in router.parameters():
            parameter *= OTHERS
        router.weight[:, :experts] = STEP * ((experts - 1) / 2 - (places - kinds - layer) % experts)  # type: ignore[index]


def least_gap(model: torch.nn.Module, ids_T: torch.Tensor) -> float:
    """Over all tokens and layers, the smallest difference between the logits of an expert that is chosen and of one
    that is not, as a share of the token's largest logit; infinity without experts."""
    gaps = [float("inf")]

    def note(router: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        x_TH = inputs[0].flatten(0, -2)
        logits_TE = F.linear(x_TH, router.weight, getattr(router, "bias", None))  # type: ignore[arg-type]
        ordered_TE = logits_TE.sort(dim=1, descending=True).values
        chosen = model.config.num_experts_per_tok  # type: ignore[union-attr]
        gap_T = ordered_TE[:, chosen - 1] - ordered_TE[:, chosen]
        gaps.append((gap_T / logits_TE.abs().amax(dim=1)).min().item())  # type: ignore[operator]

    hooks = [router.register_forward_hook(note) for router in routers(model)]
    with torch.no_grad():
        model(ids_T.unsqueeze(0))
    for hook in hooks:
        hook.remove()
    return min(gaps)
