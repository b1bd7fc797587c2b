"""Changes of single tokens' logits before a draw: tokens that rows cannot choose, bias and penalties.

Allowed tokens, bans and masks overwrite logits with minus infinity, as if a cut had excluded the tokens.

Allowed tokens: one program for each row that lists them. It keeps the logits of the listed tokens, overwrites the row
with minus infinity, and writes the kept logits back.

Bans: a ban holds if the output is short enough and the newest ids of the row's history are those before the banned
token. Each program tests BANS bans at once, id by id from the newest one. The history is on the device, where the step
before has appended its token.

Masks: a program reads the bits of FILLED tokens of a row. The logits of tokens that stay are neither read nor written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_server.kernels.interface import WORD_BITS, Allowed, Bans, Bias, Choices, Masks
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
        logits_RV, bans.rows_E, bans.tokens_E, bans.until_E, bans.offsets, before=bans.before, rows_R=choices.rows_R,
        prompt_lengths_R=choices.prompt_lengths_R, lengths=choices.lengths, history=choices.history,
        history_stride=choices.history.stride(0), count=count, STRIDE=logits_RV.stride(0), BLOCK=BANS,
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


# Penalties. Repetition: x / r where x ≥ 0, x · r where x < 0, once for each token of prompt and output. Frequency: x -
# f · n, where n counts the token's uses in the output. Presence: x - p where n > 0.
#
# A row's tokens are counted in a row of words, one word for each token of the vocabulary. Then each position of the
# history exchanges its token's word for zero. The first position of a token gets the count and applies the penalties;
# all others get zero. Both operations are atomic on integers, so the result does not depend on their order. At the end
# the words are zeros again, and only words of the history's tokens have been read.
POSITIONS = 1024  # number of positions that a program processes at a time
SPLITS = 8  # number of programs for one row
COUNTED_ROWS = 64  # number of rows that are counted at a time; bounds the memory of the words
BIASES = 128  # number of biases of a row that a program processes at a time
# Flag bit of a word: the token is in the prompt. The lower bits are the number of uses in the output.
IN_PROMPT = tl.constexpr(1 << 30)


def add_bias(logits_RV: Tensor, bias: Bias) -> None:
    rows, width = bias.tokens_RB.shape
    assert bias.tokens_RB.is_contiguous() and bias.values_RB.is_contiguous()
    _add_bias[(rows,)](
        logits_RV, bias.tokens_RB, bias.values_RB, width, STRIDE=logits_RV.stride(0), BLOCK=BIASES
    )  # fmt: skip


def penalize(logits_RV: Tensor, choices: Choices) -> None:
    rows, vocabulary = logits_RV.shape
    assert choices.history.stride(1) == 1
    words = torch.zeros((min(rows, COUNTED_ROWS), vocabulary), dtype=torch.int32, device=logits_RV.device)
    for first in range(0, rows, COUNTED_ROWS):
        grid = (min(COUNTED_ROWS, rows - first), SPLITS)
        history = (choices.history, choices.history.stride(0), choices.lengths, choices.rows_R)
        penalties = (choices.repetition_penalty_R, choices.frequency_penalty_R, choices.presence_penalty_R)
        _count[grid](
            words, *history, choices.prompt_lengths_R, *penalties, first, VOCABULARY=vocabulary, BLOCK=POSITIONS
        )  # fmt: skip
        _apply[grid](
            logits_RV, words, *history, *penalties, first,
            VOCABULARY=vocabulary, STRIDE=logits_RV.stride(0), BLOCK=POSITIONS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["width"])
def _add_bias(logits, tokens, values, width, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = 0
    while first < width:
        i = first + tl.arange(0, BLOCK)
        token = tl.load(tokens + row * width + i, mask=i < width, other=-1)
        value = tl.load(values + row * width + i, mask=i < width, other=0.0)
        at = logits + row * STRIDE + token
        tl.store(at, tl.load(at, mask=token >= 0, other=0.0) + value, mask=token >= 0)
        first += BLOCK


@triton.jit(do_not_specialize=["history_stride", "first_row"])
def _count(
    words, history, history_stride, lengths, rows_R, prompt_lengths_R, repetition_R, frequency_R, presence_R,
    first_row,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    own, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = first_row + own
    is_output_penalized = (tl.load(frequency_R + i) != 0.0) | (tl.load(presence_R + i) != 0.0)
    if (tl.load(repetition_R + i) != 1.0) | is_output_penalized:
        row = tl.load(rows_R + i).to(tl.int64)
        length = tl.load(lengths + row)
        prompt_length = tl.load(prompt_lengths_R + i)
        first = split * BLOCK
        while first < length:
            position = first + tl.arange(0, BLOCK)
            inside = position < length
            token = tl.load(history + row * history_stride + position, mask=inside, other=0)
            at = words + own * VOCABULARY + token
            is_output = position >= prompt_length
            marks = tl.full([BLOCK], IN_PROMPT, tl.int32)
            tl.atomic_or(at, marks, mask=inside & (is_output == 0), sem="relaxed")
            tl.atomic_add(at, tl.full([BLOCK], 1, tl.int32), mask=inside & is_output, sem="relaxed")
            first += tl.num_programs(1) * BLOCK


@triton.jit(do_not_specialize=["history_stride", "first_row"])
def _apply(
    logits, words, history, history_stride, lengths, rows_R, repetition_R, frequency_R, presence_R, first_row,
    VOCABULARY: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    own, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = first_row + own
    repetition, frequency, presence = tl.load(repetition_R + i), tl.load(frequency_R + i), tl.load(presence_R + i)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        row = tl.load(rows_R + i).to(tl.int64)
        length = tl.load(lengths + row)
        first = split * BLOCK
        while first < length:
            position = first + tl.arange(0, BLOCK)
            inside = position < length
            token = tl.load(history + row * history_stride + position, mask=inside, other=0)
            nothing = tl.zeros([BLOCK], tl.int32)
            word = tl.atomic_xchg(words + own * VOCABULARY + token, nothing, mask=inside, sem="relaxed")
            is_first = inside & (word != 0)
            at = logits + i * STRIDE + token
            x = tl.load(at, mask=is_first, other=0.0)
            x = tl.where(x < 0, x * repetition, tl.div_rn(x, repetition))
            uses = (word & (IN_PROMPT - 1)).to(tl.float32)
            tl.store(at, x - uses * frequency - tl.where(uses > 0, presence, 0.0), mask=is_first)
            first += tl.num_programs(1) * BLOCK
