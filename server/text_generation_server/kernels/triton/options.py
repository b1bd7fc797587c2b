"""The options of attention as arguments of kernels. The names in capital letters are constants of a kernel, so that
options that a layer does not use compile away.
"""

import math
from typing import Any

import triton
import triton.language as tl

from text_generation_server.kernels.interface import AttentionOptions

LOG2E = tl.constexpr(math.log2(math.e))


def kernel_arguments(options: AttentionOptions) -> dict[str, Any]:
    """Scores are multiplied by log2(e), for exponentials in base 2. With a cap, `scale` makes tanh's arguments."""
    is_capped = options.softcap is not None
    return {
        "scale": options.scale / options.softcap if options.softcap is not None else options.scale * LOG2E.value,
        "cap": (options.softcap or 0.0) * LOG2E.value,
        "slopes": options.slopes_H,
        "sinks": options.sinks_H,
        "CAPPED": is_capped,
        "SLOPED": options.slopes_H is not None,
        "SUNK": options.sinks_H is not None,
        "WINDOW": options.window or 0,  # 0: a query sees all keys up to its own
    }


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    """The first position that a query sees."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    return first


@triton.jit
def tanh(x):
    """(1 - e^-2|x|) / (1 + e^-2|x|); near 0, where the difference would cancel, the polynomial of Cephes' tanhf."""
    z = x * x
    y = -5.70498872745e-3 * z + 2.06390887954e-2
    y = y * z - 5.37397155531e-2
    y = y * z + 1.33314422036e-1
    y = y * z - 3.33332819422e-1
    shrunk = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    outside = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(tl.abs(x) < 0.625, y * z * x + x, tl.where(x < 0, -outside, outside))


@triton.jit
def alter_scores(score_MN, position_M, key_N, cap, slope_M, CAPPED: tl.constexpr, SLOPED: tl.constexpr):
    if CAPPED:
        score_MN = tanh(score_MN) * cap
    if SLOPED:
        score_MN += slope_M[:, None] * (key_N[None, :] - position_M[:, None]).to(tl.float32)
    return score_MN


@triton.jit
def find_visible(position_M, key_N, is_read_N, SLOPED: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys of a tile each query attends to."""
    visible_MN = key_N[None, :] <= position_M[:, None]
    if WINDOW > 0:
        visible_MN = visible_MN & (key_N[None, :] > position_M[:, None] - WINDOW)
    if WINDOW > 0 or SLOPED:  # the positions of queries may lie behind the end of a split
        visible_MN = visible_MN & is_read_N[None, :]
    return visible_MN
