"""Two kernels around a decode step: one gathers its ids, positions and lengths on the device, the other appends its
tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


def place(
    rows_R: Tensor, slots_R: Tensor, history: Tensor, table: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    count = len(rows_R)
    assert rows_R.is_contiguous() and slots_R.is_contiguous() and history.is_contiguous() and table.is_contiguous()
    ids_R, positions_R, lengths_R = torch.empty((3, count), dtype=torch.int32, device=history.device)
    _place[(triton.cdiv(count, BLOCK),)](
        rows_R, slots_R, history, table, lengths, ids=ids_R, positions=positions_R, lengths_out=lengths_R,
        history_width=history.shape[1], table_width=table.shape[1], count=count, BLOCK=BLOCK,
    )  # fmt: skip
    return ids_R, positions_R, lengths_R


@triton.jit(
    do_not_specialize=["history_width", "table_width", "count"],
    do_not_specialize_on_alignment=["rows", "slots", "ids", "positions", "lengths_out"],
)
def _place(
    rows, slots, history, table, lengths, ids, positions, lengths_out, history_width, table_width, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = r < count
    row = tl.load(rows + r, mask=inside, other=0).to(tl.int64)
    slot = tl.load(slots + r, mask=inside, other=0)
    length = tl.load(lengths + row, mask=inside, other=0)
    position = length - 1
    tl.store(table + row * table_width + position, slot, mask=inside)
    tl.store(ids + r, tl.load(history + row * history_width + position, mask=inside, other=0), mask=inside)
    tl.store(positions + r, position, mask=inside)
    tl.store(lengths_out + r, length, mask=inside)


def advance(history: Tensor, lengths: Tensor, rows_R: Tensor, ids_R: Tensor) -> None:
    count = len(rows_R)
    assert history.is_contiguous() and rows_R.is_contiguous() and ids_R.is_contiguous()
    _advance[(triton.cdiv(count, BLOCK),)](history, lengths, rows_R, ids_R, history.shape[1], count=count, BLOCK=BLOCK)


@triton.jit(do_not_specialize=["width", "count"], do_not_specialize_on_alignment=["rows", "ids"])
def _advance(history, lengths, rows, ids, width, count, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = r < count
    row = tl.load(rows + r, mask=inside, other=0).to(tl.int64)
    length = tl.load(lengths + row, mask=inside, other=0)
    tl.store(history + row * width + length, tl.load(ids + r, mask=inside, other=0), mask=inside)
    tl.store(lengths + row, length + 1, mask=inside)
