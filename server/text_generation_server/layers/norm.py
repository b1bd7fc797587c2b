"""The norms of hidden states, of both kinds, alone or after an addition."""

from torch import Tensor

from text_generation_server.kernels.interface import Kernels


class RmsNorm:
    def __init__(self, kernels: Kernels, weight_H: Tensor, eps: float) -> None:
        self._kernels = kernels
        self._weight = weight_H
        self._eps = eps

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self._kernels.rms_norm(x_TH, self._weight, self._eps)

    def of_sum(self, x_TH: Tensor, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), in one kernel. May write into its inputs."""
        return self._kernels.add_rms_norm(x_TH, residual_TH, self._weight, self._eps)


class LayerNorm:
    def __init__(self, kernels: Kernels, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> None:
        self._kernels = kernels
        self._weight = weight_H
        self._bias = bias_H
        self._eps = eps

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self._kernels.layer_norm(x_TH, self._weight, self._bias, self._eps)

    def of_sum(self, x_TH: Tensor, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernels.add_layer_norm(x_TH, residual_TH, self._weight, self._bias, self._eps)


HiddenNorm = RmsNorm | LayerNorm
