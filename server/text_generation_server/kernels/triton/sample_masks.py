"""Tokens that rows cannot choose: their logits become minus infinity, as if a cut had excluded them.

Allowed tokens: one program for each row that lists them. It keeps the logits of the listed tokens, overwrites the row
with minus infinity, and writes the kept logits back.

Bans: a ban holds if the output is short enough and the newest ids of the row's history are those before the banned
token. Each program tests BANS bans at once, id by id from the newest one. The history is on the device, where the step
before has appended its token.

Masks: a program reads the bits of FILLED tokens of a row. The logits of tokens that stay are neither read nor written.
"""

import triton
import triton.language as tl
from torch import Tensor

from text_generation_server.kernels.interface import WORD_BITS, Allowed, Bans, Choices, Masks
from text_generation_server.kernels.triton.sample_prepare import MINUS_INFINITY

MAX_ALLOWED = 1024  # most tokens that a row lists: a power of two
FILLED = 4096  # number of logits that a program overwrites at a time
BANS = 128
WARPS = 8


def exclude_tokens(logits_RV: Tensor, choices: Choices) -> None:
    if choices.allowed is not None:
        _allow_listed(logits_RV, choices.allowed)
    if choices.bans is not None:
        _ban_tokens(logits_RV, choices, choices.bans)
    if choices.masks is not None:
        apply_masks(logits_RV, choices.masks)


def _allow_listed(logits_RV: Tensor, allowed: Allowed) -> None:
    rows, width = allowed.tokens_AW.shape
    assert width <= MAX_ALLOWED and allowed.tokens_AW.is_contiguous()
    _allow[(rows,)](
        logits_RV, allowed.rows_A, allowed.tokens_AW, width,
        VOCABULARY=logits_RV.shape[1], STRIDE=logits_RV.stride(0), LISTED=MAX_ALLOWED, BLOCK=FILLED, num_warps=WARPS,
    )  # fmt: skip


def _ban_tokens(logits_RV: Tensor, choices: Choices, bans: Bans) -> None:
    count = len(bans.tokens_E)
    assert choices.history.stride(1) == 1
    _ban[(triton.cdiv(count, BANS),)](
        logits_RV, bans.rows_E, bans.tokens_E, bans.until_E, bans.offsets, bans.before, choices.rows_R,
        choices.prompt_lengths_R, choices.lengths, choices.history, choices.history.stride(0), count,
        STRIDE=logits_RV.stride(0), BLOCK=BANS,
    )  # fmt: skip


def apply_masks(logits_RV: Tensor, masks: Masks) -> None:
    rows, vocabulary = len(masks.rows_M), logits_RV.shape[1]
    assert masks.bits_MW.stride(1) == 1 and masks.bits_MW.shape[1] * WORD_BITS >= vocabulary
    _mask[(rows, triton.cdiv(vocabulary, FILLED))](
        logits_RV, masks.rows_M, masks.bits_MW, masks.bits_MW.stride(0),
        VOCABULARY=vocabulary, STRIDE=logits_RV.stride(0), BLOCK=FILLED, BITS=WORD_BITS, num_warps=WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width"])
def _allow(
    logits, rows_A, tokens_AW, width,
    VOCABULARY: tl.constexpr, STRIDE: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0).to(tl.int64)
    row = logits + tl.load(rows_A + own).to(tl.int64) * STRIDE
    i = tl.arange(0, LISTED)
    token = tl.load(tokens_AW + own * width + i, mask=i < width, other=-1)
    kept = tl.load(row + token, mask=token >= 0, other=0.0)
    tl.debug_barrier()  # no logit is overwritten before all listed ones are kept
    for first in range(0, VOCABULARY, BLOCK):
        j = first + tl.arange(0, BLOCK)
        tl.store(row + j, tl.full([BLOCK], MINUS_INFINITY, tl.float32), mask=j < VOCABULARY)
    tl.debug_barrier()
    tl.store(row + token, kept, mask=token >= 0)


@triton.jit(do_not_specialize=["history_stride", "count"])
def _ban(
    logits, rows_E, tokens_E, until_E, offsets, before, rows_R, prompt_lengths_R, lengths, history, history_stride,
    count, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ban = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = ban < count
    row = tl.load(rows_E + ban, mask=inside, other=0)
    own = tl.load(rows_R + row, mask=inside, other=0).to(tl.int64)
    length = tl.load(lengths + own, mask=inside, other=0)
    made = length - tl.load(prompt_lengths_R + row, mask=inside, other=0)
    holds = inside & (made < tl.load(until_E + ban, mask=inside, other=0))
    end = tl.load(offsets + ban + 1, mask=inside, other=0)
    size = end - tl.load(offsets + ban, mask=inside, other=0)
    longest = tl.max(tl.where(holds, size, 0), 0)
    back = 1  # number of places before the next token
    while back <= longest:
        tested = holds & (back <= size)
        is_there = tested & (back <= length)
        asked = tl.load(before + end - back, mask=tested, other=0)
        known = tl.load(history + own * history_stride + length - back, mask=is_there, other=0)
        holds = holds & ((back > size) | (is_there & (asked == known)))
        back += 1
    at = logits + row.to(tl.int64) * STRIDE + tl.load(tokens_E + ban, mask=inside, other=0)
    tl.store(at, tl.full([BLOCK], MINUS_INFINITY, tl.float32), mask=holds)


@triton.jit(do_not_specialize=["words"], do_not_specialize_on_alignment=["rows_M", "bits_MW"])
def _mask(
    logits, rows_M, bits_MW, words,
    VOCABULARY: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0).to(tl.int64)
    row = logits + tl.load(rows_M + own).to(tl.int64) * STRIDE
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCABULARY
    word = tl.load(bits_MW + own * words + token // BITS, mask=inside, other=0)
    is_excluded = inside & (((word >> (token % BITS)) & 1) == 0)
    tl.store(row + token, tl.full([BLOCK], MINUS_INFINITY, tl.float32), mask=is_excluded)
