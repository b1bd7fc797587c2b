"""Watermarks a text by favouring a "green" part of the vocabulary, drawn from the previous token.

A Watermark for Large Language Models, Kirchenbauer et al. 2023 (https://arxiv.org/abs/2301.10226), with TGI's key, so
that its detectors find it.
"""

import torch

HASH_KEY = 15485863


def green_list(previous_token: int, vocabulary: int, gamma: float) -> torch.Tensor:
    """The favoured ids after `previous_token`, as int64 [int(vocabulary * gamma)]."""
    generator = torch.Generator().manual_seed(HASH_KEY * previous_token)
    return torch.randperm(vocabulary, generator=generator)[: int(vocabulary * gamma)]
