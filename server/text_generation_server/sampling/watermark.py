"""Watermarks a text by favouring a "green" part of the vocabulary, drawn from the previous token.

A Watermark for Large Language Models, Kirchenbauer et al. 2023 (https://arxiv.org/abs/2301.10226), with TGI's key, so
that its detectors find it.

torch draws the list on the CPU, so the host must know the previous token. It is copied to the host before the step's
forward pass is launched: the host waits for the step before, while the GPU computes the forward pass.
"""

from collections.abc import Callable

import numpy as np
import torch

from text_generation_server.device.transfers import Moment, fetch, send
from text_generation_server.step.results import Pending
from text_generation_server.step.rows import Rows

HASH_KEY = 15485863


def newest_tokens(rows: Rows, index: tuple[int, ...], mark: Callable[[], Moment]) -> Pending[list[int]]:
    """The newest known token of each of the rows `index`, in their order. To be called before the step's forward pass
    is launched."""
    last = rows.known[list(index)] - 1
    rows_W, positions_W = send([np.array(index, np.int32), last.astype(np.int32)], rows.device)
    ids_W = fetch(rows.history[rows_W, positions_W])
    copied = mark()

    def read() -> list[int]:
        copied.wait()
        return [int(token) for token in ids_W.tolist()]

    return Pending(copied, read)


def green_list(previous_token: int, vocabulary: int, gamma: float) -> torch.Tensor:
    """The favoured ids after `previous_token`, as int64 [int(vocabulary * gamma)]."""
    generator = torch.Generator().manual_seed(HASH_KEY * previous_token)
    return torch.randperm(vocabulary, generator=generator)[: int(vocabulary * gamma)]
