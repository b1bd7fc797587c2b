"""What follows the attention in a layer: an MLP. A mixture of experts may take its place."""

from torch import Tensor

from text_generation_common.models.architecture import Activation
from text_generation_common.models.names import LayerNames
from text_generation_server.layers.linear import PANEL
from text_generation_server.models.loading import stacked
from text_generation_server.models.parts import Parts


class MLP:
    def __init__(self, parts: Parts, names: LayerNames, of: tuple[int, range] | None = None) -> None:
        """`of`: the numbers between the products, and which of them are this rank's. None: config.json's."""
        config = parts.config
        size, part = of or (config.intermediate_size, parts.split.intermediate)
        self._kernels = parts.kernels
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

    def part(self, x_TH: Tensor) -> Tensor:
        """What this rank adds to the result."""
        return self._down.part(self._inner(x_TH))

    def _inner(self, x_TH: Tensor) -> Tensor:
        x = self._up(x_TH)
        return x if self._in_product else self._kernels.activate(x, self._activation, self._gated)
