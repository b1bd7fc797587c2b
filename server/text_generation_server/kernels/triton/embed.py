"""Rows of the embedding table: out[t] = weight[ids[t]]."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_server.kernels.triton.tuning import find_tile


def embed(ids_T: Tensor, weight_VH: Tensor) -> Tensor:
    tokens, hidden = len(ids_T), weight_VH.shape[1]
    assert ids_T.is_contiguous() and weight_VH.is_contiguous()
    tile = find_tile("embed", 1, 1, weight_VH.dtype, weight_VH.device)
    out = torch.empty((tokens, hidden), dtype=weight_VH.dtype, device=weight_VH.device)
    _embed[(tokens, triton.cdiv(hidden, tile.columns))](
        ids_T, weight_VH, out, HIDDEN=hidden, COLUMNS=tile.columns, num_warps=tile.warps
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _embed(ids, weight, out, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(ids + token).to(tl.int64)
    x = tl.load(weight + row * HIDDEN + column, mask=column < HIDDEN, other=0.0)
    tl.store(out + token * HIDDEN + column, x, mask=column < HIDDEN)
