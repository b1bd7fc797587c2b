"""Bias and penalties, which change the logits of single tokens.

Repetition: x / r where x ≥ 0, x · r where x < 0, once for each token of prompt and output. Frequency: x - f · n, where
n counts the token's uses in the output. Presence: x - p where n > 0.

A row's tokens are counted in a row of words, one word for each token of the vocabulary. Then each position of the
history exchanges its token's word for zero. The first position of a token gets the count and applies the penalties; all
others get zero. Both operations are atomic on integers, so the result does not depend on their order. At the end the
words are zeros again, and only words of the history's tokens have been read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_server.kernels.interface import Bias, Choices

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
