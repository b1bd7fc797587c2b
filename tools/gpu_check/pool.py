"""Rows whose keys and values lie in scattered slots; all other slots hold NaN."""

from collections.abc import Sequence

import torch
from torch import Tensor

from text_generation_server.kernels.interface import KvLayer, Segments

NAN = float("nan")
SCALED = (torch.int8, torch.float8_e4m3fn)


def int32(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def random_layer(slots: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> KvLayer:
    shape = (slots + 1, 2 * kv_heads, size)
    if dtype not in SCALED:
        return KvLayer(torch.randn(shape, dtype=dtype, device=device))
    scales = torch.rand(shape[:2], device=device) / 50
    if dtype == torch.int8:
        return KvLayer(torch.randint(-127, 128, shape, dtype=dtype, device=device), scales)
    return KvLayer((torch.randn(shape, device=device) * 100).to(dtype), scales)


def widened(kv: KvLayer) -> KvLayer:
    """The same keys and values in a type that the reference can use: fp8 becomes float32, because torch cannot gather
    fp8 on every device.
    """
    return KvLayer(kv.heads.float(), kv.scales) if kv.heads.dtype == torch.float8_e4m3fn else kv


class Pool:
    """Scattered slots, without slot 0. Entries of the table after a row's end, and rows of padding, point to slots of
    NaN.
    """

    def __init__(
        self, lengths: Sequence[int], kv_heads: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        slots = sum(lengths) + 50
        order = torch.randperm(slots - 1) + 1
        table = torch.full((len(lengths) + 1, max(lengths) + 7), int(order[-1]), dtype=torch.int32)
        used = torch.zeros(slots + 1, dtype=torch.bool)
        for row, length in enumerate(lengths):
            own, order = order[:length], order[length:]
            table[row, :length] = own
            used[own] = True
        table[-1, 0] = slots
        self.kv = random_layer(slots, kv_heads, size, dtype, device)
        poisoned = self.kv.heads if self.kv.scales is None else self.kv.scales
        poisoned[(~used).to(device)] = NAN
        self.table = table.to(device)
        self.lengths = lengths
        self.device = device
        self.scale = size**-0.5

    def decode_arguments(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The arguments (rows, lengths) of a decode step."""
        return int32(rows, self.device), int32([self.lengths[row] for row in rows], self.device)

    def segments(self, runs: Sequence[tuple[int, int, int]]) -> Segments:
        offsets = [0]
        for _, start, end in runs:
            offsets.append(offsets[-1] + end - start)
        rows, starts, ends = (
            int32(values, self.device) for values in ([r[0] for r in runs], [r[1] for r in runs], offsets)
        )
        return Segments(rows, starts, ends, offsets[-1])
