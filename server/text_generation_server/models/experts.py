"""What follows the attention in a layer: an MLP, or a mixture of experts in its place, where the files have the weights
of experts, and what they compute.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from text_generation_common.adapters.names import ExpertRole, expert_layer
from text_generation_common.errors import ModelError
from text_generation_common.models.architecture import Activation, ModelConfig, Moe
from text_generation_common.models.names import ExpertLayout, LayerNames, expert_name
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_server.distributed import Group
from text_generation_server.kernels.interface import AdaptedPairs, ExpertCodes, ExpertKernel, ExpertWeights, Routes
from text_generation_server.layers.adapted import ExpertAdapters
from text_generation_server.layers.linear import PANEL, make_linear
from text_generation_server.layers.vocabulary import pad_rows
from text_generation_server.layers.weights import dense
from text_generation_server.models.adapters import AdaptedPart
from text_generation_server.models.loading import LayerPart, Loader, stacked
from text_generation_server.models.parts import Parts


class Experts:
    """All ranks choose the same experts, and each computes its part of every expert."""

    def __init__(self, parts: Parts, moe: Moe, names: LayerNames, group: Group) -> None:
        loader = parts.loader
        self._kernels = parts.kernels
        self._group = group
        self._moe = moe
        outputs = -(-moe.experts // PANEL) * PANEL
        router = pad_rows(loader.numbers(names.router), outputs)
        bias = pad_rows(loader.whole(f"{names.router}.bias"), outputs) if parts.config.biases.experts else None
        linear = make_linear(parts.kernels, dense(router), bias)
        self._router = loader.adapted(linear, [AdaptedPart(names.router, outputs, lambda up: pad_rows(up, outputs))])
        self._compute = make_experts(parts, moe, names, group)
        self._adapters = _adapters_of(parts, moe, names)
        self._shared: MLP | None = None
        if moe.shared_size:
            shared = replace(names, gate=names.shared_gate, up=names.shared_up, down=names.shared_down)
            self._shared = MLP(parts, shared, (moe.shared_size, parts.split.shared_intermediate))
            self._shared_score_H = loader.numbers(names.shared_score).flatten()
            # A kernel computes whole vectors of outputs, of which the score is the first one.
            score = AdaptedPart(names.shared_score, PANEL, lambda up: pad_rows(up, PANEL))
            self._score_matrices = loader.matrices_of([score])

    def __call__(self, x_TH: Tensor) -> Tensor:
        logits_TE = self._router(x_TH)[:, : self._moe.experts]
        routes = self._kernels.route(logits_TE, self._moe.chosen, self._moe.over_chosen)
        out = self._compute(x_TH, routes, adapted=self._adapters.of_step(routes))
        if self._shared is not None:
            addend = self._adapters.of_layer(x_TH, self._score_matrices)
            out = self._kernels.add_scored(out, self._shared.part(x_TH), x_TH, self._shared_score_H, addend)
        return self._group.all_reduce(out)


def _adapters_of(parts: Parts, moe: Moe, names: LayerNames) -> ExpertAdapters:
    """What adapters add to this rank's part of every expert."""
    loader, own, hidden = parts.loader, parts.split.expert_intermediate, parts.config.hidden_size
    gate, up, down = (expert_layer(names, role) for role in (ExpertRole.gate, ExpertRole.up, ExpertRole.down))
    halves = [AdaptedPart(layer, len(own), lambda up: up[own.start : own.stop]) for layer in (gate, up)]
    of_down = AdaptedPart(
        down, hidden, lambda up: up * parts.linear_factor, of_down=lambda down: down[:, own.start : own.stop]
    )
    matrices = [loader.matrices_of(of, moe.experts) for of in (halves, [of_down])]
    return ExpertAdapters(parts.kernels, matrices[0], matrices[1], loader.adapters.of_step)


def make_experts(parts: Parts, moe: Moe, names: LayerNames, group: Group) -> ExpertKernel:
    """What the experts compute on this rank."""
    loader = parts.loader
    if are_codes(parts, moe, names) or not loader.is_dense or loader.keeps_float16(names_of_expert(names, 0).gate):
        experts = codes_of_experts(parts, moe, names, group)
        if (found := parts.kernels.experts_of_codes(experts, moe.clamped, loader.dtype)) is not None:
            return found
        if runs_one_by_one(parts.config):
            size = moe.intermediate_size, parts.split.expert_intermediate
            return ExpertMlps([MLP(parts, names_of_expert(names, number), size) for number in range(moe.experts)])
        if not loader.is_dense:
            raise ModelError(
                f"--quantize is not supported for the experts of this {parts.config.model_type} without compiled"
                " kernels: start without it, or install a C compiler and the package again"
            )
    return partial(parts.kernels.experts, weights=load_experts(parts, moe, names, group))


