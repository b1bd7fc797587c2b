"""Layers to whose outputs the adapters of a step's tokens add."""

from torch import Tensor

from text_generation_server.kernels.interface import AdaptedPairs, AdapterMatrices, Kernels, LinearKernel, Routes


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

    def __call__(self, x: Tensor, *, addend: Tensor | None = None) -> Tensor:
        if (slots_T := self._adapters.slots_T) is None:
            return self._linear(x, addend=addend)
        assert addend is None, "the addend of a layer is what its adapters add"
        return self._linear(x, addend=self._kernels.adapt(x, slots_T, self._matrices))


class ExpertAdapters:
    """What adapters add to the products of all experts of a layer. None: no adapter changes the product."""

    def __init__(
        self, kernels: Kernels, gate_up: AdapterMatrices | None, down: AdapterMatrices | None, adapters: StepAdapters
    ) -> None:
        self._kernels = kernels
        self._gate_up = gate_up
        self._down = down
        self._adapters = adapters

    def of_step(self, routes: Routes) -> AdaptedPairs | None:
        if (slots_T := self._adapters.slots_T) is None or (self._gate_up is None and self._down is None):
            return None
        return AdaptedPairs(self._kernels, self._kernels.pair_slots(slots_T, routes), self._gate_up, self._down)

    def of_layer(self, x: Tensor, matrices: AdapterMatrices | None) -> Tensor | None:
        """What adapters add to a layer beside the experts, float32 [T, N]."""
        if matrices is None or (slots_T := self._adapters.slots_T) is None:
            return None
        return self._kernels.adapt(x, slots_T, matrices)


class VocabularyAdapters:
    """What adapters add to the embedding and to the head. None: no adapter changes it."""

    def __init__(self, kernels: Kernels, embedding: AdapterMatrices | None, head: AdapterMatrices | None) -> None:
        self._kernels = kernels
        self._embedding = embedding
        self._head = head

    def embedded(self, x_TH: Tensor, ids_T: Tensor, slots_T: Tensor | None) -> Tensor:
        """The embeddings x of the ids, and what adapters add to them."""
        if slots_T is None or self._embedding is None:
            return x_TH
        return self._kernels.adapt_embeddings(x_TH, ids_T, slots_T, self._embedding)

    def of_head(self, hidden_TH: Tensor, slots_T: Tensor | None) -> Tensor | None:
        """The addend of the head's product, in float32."""
        if slots_T is None or self._head is None:
            return None
        return self._kernels.adapt(hidden_TH, slots_T, self._head)
