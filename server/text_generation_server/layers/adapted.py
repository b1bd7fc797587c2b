"""A linear layer to whose outputs the adapters of a step's tokens add."""

from torch import Tensor

from text_generation_server.kernels.interface import AdapterMatrices, Kernels, LinearKernel


class StepAdapters:
    """The adapter of each token of the step that is being computed, by its slot (int32 [T]; -1: none). None: no token
    has one, and layers compute as if there were no adapters."""

    def __init__(self) -> None:
        self.slots_T: Tensor | None = None


class AdaptedLinear:
    def __init__(
        self, kernels: Kernels, linear: LinearKernel, matrices: AdapterMatrices, adapters: StepAdapters
    ) -> None:
        self._kernels = kernels
        self._linear = linear
        self._matrices = matrices
        self._adapters = adapters

    def __call__(self, x: Tensor) -> Tensor:
        if (slots_T := self._adapters.slots_T) is None:
            return self._linear(x)
        return self._linear(x, addend=self._kernels.adapt(x, slots_T, self._matrices))
