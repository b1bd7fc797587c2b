"""Attention of a step: decode rows in one kernel, prompt chunks in another, both into one result.

A decode row goes through the same kernel whether the step has chunks or not, so that its bits do not depend on them.
"""

import torch
from torch import Tensor

from text_generation_server.kernels.interface import AttentionOptions, KvLayer, Segments
from text_generation_server.kernels.triton.attend_decode import attend_decode
from text_generation_server.kernels.triton.attend_prefill import attend_prefill


def attend(
    q_THD: Tensor,
    kv: KvLayer,
    table: Tensor,
    rows_R: Tensor,
    lengths_R: Tensor,
    segments: Segments | None,
    options: AttentionOptions,
) -> Tensor:
    out = torch.empty_like(q_THD)
    padding = len(rows_R) + (segments.tokens if segments is not None else 0)
    if padding < len(out):
        out[padding:].zero_()
    if len(rows_R):
        attend_decode(q_THD, kv, table, rows_R, lengths_R, options=options, out_THD=out)
    if segments is not None:
        # After the decode rows: tokens of length 0 get zeros there, and their results here if they are a chunk's.
        attend_prefill(q_THD, kv, table, segments, options, out_THD=out)
    return out
