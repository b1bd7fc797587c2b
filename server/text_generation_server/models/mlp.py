"""What follows the attention in a layer: an MLP, or a mixture of experts in its place."""

from torch import Tensor

from text_generation_server.distributed import Group
from text_generation_server.kernels.interface import Activation
from text_generation_server.layers.linear import make_linear
from text_generation_server.layers.weights import dense
from text_generation_server.models.architecture import Moe
from text_generation_server.models.loading import stacked
from text_generation_server.models.names import LayerNames
from text_generation_server.models.parts import Parts


class MLP:
    def __init__(self, parts: Parts, names: LayerNames) -> None:
        config, part, size = parts.config, parts.split.intermediate, parts.config.intermediate_size
        self._kernels = parts.kernels
        self._activation, self._gated = config.activation, config.gated
        # The gate of silu is part of the product; other activations are a kernel of their own.
        self._in_product = config.gated and config.activation is Activation.silu
        gate = [(names.gate, size, part)] if config.gated else []
        wanted = stacked(*gate, (names.up, size, part))
        self._up = parts.loader.fused(wanted, config.biases.mlp, gated=self._in_product)
        self._down = parts.loader.row_split(names.down, part, config.biases.mlp, parts.linear_factor)

    def __call__(self, x_TH: Tensor) -> Tensor:
        x = self._up(x_TH)
        return self._down(x if self._in_product else self._kernels.activate(x, self._activation, self._gated))


class Experts:
    """A mixture of experts. All ranks choose the same experts, and each computes its part of every expert."""

    def __init__(self, parts: Parts, moe: Moe, names: LayerNames, group: Group) -> None:
        loader, part = parts.loader, parts.split.expert_intermediate
        self._kernels = parts.kernels
        self._group = group
        self._moe = moe
        self._router = make_linear(parts.kernels, dense(loader.whole(f"{names.router}.weight")))
        self._gate_up, self._down = loader.experts(names, moe.experts, moe.intermediate_size, part)
        if parts.linear_factor != 1:
            self._down = (self._down.float() * parts.linear_factor).to(loader.dtype)

    def __call__(self, x_TH: Tensor) -> Tensor:
        routes = self._kernels.route(self._router(x_TH), self._moe.chosen, self._moe.over_chosen)
        return self._group.all_reduce(self._kernels.experts(x_TH, routes, self._gate_up, self._down))
