"""What every kernel backend offers. Legend of shapes: see the package's docstring."""

from typing import Protocol

from torch import Tensor


class Kernels(Protocol):
    def embed(self, ids_T: Tensor, weight_VH: Tensor) -> Tensor:
        """Rows of the embedding table."""
        ...

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """x / rms(x) in float32, rounded to x's type, then times the weight (transformers' order)."""
        ...

    def add_rms_norm(self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)"""
        ...

    def rope_and_store_kv(
        self, qkv: Tensor, heads: tuple[int, int], cos_LD: Tensor, sin_LD: Tensor, positions_T: Tensor,
        kv_SGD: Tensor, slots_T: Tensor,
    ) -> Tensor:  # fmt: skip
        """Splits qkv [T, (H + 2G) * D] with heads = (H, G); writes rotated keys and the values into their slots of
        kv [S + 1, 2G, D] (keys first); returns the rotated queries [T, H, D]. cos and sin are float32 [L, D / 2]."""
        ...

    def attend_decode(
        self, q_RHD: Tensor, kv_SGD: Tensor, table: Tensor, rows_R: Tensor, lengths_R: Tensor, scale: float
    ) -> Tensor:
        """One query for each row, at position length - 1, over the row's slots table[row, :length]. [R, H, D]

        What the extra slot of kv holds is undefined before and after.
        """
        ...

    def attend_prefill(
        self, q_THD: Tensor, kv_SGD: Tensor, table: Tensor, row: int, start: int, scale: float
    ) -> Tensor:
        """Queries at positions start … start + T - 1 of one row, each over the row's positions up to its own."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2I] → silu of the first half times the second half, [T, I]"""
        ...

    def sample(self, logits_RV: Tensor, noise_RV: Tensor | None) -> tuple[Tensor, Tensor]:
        """(ids int64 [R], log-probabilities float32 [R]): the argmax of log-probability + noise; ties: lowest id."""
        ...

    def gumbel_noise(self, seeds_R: Tensor, positions_R: Tensor, vocabulary: int) -> Tensor:
        """float32 [R, V], a pure function of (seed, position, token). Seeds are int64."""
        ...

    def advance(self, history: Tensor, lengths: Tensor, rows_R: Tensor, ids_R: Tensor) -> None:
        """history[row, length] = id; length += 1, for each of the rows."""
        ...