def runs_one_by_one(config: ModelConfig) -> bool:
    """Whether experts of codes are `ExpertMlps`, not numbers, where no kernel multiplies them together: they have gates
    as those of MLPs."""
    return config.moe is not None and config.moe.clamped is None


def are_codes(parts: Parts, moe: Moe, names: LayerNames) -> bool:
    """Whether an expert's weights are quantized in the files."""
    experts = (names_of_expert(names, number) for number in range(moe.experts))
    return any(parts.loader.has_codes(name) for of in experts for name in (of.gate, of.up, of.down))


def codes_of_experts(parts: Parts, moe: Moe, names: LayerNames, group: Group) -> Iterator[ExpertCodes]:
    """This rank's part of each expert, read when it is asked for."""
    loader, own = parts.loader, parts.split.expert_intermediate
    of_up, of_down = _biases(parts, names, group)
    for number in range(moe.experts):
        of = names_of_expert(names, number)
        wanted = stacked((of.gate, moe.intermediate_size, own), (of.up, moe.intermediate_size, own))
        if parts.config.names.experts is ExpertLayout.turned:
            wanted = [LayerPart(of.up, _turns(own), [turn], 2) for turn in (0, 1)]
        down, factor = loader.inputs(of.down, own, parts.linear_factor)
        gate_up_bias, down_bias = (None if bias is None else bias[number] for bias in (of_up, of_down))
        yield ExpertCodes(loader.outputs(wanted), down, gate_up_bias, down_bias, factor)


def _biases(parts: Parts, names: LayerNames, group: Group) -> tuple[Tensor | None, Tensor | None]:
    """Biases of gates and ups, [E, 2I], and of downs, [E, H]: one rank adds those of the sum over ranks."""
    if not parts.config.biases.experts:
        return None, None
    loader, own = parts.loader, parts.split.expert_intermediate
    if parts.config.names.experts is ExpertLayout.merged:
        ending = ".bias"
        of_up = torch.cat([loader.along(f"{of}.bias", 1, own) for of in (names.expert_gate, names.expert_up)], dim=1)
    else:
        ending = "_bias"
        of_up = _in_halves(loader.along(f"{names.expert_up}_bias", 1, _turns(own)))
    of_down = loader.whole(f"{names.expert_down}{ending}", parts.linear_factor) if group.rank == 0 else None
    return of_up, of_down


def load_experts(parts: Parts, moe: Moe, names: LayerNames, group: Group) -> ExpertWeights:
    """This rank's part of all experts of a layer."""
    loader, own, factor = parts.loader, parts.split.expert_intermediate, parts.linear_factor
    match parts.config.names.experts:
        case ExpertLayout.apart:
            gate_up, down = _apart(loader, names, moe, own)
        case ExpertLayout.merged:
            gate_up, down = _merged(loader, names, moe, own)
        case ExpertLayout.stacked:
            name, size = f"{names.expert_up}.weight", moe.intermediate_size
            halves = [loader.along(name, 1, range(at + own.start, at + own.stop)) for at in (0, size)]
            gate_up, down = torch.cat(halves, dim=1), loader.along(f"{names.expert_down}.weight", 2, own)
        case ExpertLayout.turned if are_codes(parts, moe, names):
            gate_up, down = _numbers_of(codes_of_experts(parts, moe, names, group), loader, moe.experts)
            factor = 1.0
        case ExpertLayout.turned:
            gate_up = _in_halves(loader.along(names.expert_up, 2, _turns(own)).transpose(1, 2))
            down = loader.along(names.expert_down, 1, own).transpose(1, 2).contiguous()
    if factor != 1:
        down = (down.float() * factor).to(loader.dtype)
    return ExpertWeights(dense(gate_up), dense(down), *_biases(parts, names, group), clamped=moe.clamped)


def _numbers_of(experts: Iterator[ExpertCodes], loader: Loader, count: int) -> tuple[Tensor, Tensor]:
    """Gates and ups, and downs, of experts of codes: numbers in the model's type. One expert at a time, because its
    numbers are larger in float32."""
    found: list[Tensor] = []
    for number, expert in enumerate(experts):
        numbers = (
            torch.cat([exact_weight(weight) for weight in expert.gate_up]),
            exact_weight(expert.down) * expert.factor,
        )
        found = found or [loader.empty(count, *of.shape) for of in numbers]
        for out, of in zip(found, numbers, strict=True):
            out[number] = of
    return found[0], found[1]


def _apart(loader: Loader, names: LayerNames, moe: Moe, own: range) -> tuple[Tensor, Tensor]:
    gate_ups, downs = [], []
    for i in range(moe.experts):
        gate, up, down = (f"{n.format(i)}.weight" for n in (names.expert_gate, names.expert_up, names.expert_down))
        gate_ups.append(torch.cat([loader.rows(gate, own), loader.rows(up, own)]))
        downs.append(loader.columns(down, own))
    return _stacked(loader, gate_ups), _stacked(loader, downs)


def _merged(loader: Loader, names: LayerNames, moe: Moe, own: range) -> tuple[Tensor, Tensor]:
    if not loader.has_codes(names.expert_up):
        both = [loader.along(f"{name}.weight", 1, own) for name in (names.expert_gate, names.expert_up)]
        return torch.cat(both, dim=1), loader.along(f"{names.expert_down}.weight", 2, own)
    # Codes are unpacked one expert at a time, because their numbers are larger in float32 than in the model's type.
    gate_ups, downs = [], []
    for i in range(moe.experts):
        gate, up, down = (loader.numbers(f"{n}[{i}]") for n in (names.expert_gate, names.expert_up, names.expert_down))
        gate_ups.append(torch.cat([gate[own.start : own.stop], up[own.start : own.stop]]))
        downs.append(down[:, own.start : own.stop])
    return _stacked(loader, gate_ups), _stacked(loader, downs)


def _stacked(loader: Loader, weights: list[Tensor]) -> Tensor:
    return torch.stack(weights, out=loader.empty(len(weights), *weights[0].shape))


def _turns(own: range) -> range:
    """Where gates and ups are in turns: those of this rank."""
    return range(2 * own.start, 2 * own.stop)


def _in_halves(turns: Tensor) -> Tensor:
    """Gates and ups in turns along the second dimension, as gates and then ups."""
    return torch.cat([turns[:, 0::2], turns[:, 1::2]], dim=1)


def names_of_expert(names: LayerNames, number: int) -> LayerNames:
    """The names of an expert's layers as those of an MLP."""
    gate, up, down = names.expert_gate or names.expert_up, names.expert_up, names.expert_down
    gate, up, down = (expert_name(name, number) for name in (gate, up, down))
    return replace(names, gate=gate, up=up, down=down)


class ExpertMlps:
    """Experts whose weights are codes that no kernel multiplies together. Each is an MLP by the products of its forms,
    and they compute one after the other."""

    def __init__(self, mlps: Sequence["MLP"]) -> None:
        self._mlps = mlps

    def __call__(self, x_TH: Tensor, routes: Routes, *, adapted: AdaptedPairs | None = None) -> Tensor:
        tokens, width = x_TH.shape
        chosen = len(routes.pairs_P) // tokens
        parts = torch.empty((len(routes.pairs_P), width), dtype=torch.float32, device=x_TH.device)
        for mlp, (start, end) in zip(self._mlps, pairwise(routes.offsets.tolist()), strict=True):
            if start < end:
                pairs = routes.pairs_P[start:end].long()
                own = None if adapted is None else adapted.between(start, end)
                parts[pairs] = mlp.part(x_TH[pairs // chosen], own) * routes.scores_P[pairs].unsqueeze(1)
        return parts.view(tokens, chosen, width).sum(1).to(x_TH.dtype)


class MLP:
    def __init__(self, parts: Parts, names: LayerNames, of: tuple[int, range] | None = None) -> None:
        """`of`: the numbers between the products, and which of them are this rank's. None: config.json's."""
        config = parts.config
        size, part = of or (config.intermediate_size, parts.split.intermediate)
        self._kernels = parts.kernels
        self._size = len(part)
        self._activation, self._gated = config.activation, config.gated
        # The gate of silu is part of the product; other activations are a kernel of their own.
        self._in_product = config.gated and config.activation is Activation.silu
        gate = [(names.gate, size, part)] if config.gated else []
        wanted = stacked(*gate, (names.up, size, part))
        # Every activation of 0 is 0, so zeros after the numbers of this rank change nothing.
        self._up = parts.loader.fused(wanted, config.biases.mlp, gated=self._in_product, multiple=PANEL)
        self._down = parts.loader.row_split(names.down, part, config.biases.mlp, parts.linear_factor, PANEL)

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self._down(self._inner(x_TH))

    def part(self, x_TH: Tensor, adapted: AdaptedPairs | None = None) -> Tensor:
        """What this rank adds to the result. `adapted`: what adapters add to an expert's products of the rows of x."""
        if adapted is None:
            return self._down.part(self._inner(x_TH))
        if (addend := adapted.of_gate_up(x_TH)) is not None:
            addend = pad(addend.view(len(x_TH), 2, -1), (0, -self._size % PANEL)).flatten(1)
        x = self._inner(x_TH, addend)
        return self._down.part(x, adapted.of_down(x[:, : self._size].contiguous()))

    def _inner(self, x_TH: Tensor, addend: Tensor | None = None) -> Tensor:
        x = self._up(x_TH, addend=addend)
        return x if self._in_product else self._kernels.activate(x, self._activation, self._gated)
